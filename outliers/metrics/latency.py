"""Timings of generation, as in appendix D.2 of the paper, and of forward passes of encoders."""

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from transformers import Cache, DynamicCache, PretrainedConfig, PreTrainedModel

from outliers.errors import UserError
from outliers.metrics.graphs import DecodeSteps, captured_steps, next_ids
from outliers.metrics.measurement import Measurement, MemoryNeeds
from outliers.models.anatomy import check_block, context_length, stack_module, stacks_of
from outliers.models.anatomy.examples import input_ids
from outliers.models.decoder import inference
from outliers.quantization.caches import QuantizedCache, cache
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache
from outliers.text.blocks import tokens_hash

Result = TypeVar("Result")


class Timings(NamedTuple):
    """Times of identical generations, in milliseconds, and their tokens; or of passes of an encoder.

    prefills: for each generation, the pass over the prompts, which gives the first new token of each. steps: for each
    generation, its decode steps, each of which adds one token per sequence. ids: int64 (batch, 1 + tokens). encodings:
    passes of an encoder. cache_bytes: size of a quantized cache at the end of each generation.
    """

    prefills: list[float]
    steps: list[list[float]]
    ids: torch.Tensor
    encodings: Sequence[float] = ()
    cache_bytes: Sequence[int] = ()

    @property
    def per_token(self) -> list[float]:
        """Milliseconds per generated token of every decode step: its time divided by the batch size (Table 6)."""
        return [step / len(self.ids) for steps in self.steps for step in steps]

    @property
    def end_to_end(self) -> list[float]:
        """Milliseconds per generated token of every generation, including the prefill."""
        return [
            (prefill + sum(steps)) / self.ids.numel() for prefill, steps in zip(self.prefills, self.steps, strict=True)
        ]


# Metric: its unit, and the values whose median it is; metrics without values are left out.
METRICS = {
    "latency.decode": ("ms/token", lambda timings: timings.per_token),
    "latency.prefill": ("ms", lambda timings: timings.prefills),
    "latency.end_to_end": ("ms/token", lambda timings: timings.end_to_end),
    "latency.encode": ("ms", lambda timings: timings.encodings),
    "latency.cache": ("bytes", lambda timings: timings.cache_bytes),
}


class LatencyMeasurement(Measurement):
    """The measurement of latency, one batch at a time of the model under a variant."""

    unit = "batch"
    splits = False

    def check(self, cell: Cell) -> None:
        """Raise UserError if the text has no such prompts, or the model's context no room for the generation."""
        metric, config = cell.metric, cell.subject.config
        check_generation(config, metric.prompt, metric.tokens if generates(config) else 0)
        if isinstance(cell.subject.blocks, list):
            raise UserError("prompts of one length from documents of several; leave --documents out")
        blocks, block, *sizes = cell.subject.blocks.shape
        if metric.batch > blocks or (metric.prompt > block and not sizes):
            raise UserError(
                f"a batch of {metric.batch} with prompts of {metric.prompt} tokens, in a text of {blocks} × {block}; "
                "expected as many blocks, and as long ones, or more (--blocks, --block)"
            )

    def provenance(self, cell: Cell, _model_cache: ModelCache) -> dict:
        """Return the hash of the prompts and all parameters, including defaults, because tables show them."""
        return {"tokens_hash": tokens_hash(_prompts(cell)), **cell.metric.model_dump()}

    def steps(self, _cells: Sequence[Cell]) -> int:
        return 1

    def memory_needs(self, cells: Sequence[Cell]) -> MemoryNeeds:
        """Forecast the quantized model alone, with keys and values of the largest batch."""
        quantizes = any(part.has_codes for cell in cells for part in cell.variant.parts)
        return MemoryNeeds(
            ((1, -1),) if quantizes else (),  # codes instead of weights
            block=max(cell.metric.prompt for cell in cells),
            batch=max(cell.metric.batch for cell in cells),
            cached=max(cell.metric.batch * (cell.metric.prompt + cell.metric.tokens) for cell in cells),
            options=frozenset(("dtype", "device")),
        )

    def measure(self, model_cache: ModelCache, cells: Sequence[Cell], _part: slice, provenance: dict) -> list[Timings]:
        (cell,) = cells
        prompts, metric = _prompts(cell), cell.metric
        with cell.subject.under(model_cache, cell.variant, provenance) as model:
            timings = (
                encoding(model, prompts, metric.repeats, model_cache.bar.set_share) if encodes(model.config) else None
            )
            if generates(model.config):
                empty = partial(cache, model, cell.variant.cache) if cell.variant.cache else None
                generated = latency(model, prompts, metric.tokens, metric.repeats, model_cache.bar.set_share, empty)
                timings = generated._replace(encodings=timings.encodings) if timings else generated
            return [timings]

    def values(self, _cell: Cell, results: list[Timings]) -> list[dict]:
        values = []
        for metric, (unit, times_of) in METRICS.items():
            if not (times := times_of(results[0])):
                continue
            low, middle, high = quartiles(times)
            values.append({"metric": metric, "value": middle, "q1": low, "q3": high, "unit": unit})
        return values


def _prompts(cell: Cell) -> torch.Tensor:
    inputs = input_ids(cell.subject.blocks[: cell.metric.batch])
    return inputs if inputs.is_floating_point() else inputs[:, : cell.metric.prompt]  # pictures are read whole


