"""Trace one model to rows, going on where an earlier run stopped."""

import time
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from outliers.ablation.attention import top1_softmax
from outliers.ablation.interventions import Intervention
from outliers.errors import UserError
from outliers.evaluation.perplexity import perplexity
from outliers.experiment.interrupt import asked_to_stop, stop_if_asked
from outliers.experiment.job import Counted, load, prepare, progress
from outliers.experiment.provenance import cost
from outliers.experiment.rows import IDENTITY, RowFile
from outliers.experiment.spec import OneModel
from outliers.models.stream import is_streamed
from outliers.tracing.result import Trace
from outliers.tracing.table4 import table4_row
from outliers.tracing.trace import trace

SECONDS_BETWEEN_SAVES = 30
PASSES = 3  # over the text: the trace, perplexity, top-1 softmax probability
PLACES = ("feature", "layer", "role", "position", "token")  # columns that say where, not what


def trace_model(spec: OneModel, out: str | Path | None = None, force: bool = False) -> tuple[Trace, list[dict]]:
    """Trace a model, and measure what its row in Table 4 needs beside.

    The trace is on disk every half minute, as the pair `trace.safetensors` and `trace.parquet`; a run that was killed
    goes on from there. Finished rows are used again.

    Args:
        spec: what to run.
        out: folder for the results; by default `results/trace/<model>`.
        force: measure again what is finished.

    Returns:
        The trace and its rows: those of `table4_row`, `outlier_feature.*`, `hidden_state.*`, `residual.*` and
        `attention_sink.share`.

    Raises:
        UserError: something is unknown, unreachable or does not fit together; a hidden state holds NaN or inf.
    """
    job = prepare(spec.model, spec.revision, spec)
    folder = Path(out or spec.folder)
    with RowFile(folder) as row_file, progress(PASSES * spec.blocks) as bar:
        bar.set_description(spec.model)
        start = time.perf_counter()
        model, common = load(job, spec)
        cell = {"experiment": "trace", **common, "alpha": spec.alpha}
        found = resumed_trace(model, job.blocks, cell, folder / "trace", force, bar)
        rows = [] if force else row_file.find_all(cell)
        if not rows:
            values = measure_table4(model, job.blocks, found, bar)
            spent = cost(start, model.device)
            rows = [cell | row | spent for row in [*tidy([values]), *details(found)]]
            row_file.add(*rows)
    return found, rows


def resumed_trace(
    model: PreTrainedModel, blocks: torch.Tensor, cell: dict, stem: Path, force: bool, bar: tqdm
) -> Trace:
    """The trace of all blocks, going on from what is saved at `stem` if that is the beginning of the same one."""
    about = {field: cell[field] for field in IDENTITY if field in cell}
    found = None if force else _saved(stem, about)
    done = found.sequences if found else 0
    bar.update(done)
    saved = time.monotonic()
    # A streamed model takes all blocks at once: each pass reads all its layers.
    parts = [blocks[done:]] if is_streamed(model) else blocks[done:, None]
    for part in parts:
        one = trace(model, Counted(part, bar), alpha=cell["alpha"])
        found = found.merge(one) if found else one
        found.about = about
        if asked_to_stop() or time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
            found.save(stem)
            saved = time.monotonic()
            stop_if_asked()
    if done < len(blocks):
        found.save(stem)
    return found


def _saved(stem: Path, about: dict) -> Trace | None:
    try:
        found = Trace.load(stem)
    except UserError:  # there is none, or a kill came between its two files
        return None
    return found if found.about == about else None


def measure_table4(model: PreTrainedModel, blocks: torch.Tensor, found: Trace, bar: tqdm) -> dict[str, float]:
    """The row of Table 4 of a traced model."""
    outliers = tuple(found.outlier_features()["feature"])
    interventions = [Intervention(()), Intervention(outliers)] if outliers else [Intervention(())]
    top1 = top1_softmax(model, Counted(blocks, bar), interventions)
    return table4_row(found, perplexity(model, Counted(blocks, bar)), top1)


def details(found: Trace) -> list[dict]:
    """Rows of the trace beyond those of Table 4."""
    sinks = found.attention_sinks()
    tables = {
        "outlier_feature": found.outlier_features(),
        "hidden_state": found.hidden_states(),
        "residual": found.massive_activations(),
        "attention_sink": sinks[sinks["share"] > 0],
    }
    return [row for prefix, table in tables.items() for row in tidy(table, f"{prefix}.")]


def tidy(table: pd.DataFrame | list[dict], prefix: str = "") -> list[dict]:
    """One row a value of a table; what is missing gives none."""
    rows = []
    for record in pd.DataFrame(table).to_dict("records"):
        places = {name: record[name] for name in PLACES if name in record}
        values = {name: value for name, value in record.items() if name not in PLACES and not pd.isna(value)}
        rows += [{**places, "metric": f"{prefix}{name}", "value": float(v), "unit": "1"} for name, v in values.items()]
    return rows
