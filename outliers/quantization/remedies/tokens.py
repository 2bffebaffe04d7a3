"""Decomposition by token: the few tokens with massive values are multiplied exactly."""

from collections.abc import Callable

import torch

Product = Callable[[torch.Tensor], torch.Tensor]


def multiply_by_token(hidden_states: torch.Tensor, number: float, exact: Product, quantized: Product) -> torch.Tensor:
    """Return the product (tokens, outputs) of hidden states (tokens, features), exact for tokens with large values.

    Tokens with a value |x| ≥ number use the exact product, the others the quantized one, whose scales are computed over
    these others alone.
    """
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
