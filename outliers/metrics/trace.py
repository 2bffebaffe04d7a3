"""The trace of a text as a metric: outlier features of hidden states, and how large they are."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from outliers.metrics.attention import PROBABILITIES
from outliers.metrics.measurement import CellMeasurement, MemoryNeeds
from outliers.metrics.records import StoredTrace
from outliers.models.anatomy import has_attention
from outliers.models.anatomy.names import state_names
from outliers.models.anatomy.stack_views import of_stack
from outliers.models.hooks import RESIDUAL
from outliers.models.skeleton import skeleton
from outliers.models.stream import Variant
from outliers.quantization.schemes import BASELINE
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache
from outliers.tracing.result import STREAM, Trace, merge_traces
from outliers.tracing.table4 import trace_row
from outliers.tracing.trace import traces

PLACE_COLUMNS = ("feature", "layer", "role", "position", "token")
NAME = "token_text"  # column dropped from rows, which have the id of the token


class TraceMeasurement(CellMeasurement):
    """The measurement of traces, one for each view of the model; some are also stored beside their rows."""

    cost = 1.5

    def check(self, cell: Cell) -> None:
        config, kept = cell.subject.config, isinstance(cell.metric, StoredTrace)
        if kept and cell.metric.imatrix:
            from outliers.models.gguf.tensors import architecture_of  # which imports gguf

            architecture_of(config.model_type)
        if kept and cell.metric.masks:
            state_names(skeleton(config), "transformerlens")

    def provenance(self, cell: Cell, _model_cache: ModelCache) -> dict:
        return {"alpha": cell.metric.alpha} | ({} if has_attention(cell.subject.config) else {"attends": False})

    def memory_needs(self, cells: Sequence[Cell]) -> MemoryNeeds:
        attention = any(cell.metric.attention for cell in cells)
        roles = {role for cell in cells for role in (*cell.metric.roles, *[RESIDUAL] * _has_tokens(cell))}
        return (
            super().memory_needs(cells)._replace(attention_matrices=PROBABILITIES * attention, kept_states=len(roles))
        )

    def measure_cell(
        self, model_cache: ModelCache, cell: Cell, model: PreTrainedModel, blocks: Iterable, variant: Variant
    ) -> list[Trace]:
        metric, tokens = cell.metric, cell.subject.preprocessor if _has_tokens(cell) else None
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
        return [value for trace in merge_traces(results) for value in _of_trace(trace, cell.metric.details)]


def _of_trace(trace: Trace, detailed: bool) -> list[dict]:
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
    """Return a value for each finite entry of a table, with the places that its line names in columns.

    prefix: of the names of metrics.
    """
    values = []
    for record in pd.DataFrame(table).drop(columns=NAME, errors="ignore").to_dict("records"):
        places = {name: record[name] for name in PLACE_COLUMNS if name in record}
        finite = {name: value for name, value in record.items() if name not in PLACE_COLUMNS and np.isfinite(value)}
        values += [{**places, "metric": prefix + name, "value": float(x), "unit": "1"} for name, x in finite.items()]
    return values


def _has_tokens(cell: Cell) -> bool:
    return isinstance(cell.metric, StoredTrace) and cell.metric.tokens


MEASUREMENT = TraceMeasurement()
