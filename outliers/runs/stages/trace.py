"""A trace, and the attention of the model with and without the outlier features that it finds."""

from collections.abc import Sequence

from outliers.criterion import CROSS
from outliers.metrics.records import Perplexity, Top1, TraceMetric
from outliers.runs.rows import Row
from outliers.subjects.causal import ModelWithText
from outliers.subjects.cell import Cell, Stages
from outliers.variants.ablated import WHERE, Ablated, Intervention
from outliers.variants.quantized import EXACT

PASSES = 4  # passes over the blocks, two of them for the attention


def trace_stages(subject: ModelWithText, metric: TraceMetric) -> Stages:
    """Yield perplexity and trace; then top-1 attention, also without the outlier features if there are any."""
    _, traced = yield [Cell(subject, EXACT, Perplexity()), Cell(subject, EXACT, metric)]
    if not traced_attention(traced):
        return
    without = [view for view in outlier_counts(traced) if view["features"] and view.get("stack") != CROSS]
    ablated = [(Ablated(Intervention(tuple(view["features"])), where(view)), ablated_in(view)) for view in without]
    yield [Cell(subject, variant, Top1(), labels) for variant, labels in ((EXACT, {}), *ablated)]


def traced_attention(traced: Row) -> bool:
    """Return whether the model of a trace's row has attention, without its configuration."""
    return traced.provenance.get("attends", True)


def outlier_counts(traced: Row) -> list[dict]:
    """Return the values of a trace's row that count outlier features, one for each stack.

    Each has `features` in ascending order, and `hidden_size`; with several views also `stack` and its `layers`, the
    first and the one after the last.
    """
    return [value for value in traced.values if value["metric"] == "count"]


def where(view: dict, roles: Sequence[str] = WHERE) -> tuple[str, ...]:
    """Return the places of some roles in the layers of a stack from `outlier_counts`."""
    before = "layers.{}:{}.".format(*view["layers"]) if "layers" in view else ""
    return tuple(f"{before}{role}" for role in roles)


def ablated_in(view: dict) -> dict[str, str]:
    """Return the field of a row that names the view in which features are ablated; empty for a model of one view."""
    return {"ablated": view["stack"]} if "stack" in view else {}
