"""Time the generation of tokens: models × schemes × batches to rows, going on where an earlier run stopped."""

import hashlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedModel

from outliers.experiment.interrupt import stop_if_asked
from outliers.experiment.job import (
    Job,
    check_kernels,
    describe,
    left_fields,
    prepare,
    say_what_is_left,
)
from outliers.experiment.provenance import cost
from outliers.experiment.rows import RowFile
from outliers.experiment.sweep import schemes_of
from outliers.measurements.generation import Timings, check_generation, latency, quartiles
from outliers.models.anatomy import projections
from outliers.models.load import find_device, load_config, load_model
from outliers.quantization.fields import row_fields
from outliers.quantization.peers import BITSANDBYTES, has_bitsandbytes, with_bitsandbytes
from outliers.quantization.schemes import Scheme
from outliers.quantization.store import load_int8
from outliers.specification.kinds import Latency, Settings
from outliers.terminal.progress import Progress
from outliers.text.blocks import tokens_hash

logger = logging.getLogger(__name__)

# Metric: its unit, and the values of which it is the median.
METRICS = {
    "latency.decode": ("ms/token", lambda timings: timings.per_token),
    "latency.prefill": ("ms", lambda timings: timings.prefills),
    "latency.end_to_end": ("ms/token", lambda timings: timings.end_to_end),
}


def measure_latency(spec: Latency, out: str | Path | None = None, force: bool = False) -> list[dict]:
    """Time every model under every scheme with every batch (Table 6).

    One model is in memory at a time: not quantized in the dtype of the specification under `fp32`, otherwise with int8
    weights alone, ours or those of bitsandbytes. The rows of a batch are on disk before the next one starts; rows found
    there are used again.

    Args:
        spec: what to run.
        out: folder for `rows.jsonl`; by default `results/<name>`.
        force: measure again what is finished.

    Returns:
        One row a model, scheme, batch and metric of `METRICS`, with the median as value, the quartiles as q1 and q3,
        and the bytes of the model's weights.

    Raises:
        UserError: something is unknown, unreachable or does not fit together.
    """
    check_kernels(spec)
    schemes = _schemes(spec)
    shared = spec.model_dump(include={"name", "text", "bos", "alpha", "device", "dtype"})
    settings = Settings(**shared, block=spec.prompt, blocks=max(spec.batches))
    for name in spec.models:
        check_generation(load_config(name, spec.revision), spec.prompt, spec.tokens)
    jobs = [prepare(name, spec.revision, settings) for name in spec.models]
    for job in jobs:
        say_what_is_left(job.name, job.config, schemes)
    total = len(jobs) * len(schemes) * len(spec.batches)
    with RowFile(Path(out or spec.folder)) as row_file, Progress(total, "batch") as bar:
        return [
            row
            for job in jobs
            for scheme in schemes
            for row in _measure(job, scheme, spec, settings, row_file, force, bar)
        ]


def _measure(
    job: Job, scheme: Scheme | None, spec: Latency, settings: Settings, row_file: RowFile, force: bool, bar: Progress
) -> Iterator[dict]:
    """The rows of one model under one scheme."""
    bar.set_description(f"{job.model} {_name(scheme)}")
    device = find_device(spec.device)
    if device.type == "cuda":
        for number in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(number)
    model = _load(job, scheme, spec)
    common = {"experiment": spec.name, "scheme": _name(scheme), **_fields(job, scheme, settings, model)}
    for batch in spec.batches:
        prompts = job.blocks[:batch]
        cell = common | {
            "tokens_hash": tokens_hash(prompts),
            "batch": batch,
            "prompt": spec.prompt,
            "tokens": spec.tokens,
            "repeats": spec.repeats,
        }
        rows = [None if force else row_file.find(cell | {"metric": metric}) for metric in METRICS]
        if None not in rows:
            bar.skip(1)
        else:
            stop_if_asked()
            start = time.perf_counter()
            timings = latency(model, prompts, spec.tokens, spec.repeats, bar.see)
            spent = cost(start, device)
            rows = [cell | row | spent for row in _rows(timings)]
            row_file.add(*rows)
            bar.update()
        yield from rows


def _schemes(spec: Latency) -> list[Scheme | None]:
    """The schemes of a specification, and None for bitsandbytes where that is asked for and installed."""
    own = [name for name in spec.schemes if name != BITSANDBYTES]
    found: list[Scheme | None] = list(schemes_of(spec.model_copy(update={"schemes": own})))
    if BITSANDBYTES in spec.schemes:
        if has_bitsandbytes():
            return [*found, None]
        logger.info("bitsandbytes is not installed (pip install 'outliers[peers]'); this run goes on without it")
    return found


def _name(scheme: Scheme | None) -> str:
    return scheme.name if scheme else BITSANDBYTES


def _load(job: Job, scheme: Scheme | None, spec: Latency) -> PreTrainedModel:
    place = spec.dtype, spec.device, job.revision
    if scheme and scheme.quantizes:
        return load_int8(job.model, scheme, *place)
    model = load_model(job.model, *place)
    return model if scheme else with_bitsandbytes(model, spec.alpha)


def _rows(timings: Timings) -> Iterator[dict]:
    """Metrics with their values."""
    for metric, (unit, values) in METRICS.items():
        low, middle, high = quartiles(values(timings))
        yield {"metric": metric, "value": middle, "q1": low, "q3": high, "unit": unit}


def _fields(job: Job, scheme: Scheme | None, settings: Settings, model: PreTrainedModel) -> dict:
    """What the rows of a model under a scheme have in common; its text is said by prompt and batch."""
    fields = {name: value for name, value in describe(job, model, settings).items() if name not in ("block", "blocks")}
    if not scheme:
        fields |= {"kernels": BITSANDBYTES, "alpha": settings.alpha, "outlier_weights": "dequantized"}
        fields |= left_fields(model, fields["parameters"])
    if not scheme or not scheme.quantizes:
        return fields | {"weights_bytes": sum(weight.nbytes for weight in model.parameters())}
    layers = [module for *_, module in projections(model)]
    buffers = [buffer for layer in layers for buffer in layer.buffers()]  # codes and scales
    digest = hashlib.sha256(fields["weights_hash"].encode())
    for buffer in buffers:
        digest.update(buffer.cpu().numpy())
    fields |= {
        "weights_hash": digest.hexdigest()[:16],
        "parameters": fields["parameters"] + sum(layer.codes.numel() for layer in layers),
        "weights_bytes": sum(weight.nbytes for weight in [*model.parameters(), *buffers]),
    }
    return fields | row_fields(scheme, model) | left_fields(model, fields["parameters"])
