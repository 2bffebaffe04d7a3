"""SmoothQuant (Xiao et al., 2023): what is difficult in the inputs is put into the weights, feature by feature."""

from typing import TYPE_CHECKING

from outliers.quantization.transforms import Magnitudes, Number, Transform

if TYPE_CHECKING:
    import torch

LEAST = 2.0**-60  # a magnitude, in float32; what is smaller is as good as zero
GRID = tuple(number / 20 for number in range(21))  # strengths that a search tries


def factors(weight: "torch.Tensor", magnitudes: Magnitudes, strength: float) -> "torch.Tensor":
    """s_j = max|X_j|^a / max|W_j|^(1−a), equation 4 there: (features,), in float32 at least.

    max|W_j| is over all projections that share the input: the factors take the place of its norm's, which all of them
    read. A feature that was always zero, or that meets zeros alone, keeps its scale.
    """
    dtype = weight.double().dtype if weight.itemsize == 8 else weight.float().dtype
    inputs, weights = (magnitude.to(weight.device, dtype) for magnitude in magnitudes[:2])
    ratios = inputs.pow(strength) / weights.pow(1 - strength)
    return ratios.masked_fill((inputs < LEAST) | (weights < LEAST), 1)


SMOOTHING = Transform(
    factors,
    lambda hidden_states, factors: hidden_states / factors,
    lambda weight, factors: weight * factors,
    calibrated=True,
    number=Number(0.5, "a strength from 0 to 1", lambda strength: 0 <= strength <= 1, GRID),
    by_feature=True,
    label="smoothed",
)
