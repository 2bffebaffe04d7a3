"""The loss of a model of which one role or one layer alone is quantized, or all but it."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.metrics.measurement import Keeps, Measurement, by_seed
from outliers.metrics.perplexity.measure import Loss, finite_loss, perplexity_of, variant_losses
from outliers.models.anatomy import ROLES, count_layers, projections, stacks_of
from outliers.models.anatomy.views import views_of
from outliers.models.decoder import inference, run_exchanged
from outliers.models.stream import is_streamed
from outliers.quantization.convert import quantized_parts, skipped
from outliers.subjects.bench import Bench, named
from outliers.subjects.cell import Cell
from outliers.variants.draw import drawn, scattered
from outliers.variants.quantized import EXACT, Quantized

ONLY, WITHOUT = "only", "without"


class Exchange(NamedTuple):
    """What is quantized.

    kind: "only" a place, or all "without" it. field: "role", "layer" or "stack". place: its name or number. written: as
    `only` and `skip` of schemes take it.
    """

    kind: str
    field: str
    place: str | int
    written: str

    def under(self, variant: Quantized) -> Quantized:
        """What a variant is where only these places are under its scheme."""
        skip = *variant.skip, self.written
        return replace(variant, **{ONLY: {"only": (self.written,)}, WITHOUT: {"skip": skip}}[self.kind])


def exchanges(model: PreTrainedModel, variant: Quantized, field: str) -> list[Exchange]:
    """Every role, layer or stack (field) of which a variant quantizes something, alone, and then all but it.

    Where there is one place, all but it is nothing. Of the model the names of modules are looked at, and no weight.

    Raises:
        UserError: the variant quantizes only some places.
    """
    if variant.only:
        raise UserError(f"'{variant.name}' quantizes some places already; expected 'skip' in the place of 'only'")
    left = skipped(model, variant.skip, variant.scheme)
    parts = (one for one in quantized_parts(model, variant.scheme) if one.path not in left)
    stacks = {layer: view for view in views_of(model).values() if not view.cross for layer in view.layers}
    of_fields = {
        "role": lambda one: (one.role, one.role),
        "layer": lambda one: (one.layer, f"layers.{one.layer}"),
        "stack": lambda one: (stacks[one.layer].name, stacks[one.layer].written),
    }
    places = dict(map(of_fields[field], parts))
    kinds = (ONLY, WITHOUT) if len(places) > 1 else (ONLY,)
    return [Exchange(kind, field, *place) for kind in kinds for place in places.items()]


def exchange_losses(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], variant: Quantized, asked: Sequence[Exchange]
) -> list[list[Loss]]:
    """The loss of each block, ids (T,), for each of some exchanges of one field.

    Of a resident model, what comes before an exchanged layer is computed once for all layers; it may be under the
    scheme already: its codes are then used. A streamed model passes all of its layers for each exchange, and reads them
    once. Blocks of a resident model are read once for each kind of exchange of layers, or for each exchange of a role.
    """
    if is_streamed(model) or asked[0].field != "layer":
        return variant_losses(model, blocks, [one.under(variant) for one in asked])
    layers = {kind: [one.place for one in asked if one.kind == kind] for kind in (ONLY, WITHOUT)}
    found = {kind: _by_layer(model, blocks, variant, kind, of_kind) for kind, of_kind in layers.items()}
    return [found[one.kind][one.place] for one in asked]


def coded(model: PreTrainedModel) -> PreTrainedModel:
    """A model under a scheme, its weights quantized now, so that what is made of it shares the codes."""
    for projection in projections(model):
        getattr(projection.module, "quantized_weight", None)
    return model


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


class OfPlaces(Measurement):
    """All roles or all layers under one scheme."""

    def steps(self, cells: Sequence[Cell]) -> int:
        """As many as there are places in a model of which nothing is skipped."""
        return sum(2 * _count(cell) * len(cell.subject.blocks) * cell.metric.draws for cell in cells)

    def keeps(self, cells: Sequence[Cell]) -> Keeps:
        return super().keeps(cells)._replace(variants=max(2 * _count(cell) for cell in cells))

    def answer(
        self, bench: Bench, cells: Sequence[Cell], part: slice, facts: dict
    ) -> list[dict[tuple[str, str | int], list[list[Loss]]]]:
        """Of each kind of exchange and place, draw by draw, the loss of each block."""
        (cell,), count = cells, _count(cells[0])
        subject, metric = cell.subject, cell.metric
        model = subject.load(bench, facts)
        with named(subject.name):
            (variant,) = bench.knowing([cell.variant], subject)
        asked = exchanges(model, variant, metric.by)
        passes = len(asked) if is_streamed(model) else count if metric.by == "layer" else 1
        blocks = bench.counted(subject.blocks[part], passes)
        with (
            named(subject.name, variant.name),
            nullcontext(model) if is_streamed(model) else bench.under(variant) as changed,
        ):
            draws = [_drawn_losses(coded(changed), blocks, variant, asked, draw) for draw in range(metric.draws)]
        by_place = zip(asked, zip(*draws, strict=True), strict=True)
        return [{(one.kind, one.place): list(of_draws) for one, of_draws in by_place}]

    def values(self, cell: Cell, answers: list[dict]) -> list[dict]:
        values = []
        for kind, place in answers[0]:
            draws = map(chain.from_iterable, zip(*(of_part[kind, place] for of_part in answers), strict=True))
            parts = (part for draw in draws for part in by_seed(list(draw), cell.subject.seeds))
            found = list(map(perplexity_of, parts))
            one = {"metric": f"damage.perplexity_{kind}", cell.metric.by: place, **scattered(found), "unit": "1"}
            values.append(one)
        return values


def _count(cell: Cell) -> int:
    """How many roles or layers there are, of which a scheme may leave some.

    Raises:
        UserError: the variant is more than a scheme, or none that quantizes.
    """
    variant = cell.variant
    if not isinstance(variant, Quantized) or not variant.scheme.quantizes:
        raise UserError(f"places of '{variant.name}'; expected a scheme that quantizes, such as absmax")
    if cell.metric.by == "layer":
        return count_layers(cell.subject.config)
    if cell.metric.by == "stack":
        return len(stacks_of(cell.subject.config))
    roles = {role for stack in stacks_of(cell.subject.config) for role in ROLES if getattr(stack, role)}
    return len(roles) + (variant.scheme.attention is not None)


def _drawn_losses(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], variant: Quantized, asked: Sequence[Exchange], draw: int
) -> list[list[Loss]]:
    with drawn(model, draw):
        return exchange_losses(model, blocks, variant, asked)


PLACES = OfPlaces()
