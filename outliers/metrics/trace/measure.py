"""Trace a text, all of it or in parts that are merged."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from outliers.metrics.attention import PROBABILITIES
from outliers.metrics.measurement import Keeps, Measurement
from outliers.metrics.trace import KeptTrace
from outliers.metrics.trace.kept import traced
from outliers.models.anatomy.names import names_of
from outliers.models.anatomy.views import of_stack
from outliers.models.hooks import RESIDUAL
from outliers.models.skeleton import skeleton
from outliers.quantization.schemes import BASELINE
from outliers.subjects.bench import Bench, naming_under
from outliers.subjects.cell import Cell
from outliers.tracing.result import STREAM, Trace, merged
from outliers.tracing.table4 import trace_row
from outliers.tracing.trace import traces

PLACES = ("feature", "layer", "role", "position", "token")  # columns that say where, not what
NAME = "token_text"  # of a token, whose id identifies it


class OfText(Measurement):
    """The traces of each cell, one each view of its model."""

    def facts(self, cell: Cell, _bench: Bench) -> dict:
        return {"alpha": cell.metric.alpha}

    def keeps(self, cells: Sequence[Cell]) -> Keeps:
        attention = any(cell.metric.attention for cell in cells)
        roles = {role for cell in cells for role in (*cell.metric.roles, *[RESIDUAL] * _has_tokens(cell))}
        return super().keeps(cells)._replace(attention=PROBABILITIES * attention, roles=len(roles))

    def answer(self, bench: Bench, cells: Sequence[Cell], part: slice, facts: dict) -> list[list[Trace]]:
        (cell,) = cells
        subject, metric = cell.subject, cell.metric
        model, blocks = subject.load(bench, facts), bench.counted(subject.blocks[part])
        with naming_under(subject, cell.variant):
            (variant,) = bench.knowing([cell.variant], subject)
            tokens = bench.tokenizer(subject) if _has_tokens(cell) else None
            views = traces(model, blocks, metric.roles, metric.alpha, metric.attention, variant, tokens)
        whole = views[0].sequences == len(subject.blocks)
        if variant.name == BASELINE and whole and all(set(STREAM) <= set(view.roles) or view.cross for view in views):
            bench.traces[facts.get("tokens_hash")] = views
        return [views]

    def values(self, cell: Cell, answers: list[list[Trace]]) -> list[dict]:
        return [value for trace in merged(answers) for value in _of_view(trace, cell.metric.details)]


class OfFiles(OfText):
    """Those that are kept."""

    def check(self, cell: Cell) -> None:
        config = cell.subject.config
        if cell.metric.imatrix:
            from outliers.models.gguf.tensors import architecture_of  # which imports gguf

            architecture_of(config.model_type)
        if cell.metric.masks:
            names_of(skeleton(config), "transformerlens")

    def beside_row(self, cell: Cell, facts: dict, planner: Any) -> list[tuple]:
        return traced(cell, facts, planner)


def _of_view(trace: Trace, detailed: bool) -> list[dict]:
    values = [*_table4(trace), *(details(trace) if detailed else [])]
    return [of_stack(trace.stack) | value for value in values]


def details(trace: Trace) -> list[dict]:
    """Values of a trace beyond those of Table 4."""
    sinks = trace.attention_sinks() if trace.heads else None
    tables = {
        "outlier_feature": trace.outlier_features(),
        "hidden_state": trace.hidden_states(),
        "largest": trace.largest_values(by="layer").drop(columns="max"),  # an infinity norm
        "residual": trace.massive_activations(),
        **({} if sinks is None else {"attention_sink": sinks[sinks["share"] > 0]}),
    }
    return [value for prefix, table in tables.items() for value in tidy(table, f"{prefix}.")]


def _table4(trace: Trace) -> list[dict]:
    """Its values of Table 4; the number of outlier features comes with these, and of how many they are."""
    outliers = sorted(trace.outlier_features()["feature"].tolist())
    about = {"features": outliers, "hidden_size": trace.statistics["residual.massive"].shape[1]}
    if trace.stack:
        about |= {"layers": [trace.first_layer, trace.first_layer + trace.layers]}
    return [value | (about if value["metric"] == "count" else {}) for value in tidy([trace_row(trace)])]


def tidy(table: pd.DataFrame | list[dict], prefix: str = "") -> list[dict]:
    """A value each entry of a table that is none of a place; what is missing, or has no end, gives none."""
    values = []
    for record in pd.DataFrame(table).drop(columns=NAME, errors="ignore").to_dict("records"):
        places = {name: record[name] for name in PLACES if name in record}
        finite = {name: value for name, value in record.items() if name not in PLACES and np.isfinite(value)}
        values += [{**places, "metric": prefix + name, "value": float(x), "unit": "1"} for name, x in finite.items()]
    return values


def _has_tokens(cell: Cell) -> bool:
    return isinstance(cell.metric, KeptTrace) and cell.metric.tokens


TRACE, KEPT = OfText(), OfFiles()
