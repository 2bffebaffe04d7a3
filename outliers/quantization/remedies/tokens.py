"""Decomposition by token: massive values stand in a few of them, which are multiplied exactly."""

from collections.abc import Callable

import torch

Product = Callable[[torch.Tensor], torch.Tensor]


def multiply_by_token(hidden_states: torch.Tensor, number: float, exact: Product, quantized: Product) -> torch.Tensor:
    """Rows of (tokens, features) with |x| ≥ the number by the exact product, the others by the quantized one, whose
    scales are over them alone: (tokens, outputs)."""
    low, high = hidden_states.aminmax(dim=1)
    large = (high >= number) | (low <= -number)
    if not large.any():
        return quantized(hidden_states)
    if large.all():
        return exact(hidden_states)
    others = quantized(hidden_states[~large])
    product = others.new_empty(len(hidden_states), others.shape[1])
    product[~large] = others
    product[large] = exact(hidden_states[large]).to(others.dtype)
    return product
