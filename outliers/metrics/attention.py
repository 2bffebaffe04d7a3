"""Metrics of attention probabilities: all metrics of a variant share one pass over the text.

A visit is one layer on one sequence. An attention stack is a decoder, an encoder, or the cross-attention of a decoder.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.metrics.measurement import Measurement, MemoryNeeds, loaded
from outliers.models.anatomy import has_attention
from outliers.models.anatomy.stack_views import of_stack, stack_views
from outliers.models.attention import eager
from outliers.models.decoder import inference, watched_pass
from outliers.models.hooks import attention_hooks
from outliers.models.stream import AS_IT_IS, Variant
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache, naming
from outliers.variants.ablated import Ablated, Intervention
from outliers.variants.edges import Place
from outliers.variants.together import Together

PROBABILITIES = 4  # matrices (heads, T, T) of a layer: scores and probabilities, without and with an intervention


class Visits(NamedTuple):
    """What a metric of attention computed in the layers of an attention stack under some ablations, by visit.

    layers: numbers of the layers, int64 (visits,). queries: numbers of queries of the sequences, float64 (visits,).
    measured: float64 (visits, ablations, …).
    """

    layers: torch.Tensor
    queries: torch.Tensor
    measured: torch.Tensor


class AttentionComputation(NamedTuple):
    """The computation of a metric of attention probabilities.

    measure: reduces the probabilities of a layer, (1, heads, queries, keys), to a float64 tensor, given which keys each
    query can see, bool (queries, keys), and whether it is cross-attention. by_ablation: returns the result of each
    ablation from all visits of a part of the text. values: returns the values of a row from the results of all
    parts.
    """

    measure: Callable[[torch.Tensor, torch.Tensor, bool], torch.Tensor]
    by_ablation: Callable[[Visits], list]
    values: Callable[[list], list[dict]]


@inference
def attention_results(
    model: PreTrainedModel,
    blocks: Iterable[torch.Tensor],
    requests: Sequence[tuple[Ablated, Sequence[AttentionComputation]]],
    variant: Variant = AS_IT_IS,
) -> list[list[dict[str, Any]]]:
    """Return, for each ablation and each of its metrics, the results by attention stack.

    An ablation changes one layer at a time; the next layers get the layer's unchanged output. Only the probabilities of
    one layer are held at a time.

    blocks: token ids, int64 (blocks, T), or any iterable of (T,). requests: ablations with the metrics to compute
    under each. variant: a change of the whole model, such as a scheme.
    """
    views = stack_views(model)
    places: dict[str, list] = {name: [] for name in views}  # the layer and the number of queries of each visit
    measured: dict[str, dict[AttentionComputation, list[torch.Tensor]]] = {
        name: {computation: [] for _, computations in requests for computation in computations} for name in views
    }

    def visit(
        cross: bool,
        model: PreTrainedModel,
        layer: int,
        probabilities: torch.Tensor,
        recompute: Callable,
        visible: torch.Tensor,
    ) -> None:
        name = next(view.name for view in views.values() if view.cross is cross and layer in view.layers)
        in_layer: dict[AttentionComputation, list[torch.Tensor]] = {computation: [] for computation in measured[name]}
        unchanged = cache(partial(_measure, probabilities, visible, cross))
        for ablated, computations in requests:
            measure = unchanged
            if _changes_probabilities(ablated):
                with ablated.on(model, layer):
                    measure = partial(_measure, recompute(), visible, cross)
            for computation in computations:
                in_layer[computation].append(measure(computation))
        for computation, by_ablation in in_layer.items():  # one tensor per visit: each keeps memory around it in use
            measured[name][computation].append(torch.stack(by_ablation))
        places[name].append((layer, probabilities.shape[-2]))

    with eager(model):
        watched_pass(model, blocks, partial(_hooks, visit), variant)
    results = {name: _results_by_ablation(places[name], view) for name, view in measured.items()}
    return [
        [{name: next(view[computation]) for name, view in results.items()} for computation in computations]
        for _, computations in requests
    ]


def _results_by_ablation(
    visited: list[tuple[int, int]], measured: dict[AttentionComputation, list[torch.Tensor]]
) -> dict[AttentionComputation, Iterator]:
    layers, queries = torch.tensor(visited).T
    return {
        computation: iter(
            computation.by_ablation(Visits(layers, queries.double(), _stacked([visit.cpu() for visit in by_visit])))
        )
        for computation, by_visit in measured.items()
    }


def _stacked(visits: list[torch.Tensor]) -> torch.Tensor:
    """Stack the tensors of visits, (ablations, heads, ...), with zeros for heads that a layer lacks."""
    if len({visit.shape for visit in visits}) > 1:
        most = max(visit.shape[1] for visit in visits)
        visits = [torch.cat([x, x.new_zeros(len(x), most - x.shape[1], *x.shape[2:])], 1) for x in visits]
    return torch.stack(visits)


def _measure(
    probabilities: torch.Tensor, visible: torch.Tensor, cross: bool, computation: AttentionComputation
) -> torch.Tensor:
    return computation.measure(probabilities, visible.to(probabilities.device), cross)


def _changes_probabilities(ablated: Ablated) -> bool:
    """Return whether queries or keys read the ablated features: values alone change no probability."""
    parts = {part for place in map(Place.read, ablated.where) for part in place.parts}
    return bool(ablated.intervention.features and parts & {"q", "k", "mixer"})


@contextmanager
def _hooks(visit: Callable, model: PreTrainedModel, layer: int | None) -> Iterator[None]:
    with ExitStack() as stack:
        for cross in (False, True):
            stack.enter_context(attention_hooks(model, partial(visit, cross, model), layer, cross=cross))
        yield


class AttentionMeasurement(Measurement):
    """The measurement of attention metrics: all interventions on a variant, and all metrics of each, share one pass."""

    cost = 1.5

    def check(self, cell: Cell) -> None:
        config = cell.subject.config
        if not has_attention(config):
            raise UserError(
                f"'{cell.metric.name}' of '{config.model_type}', whose layers have no attention; expected a metric "
                "such as trace or perplexity"
            )

    def shared(self, cell: Cell) -> str:
        return _split_ablation(cell.variant)[0].name

    def memory_needs(self, cells: Sequence[Cell]) -> MemoryNeeds:
        return super().memory_needs(cells)._replace(attention_matrices=PROBABILITIES, variant_count=1)

    def steps(self, cells: Sequence[Cell]) -> int:
        """Count the blocks, and for every ablation about a third of the time of a pass."""
        ablations = {_split_ablation(cell.variant)[1].name for cell in cells}
        return len(cells[0].subject.blocks) * (1 + len(ablations) // 3)

    def measure(self, model_cache: ModelCache, cells: Sequence[Cell], part: slice, provenance: dict) -> list:
        subject = cells[0].subject
        model, variants = loaded(model_cache, subject, [cell.variant for cell in cells], provenance)
        split = list(map(_split_ablation, variants))
        variant = split[0][0]
        requests: dict[str, tuple[Ablated, list[AttentionComputation]]] = {}
        for cell, (_, ablated) in zip(cells, split, strict=True):
            requests.setdefault(ablated.name, (ablated, []))[1].append(cell.metric.computation)
        with naming(subject.name, variant.name):
            counted = model_cache.with_progress(subject.blocks[part], self.steps(cells) // len(subject.blocks))
            results_by_ablation = attention_results(model, counted, list(requests.values()), variant)
        results = {name: iter(views) for name, views in zip(requests, results_by_ablation, strict=True)}
        return [next(results[ablated.name]) for _, ablated in split]

    def values(self, cell: Cell, results: list[dict[str, Any]]) -> list[dict]:
        values_of = cell.metric.computation.values
        values = {name: values_of([of_part[name] for of_part in results]) for name in results[0]}
        return [of_stack(name) | value for name, view_values in values.items() for value in view_values]


def _split_ablation(variant: Variant) -> tuple[Variant, Ablated]:
    """Split a variant into the change of the whole model and its last ablation, which changes attention layer by layer.

    An ablation of whole roles, such as attn_in, becomes one of the input of the q/k/v projection. An ablation of single
    projections that is not of q, k and v alone is part of the change of the whole model.
    """
    *others, last = variant.parts
    if last.attention_ablation is None:
        return variant, Ablated(Intervention(()))
    return Together(tuple(others)) if others else AS_IT_IS, last.attention_ablation


MEASUREMENT = AttentionMeasurement()
