"""Draws: repetitions of a measurement with embeddings perturbed by 1e-6 and ties of weights rounded at random.

They show the scatter of a result through rounding alone.
"""

import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, partial

import torch
from torch import nn
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy import input_embeddings
from outliers.models.hooks import attached, independent
from outliers.quantization.convert import quantized_layers

MOST_KEPT = 2**25  # entries of embeddings whose factors are cached for the next variant: 134 MB
DRAWN = "embeddings, ties"  # what differs between draws, as written in rows
SIZE = 1e-6  # relative perturbation, too small to affect fp32 perplexity


@contextmanager
def drawn(model: PreTrainedModel, draw: int) -> Iterator[None]:
    """Multiply every entry of the input embeddings by 1 + 1e-6 · z within this context, with z standard normal.

    All stacks of layers share the factors. For pictures, the output of the patch convolution is multiplied. Ties of
    weights between two codes are rounded at random, see `break_ties`. A single code that flips changes the rounding in
    all later layers, which shows how much rounding alone scatters a result. Parameters do not change, nor does a head
    that is tied to them.

    Args:
        model: a causal language model in float32, quantized or not, resident or streamed.
        draw: seed of z and of ties; 0 changes nothing.
    """
    if draw == 0:
        yield
        return
    factors = cache(partial(_factors, draw))
    multiplied = independent(partial(_multiplied, factors))
    handles = (embedding.register_forward_hook(multiplied) for embedding in input_embeddings(model))
    with attached(handles), untied(model, draw):
        yield


@contextmanager
def untied(model: PreTrainedModel, draw: int) -> Iterator[None]:
    """Round ties of weights by the seed of a draw within this context, in a quantized model and models made from it."""
    layers = quantized_layers(model)
    for module in (model, *layers):
        module.draw = draw
    try:
        yield
    finally:
        for module in (model, *layers):
            del module.draw
        for layer in layers:
            layer.drawn = None  # it holds copies of all weights, and the model may live on for its shared codes


def _factors(draw: int, shape: torch.Size) -> torch.Tensor:
    return (_kept_factors if math.prod(shape) <= MOST_KEPT else _new_factors)(draw, shape)


def _new_factors(draw: int, shape: torch.Size) -> torch.Tensor:
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(draw))
    return noise.mul_(SIZE).add_(1)


_kept_factors = lru_cache(maxsize=2)(_new_factors)  # for draws 1 and 2 of each scheme; draw 0 has no factors


def _multiplied(factors: Callable, embedding: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    if isinstance(embedding, nn.Embedding):
        return output * factors(embedding.weight.shape)[inputs[0].cpu()].to(output.device)
    return output * factors(output.shape[1:]).to(output.device)


def value_over_draws(values: list[float]) -> dict:
    """Return the row fields of a value over draws: its mean, and the sample standard deviation if there are several."""
    scatter = {"standard_deviation": statistics.stdev(values)} if len(values) > 1 else {}
    return {"value": statistics.fmean(values), **scatter}


def check_draws(draws: int, dtype: str) -> None:
    """Raise UserError if several draws in a dtype would not differ."""
    if draws > 1 and dtype != "float32":
        raise UserError(
            f"{draws} draws in {dtype}, which has too few digits for a change of {SIZE:g}; expected float32 or 1 draw"
        )
