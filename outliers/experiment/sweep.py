"""Run an experiment: models × schemes to rows, going on where an earlier run stopped."""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from outlier_kernels.dispatch import path
from tqdm import tqdm
from transformers import PreTrainedModel

from outliers.evaluation.perplexity import perplexities, perplexity
from outliers.experiment.job import Counted, Job, check_kernels, load, prepare, progress
from outliers.experiment.provenance import cost
from outliers.experiment.rows import RowFile
from outliers.experiment.spec import Experiment, Latency, ZeroShot
from outliers.models.stream import is_streamed
from outliers.quantization.convert import quantize, under
from outliers.quantization.schemes import Scheme, get_scheme, weight_order


def sweep(experiment: Experiment, out: str | Path | None = None, force: bool = False) -> list[dict]:
    """Measure the perplexity of every model under every scheme.

    Each finished row is on disk before the next one starts; rows found there are used again. Names, texts and sizes
    are checked for all models before the first one is measured.

    Args:
        experiment: what to run.
        out: folder for `rows.jsonl`; by default `results/<name>`.
        force: measure again what is finished.

    Returns:
        One row a model and scheme, model by model; schemes that share weight codes are side by side.

    Raises:
        UserError: something in the experiment is unknown, unreachable or does not fit together.
    """
    check_kernels(experiment)
    total = len(experiment.models) * len(schemes_of(experiment)) * experiment.blocks
    jobs = [prepare(name, experiment.revision, experiment) for name in experiment.models]
    row_file = RowFile(Path(out or experiment.folder))
    with row_file, progress(total) as bar:
        return [row for job in jobs for row in _measure(job, experiment, row_file, force, bar)]


def schemes_of(experiment: Experiment | Latency | ZeroShot) -> list[Scheme]:
    """The schemes of an experiment; those that share weight codes are side by side."""
    return sorted((get_scheme(name, experiment.alpha) for name in experiment.schemes), key=weight_order)


def _measure(job: Job, experiment: Experiment, row_file: RowFile, force: bool, bar: tqdm) -> Iterator[dict]:
    """One load of the model serves all its schemes, and one quantization of its weights all schemes that share it."""
    bar.set_description(job.model)
    model, common = load(job, experiment)
    cells = [
        {"experiment": experiment.name, "model": job.model, "scheme": scheme.name, "metric": "perplexity"}
        | common
        | scheme_fields(scheme, model.device)
        for scheme in schemes_of(experiment)
    ]
    rows = [None if force else row_file.find(cell) for cell in cells]
    missing = [scheme for scheme, row in zip(schemes_of(experiment), rows, strict=True) if row is None]
    bar.update(len(job.blocks) * (len(cells) - len(missing)))
    if missing and is_streamed(model):
        # Added together: after Ctrl-C `add` stops the run, and what was measured with the first row would be lost.
        asked = [cell for cell, row in zip(cells, rows, strict=True) if row is None]
        values = _all_at_once(model, missing, job, bar)
        row_file.add(*(cell | fields for cell, fields in zip(asked, values, strict=True)))
        rows = [row_file.find(cell) for cell in cells]
    values = _one_by_one(model, missing, job, bar)
    for cell, row in zip(cells, rows, strict=True):
        if row is None:
            row = cell | next(values)
            row_file.add(row)
        yield row


def _one_by_one(model: PreTrainedModel, schemes: list[Scheme], job: Job, bar: tqdm) -> Iterator[dict]:
    """The perplexity under each scheme, as fields of a row."""
    for scheme in schemes:
        bar.set_description(f"{job.model} {scheme.name}")
        start = time.perf_counter()
        model = quantize(model, scheme)
        value = perplexity(model, Counted(job.blocks, bar))
        yield {"value": value, "unit": "1"} | cost(start, model.device)


def _all_at_once(model: PreTrainedModel, schemes: list[Scheme], job: Job, bar: tqdm) -> Iterator[dict]:
    """The same, with every layer read once for all schemes; so all have the same cost."""
    start = time.perf_counter()
    values = perplexities(model, job.blocks, [under(scheme) for scheme in schemes])
    bar.update(len(job.blocks) * len(schemes))
    for value in values:
        yield {"value": value, "unit": "1"} | cost(start, model.device)


def scheme_fields(scheme: Scheme, device: torch.device) -> dict:
    """The settings of a scheme that are not in its name, and which kernels run it."""
    if scheme.bits != 8:
        return {}
    # Plain codes, as a sweep keeps them, have a path of their own on GPUs only.
    kernels = {"kernels": "triton" if path(device) == "triton" else "reference"}
    if scheme.outlier_threshold is None:
        return kernels
    return kernels | {
        "alpha": scheme.outlier_threshold,
        "outlier_weights": "dequantized" if scheme.bitsandbytes else "exact",
    }
