"""Run an experiment: models × schemes to rows, going on where an earlier run stopped."""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from outlier_kernels.dispatch import path
from tqdm import tqdm

from outliers.evaluation.perplexity import perplexity
from outliers.experiment.job import Counted, Job, check_kernels, load, prepare, progress
from outliers.experiment.provenance import cost
from outliers.experiment.rows import RowFile
from outliers.experiment.spec import Experiment, Latency, ZeroShot
from outliers.quantization.convert import quantize
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
    for scheme in schemes_of(experiment):
        cell = {"experiment": experiment.name, "model": job.model, "scheme": scheme.name, "metric": "perplexity"}
        cell |= common | scheme_fields(scheme, model.device)
        row = None if force else row_file.find(cell)
        if row is None:
            bar.set_description(f"{job.model} {scheme.name}")
            start = time.perf_counter()
            model = quantize(model, scheme)
            value = perplexity(model, Counted(job.blocks, bar))
            row = cell | {"value": value, "unit": "1"} | cost(start, model.device)
            row_file.add(row)
        else:
            bar.update(len(job.blocks))
        yield row


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
