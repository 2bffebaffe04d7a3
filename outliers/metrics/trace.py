"""The trace of a text as a metric, and its files: outlier features of hidden states, and how large they are."""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.files import EARLIER, check_replaceable, move
from outliers.metrics.attention import PROBABILITIES
from outliers.metrics.measurement import CellMeasurement, MemoryNeeds
from outliers.metrics.records import StoredTrace
from outliers.models.anatomy import attends
from outliers.models.anatomy.names import names_of
from outliers.models.anatomy.views import of_stack, view_names
from outliers.models.hooks import RESIDUAL
from outliers.models.names import check_alone
from outliers.models.skeleton import skeleton
from outliers.models.stream import Variant
from outliers.quantization.schemes import BASELINE
from outliers.subjects.cell import Cell, Subject, Task
from outliers.subjects.model_cache import ModelCache, check_same_weights
from outliers.subjects.provenance import joined, measuring
from outliers.terminal.interrupt import asked_to_stop, stop_if_asked
from outliers.tracing.excerpt import Excerpt, excerpt, telling_features
from outliers.tracing.masks import Masks, masks
from outliers.tracing.requests import STEM, about_of, request_of, turn
from outliers.tracing.result import STREAM, Trace, merged
from outliers.tracing.table4 import trace_row
from outliers.tracing.trace import traces

# File names in the folder of the rows.
EXCERPT, IMATRIX = "excerpt.safetensors", "imatrix.gguf"
MASKS, MASKS_LISTED = "masks.safetensors", "masks.json"
SECONDS_BETWEEN_SAVES = 30
logger = logging.getLogger(__name__)


def of_view(file: str, stack: str) -> str:
    """Return the name of a file of one view of a model, which includes the view if the model has several stacks."""
    stem, dot, ending = file.partition(".")
    return f"{stem}.{stack}{dot}{ending}" if stack else file


def traced(cell: Cell, provenance: dict, planner: Any) -> list[tuple]:
    """Return the trace of each view over all blocks, as the only part of a result (see
    `outliers.runs.planner.measure_cells`).

    Traces are saved every half minute, as `trace`.safetensors. A run resumes from a saved trace if that is the
    beginning of the same one. Their `about` identifies the weights. At the end an excerpt of the text is saved beside
    each, except for a streamed model, and other requested files.
    """
    folder, metric = planner.rows.folder, cell.metric
    stacks = view_names(cell.subject.config)
    stems = [folder / of_view(STEM, stack) for stack in stacks]
    about = cell.subject.request | provenance | {"roles": metric.roles}
    with _turned_to(about, folder, stacks, planner.force):
        with measuring(cell.subject.settings.device) as reading:
            traces_so_far = [] if planner.force else saved_traces(stems, about, metric.tokens, len(cell.subject.blocks))
        if traces_so_far and "weights_hash" not in provenance:
            about |= planner.weights(cell.subject)
            traces_so_far = traces_so_far if all(trace.about == about for trace in traces_so_far) else []
        if traces_so_far and traces_so_far[0].names:  # a resumed trace keeps its tokens
            cell = replace(cell, metric=metric.model_copy(update={"tokens": True}))
        saved, costs = time.monotonic(), []
        for longer, spent in _going_on(cell, provenance, planner, about, traces_so_far):
            traces_so_far = longer
            costs.append(spent)
            if traces_so_far and (asked_to_stop() or time.monotonic() - saved > SECONDS_BETWEEN_SAVES):
                _save(traces_so_far, stems)
                saved = time.monotonic()
                stop_if_asked()
        if costs:
            _save(traces_so_far, stems)
    for trace in traces_so_far if metric.imatrix else ():
        trace.save_imatrix(folder / of_view(IMATRIX, trace.stack))
    if metric.masks and not _is_newer(folder / MASKS, folder / f"{STEM}.safetensors"):
        ((_, marked),) = planner.results([Task("masks", _masks, cell.subject, (provenance, traces_so_far[0]))])
        marked.save(folder / Path(MASKS).stem)
    if not cell.subject.settings.stream:  # a streamed model would read all layers once more
        for trace in traces_so_far:
            _keep_excerpt(cell.subject, provenance, planner, trace)
    return [([traces_so_far], {"weights_hash": about["weights_hash"]}, joined(costs or [reading.fields]))]


