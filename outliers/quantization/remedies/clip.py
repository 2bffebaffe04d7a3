"""Inputs clamped at a quantile of their magnitudes, so that a few large ones do not determine the scale of all."""

import math

import torch
from outlier_kernels.reference import outlier_columns

from outliers.quantization.schemes import Scheme


def clip(hidden_states: torch.Tensor, quantile: float, per_row: bool, threshold: float | None = None) -> torch.Tensor:
    """Clamp the magnitudes of hidden states (tokens, features) at their quantile; return float32 at least.

    The quantile q of n magnitudes is the ⌈q·n⌉-th smallest. NaN and inf are preserved.

    Args:
        hidden_states: float.
        quantile: above 0, at most 1, which clamps nothing.
        per_row: whether each token has a quantile of its own, as it has a scale of its own.
        threshold: features with an input of at least this magnitude are neither counted nor clamped, because they are
            not quantized.
    """
    hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    kept = None if threshold is None else ~outlier_columns(hidden_states, threshold)
    magnitudes = (hidden_states if kept is None else hidden_states[:, kept]).abs()
    if not magnitudes.numel():
        return hidden_states
    groups = magnitudes if per_row else magnitudes.view(1, -1)
    below = math.ceil(round(quantile * groups.shape[1], 9))  # 0.55 · 100 is more than 55 in binary
    above = groups.shape[1] - below  # few at usual quantiles, so that topk is fast
    limit = groups.topk(above + 1, 1).values[:, -1:]
    changes = hidden_states.isfinite() if kept is None else hidden_states.isfinite() & kept
    return torch.where(changes, hidden_states.clamp(-limit, limit), hidden_states)


def clipped(hidden_states: torch.Tensor, quantile: float, scheme: Scheme) -> torch.Tensor:
    """Clip hidden states in the granularity of a scheme's activations, without its outlier features."""
    return clip(hidden_states, quantile, scheme.activations.per_row, scheme.outlier_threshold)
