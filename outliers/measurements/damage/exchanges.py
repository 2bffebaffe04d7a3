"""The loss of a model of which one role or one layer alone is quantized, or all but it."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.measurements.damage.errors import EXACT
from outliers.metrics.perplexity.measure import Loss, finite_loss, variant_losses
from outliers.models.decoder import inference, run_exchanged
from outliers.models.stream import is_streamed
from outliers.quantization.convert import quantized_parts, skipped
from outliers.variants.quantized import Quantized

ONLY, WITHOUT = "only", "without"
FIELDS = ("role", "layer")  # of a row, which say what a place is


class Exchange(NamedTuple):
    """What is quantized.

    kind: "only" a place, or all "without" it. field: "role" or "layer". place: its name or number.
    """

    kind: str
    field: str
    place: str | int

    def under(self, variant: Quantized) -> Quantized:
        """What a variant is where only these places are under its scheme."""
        place = f"layers.{self.place}" if self.field == "layer" else self.place
        return replace(variant, **{ONLY: {"only": (place,)}, WITHOUT: {"skip": (*variant.skip, place)}}[self.kind])


def exchanges(model: PreTrainedModel, variant: Quantized, field: str) -> list[Exchange]:
    """Every role or every layer of which a variant quantizes something, alone, and then all but it.

    Where there is one place, all but it is nothing.

    Args:
        model: of which the names of modules are looked at, and no weight.
        variant: the scheme, and what it leaves.
        field: "role" or "layer".

    Raises:
        UserError: the variant quantizes only some places.
    """
    if variant.only:
        raise UserError(f"'{variant.name}' quantizes some places already; expected 'skip' in the place of 'only'")
    left = skipped(model, variant.skip, variant.scheme)
    parts = (one for one in quantized_parts(model, variant.scheme) if one.path not in left)
    places = dict.fromkeys(getattr(one, field) for one in parts)
    kinds = (ONLY, WITHOUT) if len(places) > 1 else (ONLY,)
    return [Exchange(kind, field, place) for kind in kinds for place in places]


def exchange_losses(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], variant: Quantized, asked: Sequence[Exchange]
) -> list[list[Loss]]:
    """The loss of each block, for each of some exchanges of one field.

    Of a resident model, what comes before an exchanged layer is computed once for all layers; a streamed model passes
    all of its layers for each exchange, and reads them once.

    Args:
        model: a causal language model, resident or streamed. A resident one may be under the scheme already: its codes
            are then used.
        blocks: token ids, int64 (blocks, T); those of a resident model are read once for each kind of exchange of
            layers, or for each exchange of a role.
        variant: the scheme.
        asked: some of `exchanges`.

    Raises:
        UserError: as `outliers.perplexity`.
    """
    if is_streamed(model) or asked[0].field != "layer":
        return variant_losses(model, blocks, [one.under(variant) for one in asked])
    found = {kind: _by_layer(model, blocks, variant, kind, _layers(asked, kind)) for kind in (ONLY, WITHOUT)}
    return [found[one.kind][one.place] for one in asked]


def _layers(asked: Sequence[Exchange], kind: str) -> list[int]:
    return [one.place for one in asked if one.kind == kind]


@inference
def _by_layer(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], variant: Quantized, kind: str, layers: Collection[int]
) -> dict[int, list[Loss]]:
    """The loss of each block with one layer at a time exchanged."""
    found: dict[int, list[Loss]] = {layer: [] for layer in layers}
    with EXACT.on(model) as exact, variant.on(model) as changed:
        own, other = {ONLY: (exact, changed), WITHOUT: (changed, exact)}[kind]
        for block in blocks if layers else ():
            for layer, ids, states in run_exchanged(own, other, block, layers):
                found[layer].append(finite_loss(own, ids, states))
    return found
