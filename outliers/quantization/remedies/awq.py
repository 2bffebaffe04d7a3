"""AWQ (Lin et al., 2023): weights that meet large inputs are rounded finer, feature by feature."""

from typing import TYPE_CHECKING

from outliers.quantization.remedies.smoothing import LEAST, SMOOTHING
from outliers.quantization.transforms import SEARCH, Magnitudes, Number

if TYPE_CHECKING:
    import torch


def factors(weight: "torch.Tensor", magnitudes: Magnitudes, exponent: float) -> "torch.Tensor":
    """s_j = (mean|X_j| / mean|X|)^a, equation 5 there but for a common factor: (features,), in float32 at least. A
    feature that was always zero keeps its scale."""
    sums = magnitudes.sums.to(weight.device, weight.double().dtype if weight.itemsize == 8 else weight.float().dtype)
    return (sums / sums.mean()).pow(exponent).masked_fill(sums < LEAST, 1)


AWQ = SMOOTHING._replace(  # which scales features too
    fit=factors,
    number=Number(
        SEARCH,
        "an exponent from 0 to 1",
        lambda exponent: 0 <= exponent <= 1,
        tuple(number / 20 for number in range(20)),
    ),
    label="AWQ",
)
