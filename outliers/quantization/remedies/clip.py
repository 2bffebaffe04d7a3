"""Inputs clamped at a quantile of their magnitudes, so that few of them do not take the range of all."""

import math

import torch
from outlier_kernels.reference import outlier_columns

from outliers.quantization.schemes import Scheme


def clip(hidden_states: torch.Tensor, quantile: float, per_row: bool, threshold: float | None = None) -> torch.Tensor:
    """Hidden states (tokens, features) with all magnitudes clamped at a quantile of them, in float32 at least.

    Of n magnitudes the quantile q is the ⌈q·n⌉-th from below. NaN and inf stay what they are, and hide nothing.

    Args:
        hidden_states: float.
        quantile: above 0, at most 1, which clamps nothing.
        per_row: whether each token has its own, or all together one, as the quantizer has scales.
        threshold: features with an input of at least this magnitude are left out and as they are, for they are not
            quantized.
    """
    hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    kept = None if threshold is None else ~outlier_columns(hidden_states, threshold)
    magnitudes = (hidden_states if kept is None else hidden_states[:, kept]).abs()
    if not magnitudes.numel():
        return hidden_states
    groups = magnitudes if per_row else magnitudes.view(1, -1)
    above = groups.shape[1] - math.ceil(quantile * groups.shape[1])  # few, and soon found, at a usual quantile
    limit = groups.topk(above + 1, 1).values[:, -1:]
    changes = hidden_states.isfinite() if kept is None else hidden_states.isfinite() & kept
    return torch.where(changes, hidden_states.clamp(-limit, limit), hidden_states)


def clipped(hidden_states: torch.Tensor, quantile: float, scheme: Scheme) -> torch.Tensor:
    """The same as a scheme quantizes its inputs."""
    return clip(hidden_states, quantile, scheme.activations.per_row, scheme.outlier_threshold)
