"""Milliseconds a generated token, with a KV cache: models × schemes × batches (Table 6)."""

import hashlib
import itertools
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

from outliers.errors import UserError
from outliers.measurements.bench import (
    Bench,
    Job,
    check_schemes,
    check_uncalibrated,
    describe,
    left_fields,
    say_what_is_left,
)
from outliers.measurements.measurement import Measurement, Question
from outliers.metrics.measurement import Keeps
from outliers.models.anatomy import check_block, context_length, projections
from outliers.models.decoder import inference
from outliers.models.load import load_config, load_model
from outliers.quantization.convert import check_kept, quantize
from outliers.quantization.fields import row_fields
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.peers import has_bitsandbytes, with_bitsandbytes
from outliers.quantization.schemes import Scheme
from outliers.quantization.store import load_int8
from outliers.specification.kinds import PEER, Latency, Settings, schemes_of
from outliers.text.blocks import tokens_hash

logger = logging.getLogger(__name__)


class Timings(NamedTuple):
    """What some equal generations took, in milliseconds, and what they generated.

    prefills: of each generation, the pass over the prompts that gives the first new token of each. steps: of each
    generation, its decode steps, one further token of each sequence a step. ids: int64 (batch, 1 + tokens).
    """

    prefills: list[float]
    steps: list[list[float]]
    ids: torch.Tensor

    @property
    def per_token(self) -> list[float]:
        """Milliseconds a generated token of every decode step: its time over the batch (Table 6)."""
        return [step / len(self.ids) for steps in self.steps for step in steps]

    @property
    def end_to_end(self) -> list[float]:
        """Milliseconds a generated token of every generation, the prefill included."""
        return [
            (prefill + sum(steps)) / self.ids.numel() for prefill, steps in zip(self.prefills, self.steps, strict=True)
        ]


# Metric: its unit, and the values of which it is the median.
METRICS = {
    "latency.decode": ("ms/token", lambda timings: timings.per_token),
    "latency.prefill": ("ms", lambda timings: timings.prefills),
    "latency.end_to_end": ("ms/token", lambda timings: timings.end_to_end),
}


class UnderScheme(NamedTuple):
    """A model that is loaded under a scheme; None for the layers of bitsandbytes."""

    job: Job
    scheme: Scheme | None

    @property
    def name(self) -> str:
        """The model's."""
        return self.job.name

    @property
    def scheme_name(self) -> str:
        """As specifications and rows have it."""
        return self.scheme.name if self.scheme else PEER


class LatencyRows(Measurement[Latency]):
    """One row a model, scheme, batch and metric of `METRICS`: the median, with the quartiles as q1 and q3.

    One model is in memory at a time: not quantized in the dtype of the specification under `fp32`, otherwise with int8
    weights alone, ours or those of bitsandbytes. It is timed in this process: beside others, no time is its own.
    """

    unit = "batch"

    def subjects(self) -> list[UnderScheme]:
        spec = self.spec
        shared = spec.model_dump(include={"name", "text", "bos", "alpha", "device", "dtype"})
        self.settings = Settings(**shared, block=spec.prompt, blocks=max(spec.batches))
        schemes = _schemes(spec)
        check_uncalibrated(schemes)
        for name in spec.models:
            check_generation(load_config(name, spec.revision), spec.prompt, spec.tokens)
        for scheme in filter(None, schemes):
            check_kept(scheme)
        jobs = [Job.of(name, spec.revision, self.settings) for name in spec.models]
        for job in jobs:
            check_schemes(job.config, schemes, spec.skip)
            say_what_is_left(job.name, job.config, schemes)
        return [UnderScheme(job, scheme) for job in jobs for scheme in schemes]

    def keeps(self, subject: UnderScheme) -> Keeps:
        spec, quantizes = self.spec, subject.scheme is None or subject.scheme.quantizes_projections
        batch, options = max(spec.batches), frozenset(("dtype", "device"))
        cached = batch * (spec.prompt + spec.tokens)
        return Keeps(int8=quantizes, block=spec.prompt, batch=batch, cached=cached, options=options)

    def total(self, _subject: UnderScheme) -> int:
        return len(self.spec.batches)

    def look(self, bench: Bench, subject: UnderScheme) -> tuple[dict, None]:
        return self._load(bench, subject)[1], None

    def _load(self, bench: Bench, subject: UnderScheme, like: dict | None = None) -> tuple[PreTrainedModel, dict]:
        def load() -> tuple[PreTrainedModel, dict]:
            model = _load(subject, self.spec)
            return model, {"scheme": subject.scheme_name} | _fields(subject, self.spec, self.settings, model)

        return bench.keep(subject.job, f"{self.settings.model_dump_json()} {subject.scheme_name}", load, like)

    def questions(self, subject: UnderScheme, _facts: None) -> list[Question]:
        spec = self.spec
        return [
            Question(
                f"{subject.scheme_name}, batch {batch}",
                {"tokens_hash": tokens_hash(subject.job.blocks[:batch]), "batch": batch}
                | spec.model_dump(include={"prompt", "tokens", "repeats"}),
                batch,
                tuple(METRICS),
            )
            for batch in spec.batches
        ]

    def answer(self, bench: Bench, subject: UnderScheme, question: Question, fields: dict) -> "Timings":
        model, _ = self._load(bench, subject, fields)
        prompts = subject.job.blocks[: question.about]
        return latency(model, prompts, self.spec.tokens, self.spec.repeats, bench.bar.see)

    def rows(self, _question: Question, answer: "Timings") -> list[dict]:
        rows = []
        for metric, (unit, values) in METRICS.items():
            low, middle, high = quartiles(values(answer))
            rows.append({"metric": metric, "value": middle, "q1": low, "q3": high, "unit": unit})
        return rows


