"""Metrics of attention probabilities: all that are asked of what one variant makes of a model ride on one pass."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outliers.metrics.measurement import Keeps, Measurement
from outliers.models.decoder import inference, run_decoder, under
from outliers.models.hooks import attention_hooks, eager
from outliers.models.stream import AS_IT_IS, Variant, Watched
from outliers.specification.kinds import resolved
from outliers.subjects.bench import Bench, named_under
from outliers.subjects.cell import Cell
from outliers.variants.ablated import Ablated, Intervention
from outliers.variants.edges import ROLES, Place
from outliers.variants.together import Together, parts_of

PROBABILITIES = 4  # (heads, T, T) of a layer at once: scores, what is made of them, and of those under an intervention


class Visits(NamedTuple):
    """What a look saw of the attention of layers, a visit each layer and sequence, under some ablations.

    layers: their numbers, int64 (visits,). queries: how many a sequence has, float64 (visits,). seen: float64 (visits,
    ablations, …).
    """

    layers: torch.Tensor
    queries: torch.Tensor
    seen: torch.Tensor


class Look(NamedTuple):
    """How a metric is made of attention probabilities.

    see: of those of a layer, (1, heads, T, T), a float64 tensor. answers: of all visits to a part of the text, the
    answer of each ablation. values: of the answers of all parts, the values of a row.
    """

    see: Callable[[torch.Tensor], torch.Tensor]
    answers: Callable[[Visits], list]
    values: Callable[[list], list[dict]]


@inference
def attended(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    asked: Sequence[tuple[Ablated, Sequence[Look]]],
    variant: Variant = AS_IT_IS,
) -> list[list]:
    """The answer of each look at the attention under each ablation, which changes a layer at a time.

    What goes on through the model is the layer's unchanged output. Probabilities of one layer at a time are held.

    blocks: token ids, int64 (blocks, T), or any iterable of (T,). variant: what all of it is under, such as a scheme.
    """
    places: list[tuple[int, int]] = []  # of each visit the layer, and how many queries there are
    seen: dict[Look, list[torch.Tensor]] = {look: [] for _, looks in asked for look in looks}

    def visit(model: PreTrainedModel, layer: int, probabilities: torch.Tensor, recompute: Callable) -> None:
        of_layer: dict[Look, list[torch.Tensor]] = {look: [] for look in seen}
        for ablated, looks in asked:
            with ablated.on(model, layer):
                changed = recompute() if _moves(ablated) else probabilities
            for look in looks:
                of_layer[look].append(look.see(changed))
        for look, of_ablations in of_layer.items():  # one small tensor each, for each keeps memory around it in use
            seen[look].append(torch.stack(of_ablations))
        places.append((layer, probabilities.shape[-2]))

    with eager(model), under(model, Watched(variant, partial(_hooks, visit))) as (changed, left):
        for _ in run_decoder(changed, blocks, variant=left):
            pass
    layers, queries = torch.tensor(places).T
    answers = {
        look: iter(look.answers(Visits(layers, queries.double(), torch.stack([one.cpu() for one in of_visits]))))
        for look, of_visits in seen.items()
    }
    return [[next(answers[look]) for look in looks] for _, looks in asked]


def _moves(ablated: Ablated) -> bool:
    """Whether queries or keys read the change: values alone move no probability."""
    parts = {part for place in map(Place.read, ablated.where) for part in place.parts}
    return bool(ablated.intervention.features and parts & {"q", "k"})


@contextmanager
def _hooks(visit: Callable, model: PreTrainedModel, layer: int | None) -> Iterator[None]:
    """Let `visit` see the attention of all layers, or of one."""
    with attention_hooks(model, partial(visit, model), layer):
        yield


def _look(cell: Cell) -> Look:
    return resolved(cell.metric.seen_by)


class OfAttention(Measurement):
    """All interventions on what one variant makes of a model, and all metrics of each, come from one pass."""

    def bundles(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        bundles: dict[str, list[Cell]] = {}
        for cell in cells:
            bundles.setdefault(_parted(cell.variant)[0].name, []).append(cell)
        return list(bundles.values())

    def keeps(self, cells: Sequence[Cell]) -> Keeps:
        return super().keeps(cells)._replace(attention=PROBABILITIES, variants=1)

    def steps(self, cells: Sequence[Cell]) -> int:
        return len(cells[0].subject.blocks)

    def answer(self, bench: Bench, cells: Sequence[Cell], part: slice, facts: dict) -> list:
        subject = cells[0].subject
        model, blocks = subject.load(bench, facts), subject.blocks[part]
        parted = list(map(_parted, bench.knowing([cell.variant for cell in cells], subject)))
        variant = parted[0][0]
        asked: dict[str, tuple[Ablated, list[Look]]] = {}
        for cell, (_, ablated) in zip(cells, parted, strict=True):
            asked.setdefault(ablated.name, (ablated, []))[1].append(_look(cell))
        with named_under(subject, variant):
            found = attended(model, bench.counted(blocks), list(asked.values()), variant)
        answers = {name: iter(of_one) for name, of_one in zip(asked, found, strict=True)}
        return [next(answers[ablated.name]) for _, ablated in parted]

    def values(self, cell: Cell, answers: list) -> list[dict]:
        return _look(cell).values(answers)


def _parted(variant: Variant) -> tuple[Variant, Ablated]:
    """What a model is under, and its last ablation, which changes the attention of a layer at a time.

    One of whole roles changes the input of the q/k/v projection; one of edges that others read too acts everywhere.
    """
    *others, last = parts_of(variant)
    if isinstance(last, Ablated) and set(last.where) <= ROLES.keys():
        last = Ablated(last.intervention)
    elif not isinstance(last, Ablated) or not last.in_attention:
        return variant, Ablated(Intervention(()))
    return Together(tuple(others)) if others else AS_IT_IS, last


ATTENTION = OfAttention()
