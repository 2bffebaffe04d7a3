"""Features sorted by magnitude, so that features that share a scale are alike."""

import torch

from outliers.quantization.magnitudes import Magnitudes


def order(weight: torch.Tensor, magnitudes: Magnitudes) -> torch.Tensor:
    """Return the features by decreasing magnitude of their inputs, int64 (features,)."""
    return magnitudes.inputs.to(weight.device).argsort(descending=True, stable=True)