MEASUREMENT = LatencyMeasurement()


@inference
def latency(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    tokens: int,
    repeats: int,
    see: Callable[[float], None] = lambda share: None,
    empty: Callable[[], Cache] | None = None,
) -> Timings:
    """Time the greedy generation of tokens (appendix D.2), after one whole generation as warm-up.

    Each forward pass is timed separately, including the choice of the next token. On a GPU each pass is synchronized,
    and steps with exact keys and values run as a CUDA graph if the model allows it. Only the logits of the last
    position are computed. No token ends a sequence.

    prompts: token ids, int64 (batch, P). tokens: decode steps of a generation, after its first token. see: called
    between passes with the completed share. empty: makes the cache of a generation, see `outliers.cache`; by default an
    exact one.

    Raises:
        UserError: prompt and tokens exceed the model's context, an id is outside its vocabulary, or nothing is timed.
    """
    check_generation(model.config, prompts.shape[1], tokens)
    check_block(model.config, prompts.shape[1], int(prompts.max()))
    if min(tokens, repeats) < 1:
        raise UserError(f"{repeats} generations of {tokens} tokens; expected at least one generation of one token")
    prompts = prompts.to(model.device)
    passes, count = (1 + repeats) * (1 + tokens), itertools.count(1)
    caches = [empty() if empty else DynamicCache(config=model.config) for _ in range(1 + repeats)]
    steps = None if empty else captured_steps(model, len(prompts), prompts.shape[1] + tokens)
    generate = partial(_generate, model, prompts, tokens, steps, lambda: see(next(count) / passes))
    generations = [generate(cache) for cache in caches][1:]
    prefills, steps = zip(*((times[0], times[1:]) for times, _ in generations), strict=True)
    sizes = [used.bytes for used in caches[1:] if isinstance(used, QuantizedCache)]
    return Timings(list(prefills), list(steps), generations[-1][1].cpu(), cache_bytes=sizes)


@inference
def encoding(
    model: PreTrainedModel, inputs: torch.Tensor, repeats: int, see: Callable[[float], None] = lambda share: None
) -> Timings:
    """Time forward passes of a model's encoder without its head over a batch, after one as warm-up.

    inputs: the input of the first stack, such as token ids, int64 (batch, T). see: as for `latency`.
    """
    module, inputs = stack_module(model, stacks_of(model.config)[0]), inputs.to(model.device)
    times = []
    for number in range(1 + repeats):
        times.append(timed(lambda: module(inputs), model.device)[0])
        see((1 + number) / (1 + repeats))
    return Timings([], [], inputs[:, :0], times[1:])


def encodes(config: PretrainedConfig) -> bool:
    """Return whether a model has an encoder: a first stack in which positions attend to all others."""
    return stacks_of(config)[0].bidirectional


def generates(config: PretrainedConfig) -> bool:
    """Return whether a model generates tokens: whether positions of its last stack attend only to earlier ones."""
    return not stacks_of(config)[-1].bidirectional


def check_generation(config: PretrainedConfig, prompt: int, tokens: int) -> None:
    """Raise UserError if a prompt and the decode steps after it exceed a model's context."""
    limit = context_length(config)
    if limit is not None and prompt + tokens > limit:
        raise UserError(
            f"prompts of {prompt} tokens and {tokens} generated ones exceed the model's context of {limit}; use less"
        )


def _generate(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    tokens: int,
    captured: DecodeSteps | None,
    report: Callable[[], None],
    cache: Cache,
) -> tuple[list[float], torch.Tensor]:
    """Return the milliseconds of the prefill and of each step after it, and the chosen ids, (batch, 1 + tokens).

    The prefill of an encoder-decoder is the pass of its encoder over the prompts and the first step of its decoder,
    from a start token, with a cache of its own. captured: makes the steps, with its own cache. report: called after
    each step. cache: an empty cache.
    """
    times, ids, encoded = [], [prompts], {}
    if captured:
        cache = captured.cache
        cache.reset()

    def step() -> torch.Tensor:
        return captured.after(ids[-1]) if captured and times else next_ids(model, ids[-1], cache)

    def decode() -> torch.Tensor:
        if not encoded:
            encoded["encoder_outputs"] = model.get_encoder()(prompts)
        output = model(decoder_input_ids=ids[-1], use_cache=True, **encoded)
        encoded["past_key_values"] = output.past_key_values
        return output.logits[:, -1].argmax(-1, keepdim=True)

    decodes = len(stacks_of(model.config)) > 1
    if decodes:
        ids = [model.prepare_decoder_input_ids_from_labels(labels=prompts[:, :1])]
    for _ in range(1 + tokens):
        spent, chosen = timed(decode if decodes else step, model.device)
        times.append(spent)
        ids.append(chosen)
        report()
    return times, torch.cat(ids[1:], 1)


def timed(run: Callable[[], Result], device: torch.device) -> tuple[float, Result]:
    """Return the wall time of a call in milliseconds, including all its work on a GPU, and its result."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _device: None
    wait(device)
    start = time.perf_counter()
    result = run()
    wait(device)
    return 1e3 * (time.perf_counter() - start), result


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the lower quartile, median and upper quartile, all within the range of the values."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return low, middle, high
