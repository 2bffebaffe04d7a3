"""Features in the order of their magnitudes, so that those which share a scale are alike."""

import torch

from outliers.quantization.magnitudes import Magnitudes


def order(weight: torch.Tensor, magnitudes: Magnitudes) -> torch.Tensor:
    """The features with the largest inputs first, int64 (features,)."""
    return magnitudes.inputs.to(weight.device).argsort(descending=True, stable=True)