def _schemes(spec: Latency) -> list[Scheme | None]:
    """The schemes of a specification, and None for bitsandbytes where that is asked for and installed."""
    found: list[Scheme | None] = [*schemes_of(spec)]
    if PEER in spec.schemes:
        if has_bitsandbytes():
            return [*found, None]
        logger.info("bitsandbytes is not installed (pip install 'outliers[peers]'); this run goes on without it")
    return found


def _load(subject: UnderScheme, spec: Latency) -> PreTrainedModel:
    (job, scheme), place = subject, (spec.dtype, spec.device, subject.job.revision)
    if scheme and scheme.quantizes_projections:
        return load_int8(job.model, scheme, *place, skip=spec.skip)
    model = load_model(job.model, *place)
    if scheme and scheme.quantizes:
        return quantize(model, scheme, skip=spec.skip)
    return model if scheme else with_bitsandbytes(model, spec.alpha)


def _fields(subject: UnderScheme, spec: Latency, settings: Settings, model: PreTrainedModel) -> dict:
    """What the rows of a model under a scheme have in common; its text is said by prompt and batch."""
    scheme, described = subject.scheme, describe(subject.job, model, settings)
    fields = {name: value for name, value in described.items() if name not in ("block", "blocks", "tokens_hash")}
    if not scheme:
        fields |= {"kernels": PEER, "alpha": settings.alpha, "outlier_weights": "dequantized"}
        fields |= left_fields(model, fields["parameters"])
    if not scheme or not scheme.quantizes_projections:
        fields["weights_bytes"] = sum(weight.nbytes for weight in model.parameters())
        return fields | (row_fields(scheme, model, spec.skip) if scheme else {})
    quantized = [module for *_, module in projections(model) if isinstance(module, Int8Linear)]
    buffers = [buffer for layer in quantized for buffer in layer.buffers()]  # codes and scales
    digest = hashlib.sha256(fields["weights_hash"].encode())
    for buffer in buffers:
        digest.update(buffer.cpu().numpy())
    fields |= {
        "weights_hash": digest.hexdigest()[:16],
        "parameters": fields["parameters"] + sum(layer.codes.numel() for layer in quantized),
        "weights_bytes": sum(weight.nbytes for weight in [*model.parameters(), *buffers]),
    }
    return fields | row_fields(scheme, model, spec.skip) | left_fields(model, fields["parameters"])


@inference
def latency(
    model: PreTrainedModel,
    prompts: torch.Tensor,
    tokens: int,
    repeats: int,
    see: Callable[[float], None] = lambda share: None,
) -> Timings:
    """Time the greedy generation of tokens (appendix D.2), after one whole generation that is not timed.

    Each pass through the model is timed on its own, with the choice of the next token; on a GPU each is waited for.
    Only the logits of the last position are made. No token ends a sequence.

    Args:
        model: a causal language model, quantized or not.
        prompts: token ids, int64 (batch, P).
        tokens: decode steps of a generation, which follow its first token.
        repeats: timed generations.
        see: called between passes with the share of them that are made.

    Raises:
        UserError: prompt and tokens exceed the model's context, an id is outside its vocabulary, or there is nothing
            to time.
    """
    check_generation(model.config, prompts.shape[1], tokens)
    check_block(model.config, prompts.shape[1], int(prompts.max()))
    if min(tokens, repeats) < 1:
        raise UserError(f"{repeats} generations of {tokens} tokens; expected at least 1 of 1")
    prompts = prompts.to(model.device)
    passes, made = (1 + repeats) * (1 + tokens), itertools.count(1)
    generations = [_generate(model, prompts, tokens, lambda: see(next(made) / passes)) for _ in range(1 + repeats)][1:]
    prefills, steps = zip(*((times[0], times[1:]) for times, _ in generations), strict=True)
    return Timings(list(prefills), list(steps), generations[-1][1].cpu())


def check_generation(config: PretrainedConfig, prompt: int, tokens: int) -> None:
    """Raise UserError if a prompt of so many tokens, and so many decode steps after it, exceed a model's context."""
    limit = context_length(config)
    if limit is not None and prompt + tokens > limit:
        raise UserError(
            f"prompts of {prompt} tokens and {tokens} generated ones exceed the model's context of {limit}; use less"
        )


def _generate(
    model: PreTrainedModel, prompts: torch.Tensor, tokens: int, made: Callable[[], None]
) -> tuple[list[float], torch.Tensor]:
    """Milliseconds of the prefill and of each step after it, and the ids that they chose, (batch, 1 + tokens).

    made: called after each.
    """
    cache = DynamicCache(config=model.config)
    times, ids = [], [prompts]

    def step() -> torch.Tensor:
        logits = model(ids[-1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    for _ in range(1 + tokens):
        spent, chosen = timed(step, model.device)
        times.append(spent)
        ids.append(chosen)
        made()
    return times, torch.cat(ids[1:], 1)


def timed(run: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Milliseconds of wall time of a call, all its work on a GPU included, and what it returned."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda _device: None
    wait(device)
    start = time.perf_counter()
    result = run()
    wait(device)
    return 1e3 * (time.perf_counter() - start), result


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile, all within the values."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return low, middle, high