@contextmanager
def _turned_to(about: dict, folder: Path, stacks: Sequence[str], force: bool) -> Iterator[None]:
    """Move the traces of another request out of a folder, with the files derived from them, and those of this one back.

    If this one ends before anything of it is saved, the others return. Raises UserError if they are of another model,
    unless forced.
    """
    files = [f"{STEM}.safetensors", EXCERPT, IMATRIX]
    names = [of_view(file, stack) for stack in stacks for file in files] + [MASKS, MASKS_LISTED]
    shown = folder / names[0]
    check_replaceable(shown)
    before = about_of(shown) or about
    if not force:
        check_alone(folder, *((one.get("model", ""), one.get("checkpoint")) for one in (about | before, about)))
    turn(folder, request_of(about), names)
    try:
        yield
    finally:
        if not shown.exists():
            move(folder / EARLIER / request_of(before), folder, names)


def _is_newer(file: Path, than: Path) -> bool:
    return file.is_file() and file.stat().st_mtime_ns > than.stat().st_mtime_ns


def _save(traces_so_far: list[Trace], stems: list[Path]) -> None:
    for trace, stem in zip(traces_so_far, stems, strict=True):
        trace.save(stem)


def _going_on(
    cell: Cell, provenance: dict, planner: Any, about: dict, traces_so_far: list[Trace]
) -> Iterator[tuple[list[Trace], dict]]:
    """Yield the traces of the first blocks as they grow from those so far, each time with the cost."""
    done = traces_so_far[0].sequences if traces_so_far else 0
    planner.bar.skip(planner.steps([cell])._replace(count=done))
    arrived = {}
    tasks = planner.tasks([cell], _parts(cell.subject, planner.engine, done), provenance)
    for task, ((part,), weights, spent) in planner.results(tasks):
        check_same_weights(cell.subject.name, [about | weights, weights | about])
        about |= weights
        arrived[task.arguments[1].start] = part
        while done in arrived:  # in the order of the text, so that a saved trace is of its beginning
            part = arrived.pop(done)
            traces_so_far = merged([traces_so_far, part]) if traces_so_far else part
            done = traces_so_far[0].sequences
            for trace in traces_so_far:
                trace.about = about
        yield traces_so_far, spent


def _parts(subject: Subject, engine: Any, done: int) -> list[slice]:
    """Return the parts of the text, after its first blocks, that are traced at once.

    A streamed model takes all blocks: each pass reads all its layers.
    """
    blocks = len(subject.blocks)
    if subject.settings.engine == "local" and not subject.settings.stream:
        return [slice(number, number + 1) for number in range(done, blocks)]
    parts = engine.parts(blocks - done, 1) if done < blocks else []
    return [slice(done + part.start, done + part.stop) for part in parts]


def saved_traces(stems: list[Path], about: dict, tokens: bool, most: int) -> list[Trace]:
    """Return the saved traces of all views; nothing unless all are of the same number of blocks."""
    saved = [trace for trace in (_saved_trace(stem, about, tokens, most) for stem in stems) if trace]
    alike = len(saved) == len(stems) and len({trace.sequences for trace in saved}) == 1
    return saved if alike else []


def _saved_trace(stem: Path, about: dict, tokens: bool, most: int) -> Trace | None:
    """Return the saved trace if it is known to have the same source, or None.

    It is also None if tokens are requested that the trace lacks. The weights of a streamed model may be unknown. Raises
    UserError if something other than a file has its name.
    """
    file = stem.with_name(f"{stem.name}.safetensors")
    check_replaceable(file)
    if not file.exists():
        return None
    try:
        trace = Trace.load(stem)
    except UserError as error:
        logger.info(f"{error}; this run does")
        return None
    unknown = {"weights_hash"} - about.keys()
    same = {field: trace.about[field] for field in trace.about.keys() - unknown} == about
    whole = trace.names or not tokens
    return trace if same and whole and trace.sequences <= most else None


def _keep_excerpt(subject: Subject, provenance: dict, planner: Any, trace: Trace) -> None:
    path = planner.rows.folder / of_view(EXCERPT, trace.stack)
    if saved_excerpt(path, trace) is None:
        task = Task("excerpt", _excerpt, subject, (provenance, telling_features(trace), trace.stack or None))
        ((_, excerpt),) = planner.results([task])
        replace(excerpt, about=trace.about).save(path)


def _excerpt(
    model_cache: ModelCache, subject: Subject, provenance: dict, features: dict[str, list[int]], stack: str | None
) -> Excerpt:
    return excerpt(subject.load(model_cache, provenance), subject.blocks[0], features, stack)


def _masks(model_cache: ModelCache, subject: Subject, provenance: dict, of: Trace) -> Masks:
    return masks(subject.load(model_cache, provenance), subject.blocks, of)


def saved_excerpt(path: Path, trace: Trace) -> Excerpt | None:
    """Return the excerpt of a trace; None if it is missing, damaged, or another's."""
    try:
        excerpt = Excerpt.load(path)
    except UserError:
        return None
    return excerpt if excerpt.about == trace.about else None


