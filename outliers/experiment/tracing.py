"""Trace one model to rows, going on where an earlier run stopped."""

import logging
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.experiment.cell import Bench, Cell, check_same_weights, said, size
from outliers.experiment.engine import Engine, common_fields, engine_of, gather, with_weights
from outliers.experiment.interrupt import asked_to_stop, stop_if_asked
from outliers.experiment.job import Counted, Job, prepare
from outliers.experiment.parts import trace_parts
from outliers.experiment.place import check_alone, place_of
from outliers.experiment.provenance import joined, measuring
from outliers.experiment.rows import RowFile, identifying
from outliers.files import check_replaceable
from outliers.measurements.attention import top1_softmax
from outliers.measurements.perplexity import Loss, losses, perplexity_of
from outliers.models.anatomy import ROLES
from outliers.specification.kinds import OneModel
from outliers.terminal.progress import Progress
from outliers.tracing.result import Trace
from outliers.tracing.table4 import table4_row
from outliers.tracing.trace import trace
from outliers.variants.interventions import Intervention

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_SAVES = 30
PASSES = 3  # over the text: the trace, perplexity, top-1 softmax probability
PLACES = ("feature", "layer", "role", "position", "token")  # columns that say where, not what


def trace_model(spec: OneModel, out: str | Path | None = None, force: bool = False) -> tuple[Trace, list[dict]]:
    """Trace a model, and measure what its row in Table 4 needs beside.

    The trace is on disk every half minute, as the pair `trace.safetensors` and `trace.parquet`; a run that was killed
    goes on from there. Finished rows are used again.

    Args:
        spec: what to run.
        out: folder for the results; by default `results/trace/<model>`, see `outliers.experiment.place.place_of`.
        force: measure again what is finished.

    Returns:
        The trace and its rows: those of `table4_row`, `outlier_feature.*`, `hidden_state.*`, `largest.value`,
        `residual.*` and `attention_sink.share`; tokens are ids.

    Raises:
        UserError: something is unknown, unreachable or does not fit together; a hidden state holds NaN or inf; or
            `out` holds the results of another model.
    """
    job = prepare(spec.model, spec.revision, spec)
    folder = place_of(spec, out)
    with RowFile(folder) as row_file, Progress(PASSES * spec.blocks) as bar, engine_of(spec, bar) as engine:
        check_alone(spec, folder)  # another run may have ended there
        bar.set_description(spec.model)
        done = not force and row_file.likely(spec)
        engine.foresee([job], spec, trace_parts(spec), 0.0 if done else 1.0)
        (common,) = common_fields(engine, [job], spec)
        fields = {"experiment": "trace", **common, "alpha": spec.alpha, "roles": list(ROLES)}
        stem = folder / "trace"

        def begun(fields: dict) -> bool:
            return not force and bool(row_file.may_have(fields) or _saved(stem, identifying(fields)))

        fields = with_weights(engine, job, spec, fields, begun)
        found, costs = _resumed_trace(engine, job, spec, fields, stem, force, bar)
        fields |= {"weights_hash": found.about["weights_hash"]}
        rows = [] if force else row_file.find_all(fields)
        if not _are_whole(rows, found):
            values, further_costs = _table4(engine, job, spec, fields, found)
            spent = joined([*costs, *further_costs])
            rows = [fields | row | spent for row in [*tidy([values]), *details(found)]]
            row_file.add(*rows)
    return found, rows


def _are_whole(rows: list[dict], found: Trace) -> bool:
    """Whether rows that were found are all of a trace."""
    top1_softmax = [0.0] * (1 if found.outlier_features().empty else 2)
    expected = [*tidy([table4_row(found, 1.0, top1_softmax)]), *details(found)]
    return {_which(row) for row in rows} == {_which(row) for row in expected}


def _which(row: dict) -> tuple:
    return tuple(row.get(field) for field in ("metric", *PLACES))


def _resumed_trace(
    engine: Engine, job: Job, spec: OneModel, fields: dict, stem: Path, force: bool, bar: Progress
) -> tuple[Trace, list[dict]]:
    """The trace of all blocks, and what its parts have cost.

    It goes on from what is saved at `stem` if that is the beginning of the same one.
    """
    about = identifying(fields)
    found = None if force else _saved(stem, about)
    done = found.sequences if found else 0
    bar.skip(done)
    saved, arrived, costs = time.monotonic(), {}, []
    parts = _parts(engine, spec, done)
    cells = [Cell(f"trace, {said(part)}", _trace, job, (spec, fields, part), size(part)) for part in parts]
    for cell, (one, weights, spent) in engine.run(cells):
        check_same_weights([fields | weights, fields | weights | about])
        about |= weights
        arrived[cell.arguments[-1].start] = one
        costs.append(spent)
        while done in arrived:  # in the order of the text, so that what is saved is its beginning
            one = arrived.pop(done)
            found = found.merge(one) if found else one
            found.about, done = about, found.sequences
        if found and (asked_to_stop() or time.monotonic() - saved > SECONDS_BETWEEN_SAVES):
            found.save(stem)
            saved = time.monotonic()
            stop_if_asked()
    if cells:
        found.save(stem)
    return found, costs


