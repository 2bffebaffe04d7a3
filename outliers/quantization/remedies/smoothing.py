"""SmoothQuant (Xiao et al., 2023): what is difficult in the inputs is put into the weights, feature by feature."""

import torch

from outliers.quantization.magnitudes import Magnitudes

LEAST = 2.0**-60  # a magnitude, in float32; what is smaller is as good as zero


def in_digits(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A tensor where a weight is, in its dtype, or in float32 where that has fewer digits."""
    return tensor.to(weight.device, torch.promote_types(weight.dtype, torch.float32))


def factors(weight: torch.Tensor, magnitudes: Magnitudes, strength: float) -> torch.Tensor:
    """s_j = max|X_j|^a / max|W_j|^(1−a), equation 4 there: (features,), in float32 at least.

    max|W_j| is over all projections that share the input: the factors take the place of its norm's, which all of them
    read. A feature that was always zero, or that meets zeros alone, keeps its scale.
    """
    inputs, weights = (in_digits(magnitude, weight) for magnitude in magnitudes[:2])
    ratios = inputs.pow(strength) / weights.pow(1 - strength)
    return ratios.masked_fill((inputs < LEAST) | (weights < LEAST), 1)
