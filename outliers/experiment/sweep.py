"""Run an experiment: models × schemes to rows, going on where an earlier run stopped."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from outliers.evaluation.perplexity import perplexity
from outliers.experiment.provenance import environment, peak_memory
from outliers.experiment.rows import RowFile
from outliers.experiment.spec import Experiment
from outliers.models.anatomy import check_block
from outliers.models.load import find_device, load_config, load_model, load_tokenizer, weights_hash
from outliers.quantization.convert import quantize
from outliers.quantization.schemes import Scheme, get_scheme, weight_order
from outliers.text.blocks import find_text, load_text, tokens_hash


class Job(NamedTuple):
    """One model of the experiment with its token blocks, int64 (blocks, T)."""

    model: str
    blocks: torch.Tensor


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
    find_device(experiment.device)
    total = len(experiment.models) * len(_schemes(experiment)) * experiment.blocks
    jobs = [_prepare(name, experiment) for name in experiment.models]
    row_file = RowFile(Path(out or experiment.folder))
    with row_file, tqdm(total=total, unit="block", disable=None, dynamic_ncols=True) as bar:
        return [row for job in jobs for row in _measure(job, experiment, row_file, force, bar)]


def _schemes(experiment: Experiment) -> list[Scheme]:
    return sorted((get_scheme(name, experiment.alpha) for name in experiment.schemes), key=weight_order)


def _prepare(name: str, experiment: Experiment) -> Job:
    """Load what is light of a model, so that a mistake shows before anything is measured."""
    config = load_config(name, experiment.revision)
    check_block(config, experiment.block)
    tokenizer = load_tokenizer(name, experiment.revision)
    blocks = load_text(experiment.text, tokenizer, experiment.block, experiment.blocks)
    check_block(config, experiment.block, int(blocks.max()))
    return Job(name, blocks)


def _measure(job: Job, experiment: Experiment, row_file: RowFile, force: bool, bar: tqdm) -> Iterator[dict]:
    """One load of the model serves all its schemes, and one quantization of its weights all schemes that share it."""
    bar.set_description(job.model)
    device = find_device(experiment.device)
    model = load_model(job.model, experiment.dtype, device, experiment.revision)
    common = _common_fields(job, model, experiment, device)
    for scheme in _schemes(experiment):
        cell = {"experiment": experiment.name, "model": job.model, "scheme": scheme.name, "metric": "perplexity"}
        cell |= common | _scheme_fields(scheme)
        row = None if force else row_file.find(cell)
        if row is None:
            bar.set_description(f"{job.model} {scheme.name}")
            start = time.perf_counter()
            model = quantize(model, scheme)
            value = perplexity(model, _counted(job.blocks, bar))
            row = cell | {"value": value, "unit": "1", "wall_seconds": round(time.perf_counter() - start, 3)}
            row["peak_memory_bytes"] = peak_memory(device)
            row_file.add(row)
        else:
            bar.update(len(job.blocks))
        yield row


def _counted(blocks: torch.Tensor, bar: tqdm) -> Iterator[torch.Tensor]:
    for block in blocks:
        yield block
        bar.update()


def _scheme_fields(scheme: Scheme) -> dict:
    """The settings of a scheme that are not in its name."""
    if scheme.outlier_threshold is None:
        return {}
    return {"alpha": scheme.outlier_threshold, "outlier_weights": "exact"}


def _common_fields(job: Job, model, experiment: Experiment, device: torch.device) -> dict:
    fields = {
        "revision": getattr(model.config, "_commit_hash", None),
        "weights_hash": weights_hash(model),
        "architecture": model.config.model_type,
        "parameters": model.num_parameters(),
        "text": experiment.text,
        "tokens_hash": tokens_hash(job.blocks),
        "protocol": find_text(experiment.text).protocol,
        "block": experiment.block,
        "blocks": experiment.blocks,
        "dtype": experiment.dtype,
        **environment(device),
    }
    return {name: value for name, value in fields.items() if value is not None}
