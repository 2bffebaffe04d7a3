"""Metrics of the last hidden states: all that are asked of one variant ride on one pass over the text."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch
from transformers import PreTrainedModel

from outliers.metrics.measurement import Keeps, Measurement, Seen, by_seed
from outliers.models.anatomy import decoder_layers
from outliers.models.decoder import Flow, inference, run_decoder, run_from
from outliers.models.stream import Variant, is_streamed
from outliers.specification.kinds import resolved
from outliers.subjects.bench import Bench, naming
from outliers.subjects.cell import Cell
from outliers.variants.draw import drawn
from outliers.variants.quantized import EXACT

MOST_KEPT = 2**28  # bytes of hidden states that are kept for several variants, of the last ones and of inputs of layers


def _seen(cell: Cell) -> Seen:
    return resolved(cell.metric.seen_by)


class OfStates(Measurement):
    """The pass of one variant, and all cells that ride on it; of a streamed model all variants, for its layers are read
    once for all."""

    def bundles(self, cells: Sequence[Cell]) -> list[list[Cell]]:
        bundles: dict[tuple, list[Cell]] = {}
        for cell in cells:
            variant = None if cell.subject.settings.stream else cell.variant.name
            bundles.setdefault((variant, cell.metric.draws), []).append(cell)
        return list(bundles.values())

    def keeps(self, cells: Sequence[Cell]) -> Keeps:
        keeps = super().keeps(cells)
        compares = any(_seen(cell).compares for cell in cells)  # with states that are kept until those under a variant
        return keeps._replace(variants=keeps.variants + 2 * compares)

    def steps(self, cells: Sequence[Cell]) -> int:
        return len(_variants(cells)) * len(cells[0].subject.blocks) * cells[0].metric.draws

    def answer(self, bench: Bench, cells: Sequence[Cell], part: slice, facts: dict) -> list[list[list]]:
        """Of each cell, draw by draw, what it sees of each block of a part of the text."""
        subject = cells[0].subject
        model, blocks = subject.load(bench, facts), subject.blocks[part]
        variants = list(_variants(cells).values())
        with naming(subject.name):
            variants = bench.knowing(variants, subject)
        by_draw = []
        part_of_text = facts.get("tokens_hash"), part.start, part.stop
        for draw in range(cells[0].metric.draws):
            with naming(subject.name, *(variant.name for variant in variants)):
                passes = _streamed if is_streamed(model) else _resident
                by_draw.append(passes(model, bench, blocks, cells, variants, (draw, *part_of_text)))
        return [list(seen) for seen in zip(*by_draw, strict=True)]

    def values(self, cell: Cell, answers: list[list[list]]) -> list[dict]:
        draws = (list(chain.from_iterable(parts)) for parts in zip(*answers, strict=True))
        return _seen(cell).values([part for draw in draws for part in by_seed(draw, cell.subject.seeds)])


def _variants(cells: Iterable[Cell]) -> dict[str, Variant]:
    return {cell.variant.name: cell.variant for cell in cells}


@inference
def _resident(
    model: PreTrainedModel,
    bench: Bench,
    blocks: torch.Tensor,
    cells: Sequence[Cell],
    variants: list[Variant],
    key: tuple,
) -> list[list]:
    """Of each cell what it sees of each block. key: the draw, and which part of the text it is."""
    seers, (variant,) = [_seen(cell) for cell in cells], variants
    exact: list = [None] * len(blocks)
    if any(seer.compares for seer in seers):
        exact = [(model, states) for states in _exact_states(bench, blocks, key)]
    with bench.under(variant) as changed, drawn(changed, key[0]):
        by_block = [
            [seer.see(changed, ids, states, exact[number]) for seer in seers]
            for number, ids, states in _passed(changed, bench, blocks, variant.first_layer(model), key)
        ]
    return [list(seen) for seen in zip(*by_block, strict=True)]


def _passed(model: PreTrainedModel, bench: Bench, blocks: torch.Tensor, first: int, key: tuple) -> Iterator[tuple]:
    """Blocks through a model whose layers before `first` are those of the model as it is: from what these made of them
    for another variant on, as far as it was kept."""
    counted = bench.counted(blocks)
    if not 0 < first < len(decoder_layers(model)):
        return run_decoder(model, counted)
    inputs = bench.inputs.setdefault(key, [{} for _ in blocks])
    flows: Iterator[Flow] = (flow for passes in bench.inputs.values() for known in passes for flow in known.values())
    if _nbytes(flow.state for flow in flows) > MOST_KEPT:
        inputs = [dict(known) for known in inputs]  # what is added is not kept
    return run_from(model, counted, first, inputs)


def _nbytes(states: Iterable[torch.Tensor]) -> int:
    return sum(state.nbytes for state in states)


def _exact_states(bench: Bench, blocks: torch.Tensor, key: tuple) -> list[torch.Tensor]:
    """Last hidden states (T, features) of the unquantized model; few are kept for the variants that follow."""
    if key not in bench.exact:
        with bench.under(EXACT) as exact, drawn(exact, key[0]):
            last_states = [states for _, _, states in run_decoder(exact, blocks)]
        if _nbytes(chain.from_iterable((*bench.exact.values(), last_states))) > MOST_KEPT:
            return last_states
        bench.exact[key] = last_states
    return bench.exact[key]


@inference
def _streamed(
    model: PreTrainedModel,
    bench: Bench,
    blocks: torch.Tensor,
    cells: Sequence[Cell],
    variants: list[Variant],
    key: tuple,
) -> list[list]:
    """The same; last hidden states of the unquantized model come first, and are kept for those under variants."""
    seers, names = [_seen(cell) for cell in cells], list(_variants(cells))
    first = [EXACT] * any(seer.compares for seer in seers)
    exact: list = []
    by_cell: list[list] = [[] for _ in cells]
    with drawn(model, key[0]):
        counted = bench.counted(blocks, len(variants))
        for number, ids, states in model.stream.run(model, counted, [*first, *variants], lambda *_turn: None):
            if number < len(first):
                exact.append(states.cpu())
                continue
            for seen, cell, seer in zip(by_cell, cells, seers, strict=True):
                if cell.variant.name == names[number - len(first)]:
                    unquantized = (model, exact[len(seen)].to(states.device)) if seer.compares else None
                    seen.append(seer.see(model, ids, states, unquantized))
    return by_cell


STATES = OfStates()
