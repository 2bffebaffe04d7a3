"""Weights between two codes: rounding decides by one bit which code they get, and a draw decides it anew."""

import torch
from outlier_kernels.formats import ARITHMETICS, FORMATS
from outlier_kernels.reference import Quantized
from outlier_kernels.reference_formats import rounded

from outliers.quantization.schemes import Scheme

HALF_UNIT = 2.0**-24  # in the last place of float32, relative to the weight: how far it may be from the middle
MOVE, MOVE_IN_HALF = 2.0**-22, 2.0**-9  # of a weight: beyond what float32, or float16, loses until it is rounded


def untie(weight: torch.Tensor, codes: Quantized, scheme: Scheme, draw: int) -> torch.Tensor:
    """The weight with each entry between two codes moved up or down, as often by a draw; itself where there is none.

    How such an entry falls depends on the order of operations: `127 · (w / max)` and `(127 · w) / max` differ in it.
    What moves is as little as float32 needs to tell both apart, so that a scale stays where it is.

    weight: float (outputs, features), which has these codes, or compensated ones, under the scheme. draw: seed.
    """
    half = ARITHMETICS[scheme.arithmetic].half
    places = _ties(weight.half() if half else weight, codes, scheme)
    if not len(places):
        return weight
    up = torch.randint(2, places.shape, generator=torch.Generator().manual_seed(draw)).to(weight.device)
    moved = weight.to(torch.promote_types(weight.dtype, torch.float32), copy=True).contiguous()
    moved.view(-1)[places] *= 1 + (2 * up - 1) * (MOVE_IN_HALF if half else MOVE)
    return moved


def _ties(weight: torch.Tensor, codes: Quantized, scheme: Scheme) -> torch.Tensor:
    """The entries between two codes, int64 (ties,), counted row by row: of those that float32 finds, those that are
    there in float64."""
    element, (_, groups) = FORMATS[scheme.weights.format].element, codes.scale.shape
    grouped = weight.reshape(len(weight), groups, -1)

    def tie(scaled: torch.Tensor, distance: float) -> torch.Tensor:
        below, above = (scaled * (1 + side * distance) for side in (-1, 1))
        return (
            below.round_() != above.round_() if element is None else rounded(below, element) != rounded(above, element)
        )

    found = tie((grouped.float() / codes.scale[..., None]).flatten(), MOVE).nonzero()[:, 0]
    scale = codes.scale.expand(len(weight), groups).flatten()[found // grouped.shape[2]]
    return found[tie(weight.reshape(-1)[found].double() / scale.double(), HALF_UNIT)]
