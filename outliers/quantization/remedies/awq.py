"""AWQ (Lin et al., 2023): weights that meet large inputs are rounded finer, feature by feature."""

import torch

from outliers.quantization.magnitudes import Magnitudes
from outliers.quantization.remedies.smoothing import LEAST, in_digits


def factors(weight: torch.Tensor, magnitudes: Magnitudes, exponent: float) -> torch.Tensor:
    """s_j = (mean|X_j| / mean|X|)^a, equation 5 there but for a common factor: (features,), in float32 at least. A
    feature that was always zero keeps its scale."""
    sums = in_digits(magnitudes.sums, weight)
    return (sums / sums.mean()).pow(exponent).masked_fill(sums < LEAST, 1)
