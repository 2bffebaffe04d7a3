"""SmoothQuant (Xiao et al., 2023): scale features so that weights share the inputs' difficulty."""

import torch

from outliers.quantization.magnitudes import InputSummary

LEAST = 2.0**-60  # smallest magnitude, in float32, that is not treated as zero


def match_precision(tensor: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device of a weight, in the weight's dtype or in float32, whichever is more precise."""
    return tensor.to(weight.device, torch.promote_types(weight.dtype, torch.float32))


def factors(weight: torch.Tensor, magnitudes: InputSummary, strength: float) -> torch.Tensor:
    """Return the factors s_j = max|X_j|^a / max|W_j|^(1−a) (equation 4): (features,), in float32 at least.

    max|W_j| is taken over all projections that share the input: in SmoothQuant the factors are absorbed by the norm
    whose output all of them read. A feature whose inputs or weights are all zero keeps its scale.
    """
    inputs, weights = (match_precision(magnitude, weight) for magnitude in magnitudes[:2])
    ratios = inputs.pow(strength) / weights.pow(1 - strength)
    return ratios.masked_fill((inputs < LEAST) | (weights < LEAST), 1)