def _parts(engine: Engine, spec: OneModel, done: int) -> list[slice]:
    """The parts of the text after its first blocks that are traced at once.

    A streamed model takes all: each pass reads all its layers.
    """
    if spec.engine == "local" and not spec.stream:
        return [slice(number, number + 1) for number in range(done, spec.blocks)]
    parts = engine.parts(spec.blocks - done, 1) if done < spec.blocks else []
    return [slice(done + part.start, done + part.stop) for part in parts]


def _trace(bench: Bench, job: Job, spec: OneModel, fields: dict, part: slice) -> tuple[Trace, dict, dict]:
    """The trace of a part of the text, of which weights it is, and what it has cost."""
    model, _ = bench.load(job, spec, fields)
    with measuring(spec.device) as spent:
        found = trace(model, Counted(job.blocks[part], bench.bar), alpha=spec.alpha)
    return found, bench.weights(), spent.fields


def _table4(
    engine: Engine, job: Job, spec: OneModel, fields: dict, found: Trace
) -> tuple[dict[str, float], list[dict]]:
    """The row of Table 4 of a traced model, and what its parts have cost."""
    parts = engine.parts(spec.blocks, 1)
    cells = [Cell(said(part), _measure, job, (spec, fields, found, part), 2 * size(part)) for part in parts]
    measured, costs = zip(*gather(engine, cells), strict=True)
    shares = [size(part) / spec.blocks for part in parts]
    of_parts = zip(*(beside.top1_softmax for beside in measured), strict=True)
    top1 = [sum(share * value for share, value in zip(shares, values, strict=True)) for values in of_parts]
    perplexity = perplexity_of([loss for beside in measured for loss in beside.losses])
    return table4_row(found, perplexity, top1), list(costs)


def _measure(
    bench: Bench, job: Job, spec: OneModel, fields: dict, found: Trace, part: slice
) -> tuple["BesideTrace", dict]:
    model, _ = bench.load(job, spec, fields)
    with measuring(spec.device) as spent:
        beside = measure_beside(model, job.blocks[part], found, bench.bar)
    return beside, spent.fields


def _saved(stem: Path, about: dict) -> Trace | None:
    """What is saved of the same trace, as far as that is known of a streamed model.

    None where there is nothing of it, or where a kill came between its files.

    Raises:
        UserError: something else than files stands where it is to be saved.
    """
    files = [stem.with_name(f"{stem.name}.{ending}") for ending in ("safetensors", "parquet")]
    for file in files:
        check_replaceable(file)
    if not any(file.exists() for file in files):
        return None
    try:
        found = Trace.load(stem)
    except UserError as error:
        logger.info(f"{error}; this run does")
        return None
    unknown = {"weights_hash"} - about.keys()
    same = {field: found.about[field] for field in found.about.keys() - unknown} == about
    return found if same and found.sequences <= about["blocks"] else None


class BesideTrace(NamedTuple):
    """What the row of Table 4 needs beside the trace: top-1 softmax probability with and, if there are outliers,
    without them; the loss of each block."""

    top1_softmax: list[float]
    losses: list[Loss]


def measure_beside(model: PreTrainedModel, blocks: torch.Tensor, found: Trace, bar: Progress) -> BesideTrace:
    """Measure it on blocks (blocks, T) of a text that was traced."""
    outliers = tuple(found.outlier_features()["feature"])
    interventions = [Intervention(()), Intervention(outliers)] if outliers else [Intervention(())]
    top1 = top1_softmax(model, Counted(blocks, bar), interventions)
    return BesideTrace(top1, losses(model, Counted(blocks, bar)))


def details(found: Trace) -> list[dict]:
    """Rows of the trace beyond those of Table 4."""
    sinks = found.attention_sinks()
    tables = {
        "outlier_feature": found.outlier_features(),
        "hidden_state": found.hidden_states(),
        "largest": found.largest_values(by="layer").drop(columns="max"),  # an infinity norm
        "residual": found.massive_activations(),
        "attention_sink": sinks[sinks["share"] > 0],
    }
    return [row for prefix, table in tables.items() for row in tidy(table, f"{prefix}.")]


def tidy(table: pd.DataFrame | list[dict], prefix: str = "") -> list[dict]:
    """One row a value of a table; what is missing, or has no end, gives none."""
    rows = []
    for record in pd.DataFrame(table).to_dict("records"):
        places = {name: record[name] for name in PLACES if name in record}
        values = {name: value for name, value in record.items() if name not in PLACES and np.isfinite(value)}
        rows += [{**places, "metric": f"{prefix}{name}", "value": float(v), "unit": "1"} for name, v in values.items()]
    return rows
