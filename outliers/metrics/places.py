"""The loss of a model in which one place is quantized, or all but one."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outliers.criterion import QUANTIZED
from outliers.errors import UserError
from outliers.metrics.measurement import Measurement, MemoryNeeds, by_draw, loaded
from outliers.metrics.perplexity import Loss, finite_losses, loss_of, perplexity_value, variant_losses
from outliers.models.anatomy import count_experts, count_layers, stacks_of
from outliers.models.decoder import inference, map_blocks, run_exchanged, run_from
from outliers.models.stream import is_streamed
from outliers.quantization.convert import make_codes
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache, naming
from outliers.variants.cached import Cached
from outliers.variants.draw import drawn
from outliers.variants.peer import Against
from outliers.variants.quantized import EXACT, Quantized

ONLY, WITHOUT = "only", "without"
ALONE = ("head", "expert")  # fields whose places are only quantized alone


class PlaceChoice(NamedTuple):
    """Which places are quantized.

    kind: "only" a place, or all "without" it. field: "role", "layer", "stack", "head" or "expert". place: its name or
    number. variant: quantizes exactly these places.
    """

    kind: str
    field: str
    place: str | int
    variant: Quantized | Cached | Against


def place_choices(model: PreTrainedModel, variant: Quantized | Cached | Against, field: str) -> list[PlaceChoice]:
    """Return every place (by field: role, layer, stack, head or expert) of a variant, first alone, then all without it.

    If there is only one place, nothing would be left without it; heads and experts, which are many, are only quantized
    alone. Only the names of the model's modules are read, no weights.
    """
    places = variant.places(model, field)
    kinds = {ONLY: variant.only_at}
    if len(places) > 1 and field not in ALONE:
        kinds[WITHOUT] = variant.except_at
    return [PlaceChoice(kind, field, place, at(of)) for kind, at in kinds.items() for place, of in places.items()]


def place_losses(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    variant: Quantized | Cached | Against,
    chosen: Sequence[PlaceChoice],
) -> list[list[Loss]]:
    """Return the loss of each block, ids (T,), for each of some choices of one field.

    In a resident model, the layers before a chosen layer are computed once for all layers; if the model is under
    the scheme already, its codes are used. A streamed model passes all of its layers for each choice, and reads them
    once. Blocks of a resident model are iterated once per kind of choice of layers, or once per choice of other
    places.
    """
    variants = [choice.variant for choice in chosen]
    if not is_streamed(model) and variant.cache:
        return _cache_losses(model, blocks, variants)
    if is_streamed(model) or chosen[0].field != "layer":
        return variant_losses(model, blocks, variants)
    layers = {kind: [choice.place for choice in chosen if choice.kind == kind] for kind in (ONLY, WITHOUT)}
    losses = {kind: _by_layer(model, blocks, variant, kind, places) for kind, places in layers.items()}
    return [losses[choice.kind][choice.place] for choice in chosen]


@inference
def _cache_losses(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], variants: Iterable[Cached]
) -> list[list[Loss]]:
    """Return the losses of blocks under each cache; a pass starts at the first layer that it changes."""
    kept: list[dict] = [{} for _ in blocks]
    losses = []
    for variant in variants:
        with variant.on(model):
            passed = run_from(model, blocks, variant.first_layer(model), kept)
            losses.append(finite_losses([loss_of(model, ids, states) for _, ids, states in passed]))
    return losses


@inference
def _by_layer(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], variant: Quantized, kind: str, layers: Collection[int]
) -> dict[int, list[Loss]]:
    with EXACT.on(model) as exact, variant.on(model) as changed:
        base, other = {ONLY: (exact, changed), WITHOUT: (changed, exact)}[kind]

        def losses(_number: int, block: torch.Tensor) -> list[Loss]:
            passed = run_exchanged(base, other, block, layers)
            return finite_losses([loss_of(base, ids, states) for _, ids, states in passed])

        by_block = list(map_blocks(base, losses, blocks)) if layers else []
    return {layer: [block_losses[number] for block_losses in by_block] for number, layer in enumerate(sorted(layers))}


class PlacesMeasurement(Measurement):
    """The measurement of all roles, layers, stacks, heads or experts under one variant."""

    def steps(self, cells: Sequence[Cell]) -> int:
        """Return the number of passes, as if nothing of the model were skipped."""
        return sum(_kinds(cell) * _passes(cell) * len(cell.subject.blocks) * cell.metric.draws for cell in cells)

    def memory_needs(self, cells: Sequence[Cell]) -> MemoryNeeds:
        return super().memory_needs(cells)._replace(variant_count=max(_kinds(cell) * _count(cell) for cell in cells))

    def measure(
        self, model_cache: ModelCache, cells: Sequence[Cell], part: slice, provenance: dict
    ) -> list[dict[tuple[str, str | int], list[list[Loss]]]]:
        """Return the loss of each block by kind of choice, place and draw."""
        (cell,), passes = cells, _passes(cells[0])
        subject, metric = cell.subject, cell.metric
        model, (variant,) = loaded(model_cache, subject, [cell.variant], provenance)
        chosen = place_choices(model, variant, metric.by)
        streamed = is_streamed(model)
        passes = _kinds(cell) * passes if streamed else passes if _is_by_layer(cell) else 1
        blocks = model_cache.with_progress(subject.blocks[part], passes)
        with (
            naming(subject.name, variant.name),
            model_cache.under(variant) if variant.schemes and not streamed else nullcontext(model) as changed,
        ):
            draws = [_drawn_losses(make_codes(changed), blocks, variant, chosen, draw) for draw in range(metric.draws)]
        by_place = zip(chosen, zip(*draws, strict=True), strict=True)
        return [{(choice.kind, choice.place): list(losses) for choice, losses in by_place}]

    def values(self, cell: Cell, results: list[dict]) -> list[dict]:
        values = []
        for kind, place in results[0]:
            draws = by_draw((losses[kind, place] for losses in results), cell.subject.seed_count)
            values.append(perplexity_value(f"damage.perplexity_{kind}", draws) | {cell.metric.by: place})
        return values


def _kinds(cell: Cell) -> int:
    """Return the number of kinds of choices: each place alone and, except for heads and experts, all without it."""
    return 1 if cell.metric.by in ALONE else 2


def _passes(cell: Cell) -> int:
    """Return the number of passes of one kind; a layer takes half of one, from its stored input."""
    return -(-_count(cell) // 2) if _is_by_layer(cell) else _count(cell)


def _is_by_layer(cell: Cell) -> bool:
    """Return whether all layers share the passes of a block, each from its stored input."""
    return cell.metric.by == "layer" and not cell.variant.cache


def _count(cell: Cell) -> int:
    """Return the number of roles, layers, stacks, heads or experts, some of which a variant may skip.

    Raises:
        UserError: the variant is no scheme or cache that quantizes, has no such places, or is limited to some already.
    """
    variant, config, by = cell.variant, cell.subject.config, cell.metric.by
    if not variant.place_kinds:
        raise UserError(
            f"'{variant.name}' has no places to quantize; expected a scheme that quantizes, such as absmax, or kv=int4"
        )
    if variant.is_limited:
        raise UserError(f"'{variant.name}' quantizes some places already; expected a scheme, or a cache, of all")
    if by not in variant.place_kinds and (variant.swaps or by != "expert"):
        raise UserError(
            f"'{variant.name}' has no places by {by}; expected heads of a cache, stacks of a scheme, or roles"
        )
    if by == "expert":
        if variant.cache or not (count := count_experts(config)):
            raise UserError(f"'{cell.subject.name}' has no experts under '{variant.name}'; leave 'expert' out")
        return count
    if by == "layer":
        return count_layers(config)
    if by == "stack":
        return len(stacks_of(config))
    if by == "head":
        return count_layers(config) * (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    if variant.cache:
        return sum(format is not None for format in variant.cache)
    roles = {role for stack in stacks_of(config) for role in QUANTIZED if getattr(stack, role)}
    schemes = (quantized.scheme for quantized in variant.schemes)
    return len(roles) + sum((scheme.attention is not None) + scheme.routers for scheme in schemes)


def _drawn_losses(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    variant: Quantized | Cached | Against,
    chosen: Sequence[PlaceChoice],
    draw: int,
) -> list[list[Loss]]:
    with drawn(model, draw):
        return place_losses(model, blocks, variant, chosen)


MEASUREMENT = PlacesMeasurement()
