"""Metrics of the last hidden states: all metrics of a variant share one pass over the text."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, takewhile

import torch
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.metrics.measurement import LogitsComputation, Measurement, MemoryNeeds, StatesComputation, by_draw, loaded
from outliers.metrics.perplexity import finite_losses, read_logits
from outliers.models.anatomy import decoder_layers, family_of
from outliers.models.anatomy.examples import Block
from outliers.models.anatomy.weights import parameter_of
from outliers.models.decoder import AT_ONCE, inference, map_blocks, placed, run_decoder, run_from
from outliers.models.head import output_embedding
from outliers.models.load import find_device
from outliers.models.stream import Variant, is_streamed
from outliers.quantization.convert import make_codes
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache, naming
from outliers.variants.draw import drawn
from outliers.variants.quantized import EXACT

# Most bytes cached for several variants: of last hidden states with logits, and as many of inputs of layers.
MOST_KEPT = 2**28
KEPT = 2  # the output of every second layer is cached for the next variant


class StatesMeasurement(Measurement):
    """The measurement of metrics of the last hidden states: one pass per variant serves all of them.

    A streamed model serves all variants together, because its layers are read once for all.
    """

    def check(self, cell: Cell) -> None:
        if cell.metric.of_text and family_of(cell.subject.config).targets is None:
            raise UserError(
                f"'{cell.subject.name}' predicts no tokens, of which {cell.metric.name} are; expected a language model"
            )

    def shared(self, cell: Cell) -> tuple:
        return None if cell.subject.experiment.stream else cell.variant.name, cell.metric.draws

    def memory_needs(self, cells: Sequence[Cell]) -> MemoryNeeds:
        memory_needs = super().memory_needs(cells)
        # exact states are kept until the states under a variant are computed
        compares = any(cell.metric.computation.compares for cell in cells)
        experiment = cells[0].subject.experiment
        several = not experiment.stream and find_device(experiment.device).type == "cpu"
        return memory_needs._replace(
            variant_count=memory_needs.variant_count + 2 * compares, batch=AT_ONCE if several else 1
        )

    def steps(self, cells: Sequence[Cell]) -> int:
        return len(_variants(cells)) * len(cells[0].subject.blocks) * cells[0].metric.draws

    def measure(
        self, model_cache: ModelCache, cells: Sequence[Cell], part: slice, provenance: dict
    ) -> list[list[list]]:
        """Return, for each cell and draw, the results of each block of a part of the text."""
        subject = cells[0].subject
        model, variants = loaded(model_cache, subject, _variants(cells).values(), provenance)
        by_draw_and_cell, blocks = [], subject.blocks[part]
        part_of_text = provenance.get("tokens_hash", id(subject)), part.start, part.stop
        for draw in range(cells[0].metric.draws):
            with naming(subject.name, *(variant.name for variant in variants)):
                passes = _streamed if is_streamed(model) else _resident
                by_draw_and_cell.append(passes(model, model_cache, blocks, cells, variants, (draw, *part_of_text)))
        return [list(draws) for draws in zip(*by_draw_and_cell, strict=True)]

    def values(self, cell: Cell, results: list[list[list]]) -> list[dict]:
        computation, draws = cell.metric.computation, by_draw(results, cell.subject.seed_count)
        return computation.values(draws, *([cell.subject] if computation.of_subject else []))


def _variants(cells: Iterable[Cell]) -> dict[str, Variant]:
    return {cell.variant.name: cell.variant for cell in cells}


@inference
def _resident(
    model: PreTrainedModel,
    model_cache: ModelCache,
    blocks: torch.Tensor,
    cells: Sequence[Cell],
    variants: list[Variant],
    key: tuple,
) -> list[list]:
    """Return, for each cell, the results of each block with a resident model.

    key: the draw and the part of the text.
    """
    computations, (variant,) = [cell.metric.computation for cell in cells], variants
    exact: list = [None] * len(blocks)
    if any(computation.compares for computation in computations):
        exact_states = _exact_states(model_cache, model, blocks, key)
        reads = any(computation.compares for computation in computations if isinstance(computation, LogitsComputation))
        logits = _logits_cache(model_cache, model, exact_states, key) if reads else exact
        exact = [(model, *pair) for pair in zip(exact_states, logits, strict=True)]
    last_key = _key(variant, model, key)
    known = model_cache.states.get(last_key)
    last_states: dict[int, torch.Tensor] = {}
    with model_cache.under(variant) as changed, drawn(changed, key[0]):
        run = _pass(changed, model_cache, blocks, variant.first_layer(model), variant.layers(model), key)

        def measure(number: int, block: Block) -> list:
            if known:
                ids, states = placed(changed, block), known[number]
            else:
                ((_, ids, states),) = run(number, block)
            if states.nbytes * len(blocks) <= MOST_KEPT:
                last_states[number] = states
            return _measure_block(computations, changed, ids, states, exact[number])

        by_block = list(map_blocks(make_codes(changed), measure, model_cache.with_progress(blocks)))
        by_cell = [finite_losses(results) for results in zip(*by_block, strict=True)]
    if len(last_states) == len(blocks):
        _keep(model_cache, last_key, [last_states[number] for number in range(len(blocks))])
    return by_cell


def _pass(
    model: PreTrainedModel, model_cache: ModelCache, blocks: torch.Tensor, first: int, layers: tuple, key: tuple
) -> Callable:
    """Return a function that passes a numbered block through a model, reusing cached outputs of unchanged layers.

    first: the first layer that differs from the exact model; if it is not layer 0, the pass starts there, from inputs
    that all variants share. layers: the changes to each layer, see `Variant.layers`; if layer 0 is changed, the pass
    starts where the changes differ from those of the previous variant.
    """
    further: range | tuple = ()
    if 0 < first < len(decoder_layers(model)):
        inputs = model_cache.inputs.setdefault(key, [{} for _ in blocks])
    elif not first and layers:
        first, inputs = _common(model_cache, blocks, layers, key)
        further = range(first, len(layers) - 1, KEPT)
    else:
        return lambda _number, block: run_decoder(model, [block])

    def run(number: int, block: Block) -> Iterator[tuple[int, Block, torch.Tensor]]:
        passed = (inputs_of_key for _, inputs_of_key in model_cache.passed.values())
        outputs = (list(known.values()) for of_key in (*model_cache.inputs.values(), *passed) for known in of_key)
        if _nbytes(output[0] for output in chain.from_iterable(outputs)) > MOST_KEPT:  # a tensor, or a tuple's first
            return run_from(model, [block], first, [dict(inputs[number])])  # a copy: what is added is not cached
        return run_from(model, [block], first, [inputs[number]], further)

    return run


def _common(model_cache: ModelCache, blocks: torch.Tensor, layers: tuple, key: tuple) -> tuple[int, list[dict]]:
    """Return the number of leading layers that the previous variant changed alike, and their cached outputs."""
    for other in [other for other in model_cache.passed if other[1:] != key[1:]]:
        del model_cache.passed[other]  # outputs for another text
    before, inputs = model_cache.passed.get(key, ((), [{} for _ in blocks]))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, layers, strict=False))
    first = len(list(same))
    inputs = [{number: output for number, output in known.items() if number < first} for known in inputs]
    model_cache.passed[key] = layers, inputs
    return first, inputs


def _measure_block(
    computations: Sequence[StatesComputation | LogitsComputation],
    model: PreTrainedModel,
    block: Block,
    states: torch.Tensor,
    exact: tuple | None,
) -> list:
    """Return the results of each metric on a block; metrics of logits are computed together.

    exact: as for `read_logits`.
    """
    readers = [computation.reader for computation in computations if isinstance(computation, LogitsComputation)]
    results = iter(read_logits(block, [(model, states)], readers, exact)[0] if readers else ())
    unquantized = exact and exact[:2]
    return [
        next(results)
        if isinstance(computation, LogitsComputation)
        else computation.measure(model, block, states, unquantized if computation.compares else None)
        for computation in computations
    ]


def _nbytes(states: Iterable[torch.Tensor]) -> int:
    return sum(state.nbytes for state in states)


def _exact_states(
    model_cache: ModelCache, model: PreTrainedModel, blocks: torch.Tensor, key: tuple
) -> list[torch.Tensor]:
    """Return the last hidden states (T, features) of the unquantized model, cached if there is room."""
    last_key = _key(EXACT, model, key)
    if last_key in model_cache.states:
        return model_cache.states[last_key]
    with model_cache.under(EXACT) as exact, drawn(exact, key[0]):
        last_states = list(map_blocks(exact, lambda _, block: next(run_decoder(exact, [block]))[2], blocks))
    _keep(model_cache, last_key, last_states)
    return last_states


def _logits_cache(
    model_cache: ModelCache, model: PreTrainedModel, states: list[torch.Tensor], key: tuple
) -> list[dict[int, torch.Tensor] | None]:
    """Return a cache for the unquantized model's logits of each block, or None if they should not be cached.

    Logits are cached from the second compared variant on, if there is room for the logits of all blocks.
    """
    if key not in model_cache.logits:
        model_cache.logits.clear()
        model_cache.logits[key] = []
    elif not model_cache.logits[key]:
        weight = parameter_of(output_embedding(model), "weight")
        if weight is None:  # the head reports what it lacks
            return [None] * len(states)
        size = torch.promote_types(weight.dtype, torch.float32).itemsize * len(weight) * sum(map(len, states))
        if size + _nbytes(states) <= MOST_KEPT:
            model_cache.logits[key] = [{} for _ in states]
    return model_cache.logits[key] or [None] * len(states)


def _key(variant: Variant, model: PreTrainedModel, key: tuple) -> tuple:
    return variant.name, repr(variant.fields(model)), *key


def _keep(model_cache: ModelCache, key: tuple, states: list[torch.Tensor]) -> None:
    """Cache last hidden states as far as there is room: those of the unquantized model, and of the latest variants."""
    model_cache.states.pop(key, None)
    model_cache.states[key] = states
    logits = [of_part for of_blocks in model_cache.logits.values() for kept in of_blocks for of_part in kept.values()]
    while _nbytes(chain(logits, *model_cache.states.values())) > MOST_KEPT:
        del model_cache.states[next((other for other in model_cache.states if other[0] != EXACT.name), key)]


@inference
def _streamed(
    model: PreTrainedModel,
    model_cache: ModelCache,
    blocks: torch.Tensor,
    cells: Sequence[Cell],
    variants: list[Variant],
    key: tuple,
) -> list[list]:
    """Return, for each cell, the results of each block with a streamed model.

    The exact last hidden states come first, and are kept for comparison with the states under variants.
    """
    of_variants = {name: [cell for cell in cells if cell.variant.name == name] for name in _variants(cells)}
    first = [EXACT] * any(cell.metric.computation.compares for cell in cells)
    exact: list = []
    by_cell: dict[Cell, list] = {cell: [] for cell in cells}
    names = list(of_variants)
    with drawn(model, key[0]):
        counted = model_cache.with_progress(blocks, len(variants))
        for number, ids, states in model.stream.run(model, counted, [*first, *variants], lambda *_turn: None):
            if number < len(first):
                exact.append(states.cpu())
                continue
            under = of_variants[names[number - len(first)]]
            unquantized = (model, exact[len(by_cell[under[0]])].to(states.device)) if exact else None
            computations = [cell.metric.computation for cell in under]
            for cell, result in zip(under, _measure_block(computations, model, ids, states, unquantized), strict=True):
                by_cell[cell].append(result)
    return list(by_cell.values())


MEASUREMENT = StatesMeasurement()
