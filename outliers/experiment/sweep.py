"""Run an experiment: models × schemes to rows, going on where an earlier run stopped."""

import statistics
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path

import torch
from transformers import PreTrainedModel

from outliers.experiment.cell import Bench, Cell, check_same_weights, named, said, size
from outliers.experiment.engine import Engine, engine_of, with_weights
from outliers.experiment.job import Counted, Job, left_fields, prepare, say_what_is_left
from outliers.experiment.parts import sweep_parts
from outliers.experiment.provenance import cost, total_cost
from outliers.experiment.rows import RowFile, rows_of
from outliers.measurements.perplexity import Loss, losses, perplexity_of, variant_losses
from outliers.measurements.scatter import check_draws, drawn
from outliers.models.stream import is_streamed
from outliers.quantization.convert import quantize, under
from outliers.quantization.fields import row_fields
from outliers.quantization.schemes import Scheme, by_weights, get_scheme
from outliers.specification.kinds import Experiment, Latency, ZeroShot, alpha_of_schemes
from outliers.terminal.progress import Progress

Key = tuple[str, str]  # model and scheme


def sweep(experiment: Experiment, out: str | Path | None = None, force: bool = False) -> list[dict]:
    """Measure the perplexity of every model under every scheme.

    Each finished row is on disk before the next one starts; rows found there are used again. Names, texts and sizes
    are checked for all models before the first one is measured. On a cluster the blocks of a row may be measured in
    parts on several machines; it is written when the last one is there.

    Args:
        experiment: what to run.
        out: folder for `rows.jsonl`; by default `results/<name>`.
        force: measure again what is finished.

    Returns:
        One row a model and scheme, model by model; schemes that share weight codes are side by side. Of several draws
        the value is their mean, with their sample standard deviation.

    Raises:
        UserError: something in the experiment is unknown, unreachable or does not fit together; there are several
            draws and a dtype of 16 bits; or cells failed on a cluster.
    """
    schemes = schemes_of(experiment)
    check_draws(experiment.draws, experiment.dtype)
    jobs = [prepare(name, experiment.revision, experiment) for name in experiment.models]
    for job in jobs:
        say_what_is_left(job.name, job.config, schemes)
    total = len(jobs) * len(schemes) * experiment.blocks * experiment.draws
    rows: dict[Key, dict] = {}
    row_file = RowFile(Path(out or experiment.folder))
    with row_file, Progress(total) as bar, engine_of(experiment, bar) as engine:
        done = [] if force else rows_of(experiment, row_file.rows)
        engine.foresee(
            jobs, experiment, sweep_parts(schemes, experiment.draws), 1 - len(done) / (len(jobs) * len(schemes))
        )
        for group in engine.groups(jobs):
            if row_file.rows and not force:
                rows |= _found(group, experiment, row_file, engine)
                found = sum((job.model, scheme.name) in rows for job in group for scheme in schemes)
                bar.skip(found * experiment.blocks * experiment.draws)
            missing = [(job, [scheme for scheme in schemes if (job.model, scheme.name) not in rows]) for job in group]
            rows |= _measured(missing, experiment, row_file, engine)
    return [rows[job.model, scheme.name] for job in jobs for scheme in schemes]


def schemes_of(experiment: Experiment | Latency | ZeroShot) -> list[Scheme]:
    """The schemes of an experiment; those that share weight codes are side by side."""
    return by_weights(get_scheme(scheme, alpha_of_schemes(experiment)) for scheme in experiment.schemes)


def _found(jobs: list[Job], experiment: Experiment, row_file: RowFile, engine: Engine) -> dict[Key, dict]:
    """The finished rows; which weights a model has is known when it is loaded, or read."""
    cells = [Cell("its fields", _describe, job, (experiment, schemes_of(experiment)), 0) for job in jobs]
    found = {}
    for cell, described in engine.run(cells):
        for fields in described:
            fields = with_weights(engine, cell.job, experiment, fields, row_file.find_all)
            if row := row_file.find(fields):
                found[row["model"], row["scheme"]] = row
    return found