PLACE_COLUMNS = ("feature", "layer", "role", "position", "token")  # columns of places
NAME = "token_text"  # of a token, which its id identifies already


class TraceMeasurement(CellMeasurement):
    """The measurement of traces, one for each view of the model; some are also stored beside their rows."""

    cost = 5.0

    def check(self, cell: Cell) -> None:
        config, kept = cell.subject.config, isinstance(cell.metric, StoredTrace)
        if kept and cell.metric.imatrix:
            from outliers.models.gguf.tensors import architecture_of  # which imports gguf

            architecture_of(config.model_type)
        if kept and cell.metric.masks:
            names_of(skeleton(config), "transformerlens")

    def stored_result(self, cell: Cell, provenance: dict, planner: Any) -> list[tuple] | None:
        return traced(cell, provenance, planner) if isinstance(cell.metric, StoredTrace) else None

    def provenance(self, cell: Cell, _model_cache: ModelCache) -> dict:
        return {"alpha": cell.metric.alpha} | ({} if attends(cell.subject.config) else {"attends": False})

    def memory_needs(self, cells: Sequence[Cell]) -> MemoryNeeds:
        attention = any(cell.metric.attention for cell in cells)
        roles = {role for cell in cells for role in (*cell.metric.roles, *[RESIDUAL] * _has_tokens(cell))}
        return super().memory_needs(cells)._replace(attention=PROBABILITIES * attention, roles=len(roles))

    def measure_cell(
        self, model_cache: ModelCache, cell: Cell, model: PreTrainedModel, blocks: Iterable, variant: Variant
    ) -> list[Trace]:
        metric, tokens = cell.metric, model_cache.tokenizer(cell.subject) if _has_tokens(cell) else None
        return traces(model, blocks, metric.roles, metric.alpha, metric.attention, variant, tokens)

    def measure(
        self, model_cache: ModelCache, cells: Sequence[Cell], part: slice, provenance: dict
    ) -> list[list[Trace]]:
        ((cell,), (views,)) = cells, super().measure(model_cache, cells, part, provenance)
        whole = views[0].sequences == len(cell.subject.blocks)
        streams = all(set(STREAM) <= set(view.roles) or view.cross for view in views)
        if cell.variant.name == BASELINE and whole and streams:
            model_cache.traces[provenance.get("tokens_hash")] = views
        return [views]

    def values(self, cell: Cell, results: list[list[Trace]]) -> list[dict]:
        return [value for trace in merged(results) for value in _of_view(trace, cell.metric.details)]


def _of_view(trace: Trace, detailed: bool) -> list[dict]:
    values = [*_table4(trace), *(details(trace) if detailed else [])]
    return [of_stack(trace.stack) | value for value in values]


def details(trace: Trace) -> list[dict]:
    """Return the values of a trace beyond those of Table 4."""
    sinks = trace.attention_sinks() if trace.heads else None
    tables = {
        "outlier_feature": trace.outlier_features(),
        "hidden_state": trace.hidden_states(),
        "largest": trace.largest_values(by="layer").drop(columns="max"),  # the same as the infinity norm
        "residual": trace.massive_activations(),
        **({} if sinks is None else {"attention_sink": sinks[sinks["share"] > 0]}),
    }
    return [value for prefix, table in tables.items() for value in tidy(table, f"{prefix}.")]


def _table4(trace: Trace) -> list[dict]:
    """Return the trace's values of Table 4, with the numbers of the outlier features and the hidden size."""
    outliers = sorted(trace.outlier_features()["feature"].tolist())
    labels = {"features": outliers, "hidden_size": trace.statistics["residual.massive"].shape[1]}
    if trace.stack:
        labels |= {"layers": [trace.first_layer, trace.first_layer + trace.layers]}
    return [value | (labels if value["metric"] == "count" else {}) for value in tidy([trace_row(trace)])]


def tidy(table: pd.DataFrame | list[dict], prefix: str = "") -> list[dict]:
    """Return a value for each entry of a table except places; missing and infinite entries are dropped."""
    values = []
    for record in pd.DataFrame(table).drop(columns=NAME, errors="ignore").to_dict("records"):
        places = {name: record[name] for name in PLACE_COLUMNS if name in record}
        finite = {name: value for name, value in record.items() if name not in PLACE_COLUMNS and np.isfinite(value)}
        values += [{**places, "metric": prefix + name, "value": float(x), "unit": "1"} for name, x in finite.items()]
    return values


def _has_tokens(cell: Cell) -> bool:
    return isinstance(cell.metric, StoredTrace) and cell.metric.tokens


MEASUREMENT = TraceMeasurement()