def _measured(
    missing: list[tuple[Job, list[Scheme]]], experiment: Experiment, row_file: RowFile, engine: Engine
) -> dict[Key, dict]:
    """Measure rows, and write each when the last part of its text is there."""
    if experiment.stream:  # each layer is read once for all schemes
        together = [(job, schemes) for job, schemes in missing if schemes]
    else:
        together = [(job, [scheme]) for job, schemes in missing for scheme in schemes]
    parts = engine.parts(experiment.blocks, len(together))
    cells = [_cell(job, experiment, schemes, part) for job, schemes in together for part in parts]
    arrived, rows = defaultdict(dict), {}
    for cell, result in engine.run(cells):
        _, schemes, part = cell.arguments
        of_parts = arrived[cell.job.model, schemes[0]]
        of_parts[part.start] = result
        if len(of_parts) == len(parts):
            new = [_row(of_scheme) for of_scheme in zip(*(of_parts[part.start] for part in parts), strict=True)]
            row_file.add(*new)
            rows |= {(row["model"], row["scheme"]): row for row in new}
    return rows


def _cell(job: Job, experiment: Experiment, schemes: list[Scheme], part: slice) -> Cell:
    what = f"{', '.join(scheme.name for scheme in schemes)}, {said(part)}"
    steps = len(schemes) * size(part) * experiment.draws
    return Cell(what, _measure, job, (experiment, schemes, part), steps)


def _describe(bench: Bench, job: Job, experiment: Experiment, schemes: list[Scheme]) -> list[dict]:
    """The fields of the rows of a model but their values."""
    model, common = bench.load(job, experiment)
    return [
        {"experiment": experiment.name, "model": job.model, "scheme": scheme.name, "metric": "perplexity"}
        | {"draws": experiment.draws}
        | common
        | scheme_fields(scheme, model)
        for scheme in schemes
    ]


def _measure(
    bench: Bench, job: Job, experiment: Experiment, schemes: list[Scheme], part: slice
) -> list[tuple[dict, list[list[Loss]]]]:
    """The fields of the row of each scheme, and draw by draw the losses of a part of the text."""
    model, _ = bench.load(job, experiment)
    described = _describe(bench, job, experiment, schemes)
    start = time.perf_counter()
    if not is_streamed(model):
        # One quantization of the weights serves all schemes that share its codes.
        (scheme,) = schemes
        model = quantize(model, scheme)
        bench.leave(model)
    found = []
    for draw in range(experiment.draws):
        with named(job.name, *(scheme.name for scheme in schemes)), drawn(model, draw):
            found.append(_losses(model, job.blocks[part], schemes, bench.bar))
    spent = bench.weights() | cost(start, model.device)
    by_scheme = map(list, zip(*found, strict=True))
    return [(fields | spent, of_scheme) for fields, of_scheme in zip(described, by_scheme, strict=True)]


def _losses(model: PreTrainedModel, blocks: torch.Tensor, schemes: list[Scheme], bar: Progress) -> list[list[Loss]]:
    """The losses under each scheme; a resident model is under its own already."""
    if not is_streamed(model):
        return [losses(model, Counted(blocks, bar))]
    found = variant_losses(model, blocks, [under(scheme) for scheme in schemes])
    bar.update(len(schemes) * len(blocks))
    return found


def _row(parts: tuple[tuple[dict, list[list[Loss]]], ...]) -> dict:
    """A row of what was measured on all parts of the text, in their order: the mean over draws, and their scatter."""
    fields = [fields for fields, _ in parts]
    check_same_weights(fields)
    draws = zip(*(of_part for _, of_part in parts), strict=True)
    with named(fields[0]["model"], fields[0]["scheme"]):
        values = [perplexity_of(list(chain.from_iterable(of_draw))) for of_draw in draws]
    found = {"value": statistics.fmean(values), "unit": "1"}
    if len(values) > 1:
        found["standard_deviation"] = statistics.stdev(values)
    return fields[0] | found | total_cost(fields)


def scheme_fields(scheme: Scheme, model: PreTrainedModel) -> dict:
    """The settings of a scheme that are not in its name, which kernels run it, and what of a model it leaves."""
    left = left_fields(model, model.num_parameters()) if scheme.quantizes else {}
    return row_fields(scheme, model) | left
