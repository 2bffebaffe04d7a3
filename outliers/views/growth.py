"""Growth of outlier features in a model during training."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from outliers.errors import UserError
from outliers.show.axes import log_axis, threshold
from outliers.show.legends import legend
from outliers.show.style import Panels, chosen, color_of, figure_function, panels_of
from outliers.show.value import RowsOrFrame, comparable_rows
from outliers.views.causes import ALONG, LARGEST, checkpoints
from outliers.views.emergence import AFFECTED

# Lines by the place of the values: label, colour, marker.
STATES = {
    "residual": ("residual stream", "black", "o"),
    "attn_in": ("attn_in", "blue", "s"),
    "attn_out": ("attn_out", "green", "^"),
    "ffn_in": ("ffn_in", "vermilion", "v"),
    "ffn_out": ("ffn_out", "orange", "D"),
}
MARKED = 20  # approximate number of markers on a line


def rows_of_watched(rows: RowsOrFrame) -> dict[str, list[dict]]:
    """Return the rows of each model that was observed during training; an encoder-decoder has one entry per view."""
    rows = comparable_rows(rows)
    places = dict.fromkeys((row["model"], row.get("stack", "")) for row in rows if row["metric"] == "max.residual")
    return {
        f"{model} ({stack})" if stack else model: [
            row for row in rows if row["model"] == model and row.get("stack", stack) == stack
        ]
        for model, stack in places
    }


def watched(rows: RowsOrFrame) -> dict[str, pd.DataFrame]:
    """Return a table for each entry of `rows_of_watched`: by step, `step`, `alpha`, and metrics of `outliers.watch`."""
    tables = {name: checkpoints(rows_of_model, ["alpha"]) for name, rows_of_model in rows_of_watched(rows).items()}
    return {name: table.sort_values("step", ignore_index=True) for name, table in tables.items()}


@figure_function
def growth(rows: RowsOrFrame, *, panel: str | None = None, ax: Axes | None = None) -> Panels:
    """Draw the growth of outlier features in a model during training, by step.

    The panels show the largest values of each hidden state; the number of outlier features; the layers and positions
    that the most common one affects (without one, the feature closest to the criterion); and perplexity, with a band of
    its standard error over the text.

    Example:
        >>> panels = outliers.plot.growth(outliers.frame("results/kept/growth"))

    Args:
        rows: of one model, as `outliers.OutlierCallback` writes them; rows of several models are refused.
        panel: the one to draw, "values", "count", "affected" or "perplexity"; by default all.
    """
    tables = watched(rows)
    if len(tables) != 1:
        names = ", ".join(tables) or "none"
        raise UserError(f"rows of {len(tables)} trained models ({names}); expected those of one")
    (steps,), drawn = tables.values(), chosen("panel", panel, PANELS, ax)
    shape, size = ((1, 1), (5.6, 2.9)) if len(drawn) == 1 else ((2, 2), (8.4, 5.0))
    panels = panels_of(ax, *shape, size, sharex=True)
    handles = [handle for axes, name in zip(panels.flat, drawn, strict=True) for handle in PANELS[name](axes, steps)]
    for axes in panels[-1]:
        axes.set_xlabel(ALONG)
    if handles:
        legend(ax, axes, handles, "right upper")
    return panels


def _plot(axes: Axes, steps: pd.DataFrame, column: str, unit: float = 1, **style) -> list[Line2D]:
    every = max(1, round(len(steps) / MARKED))
    return axes.plot(steps["step"], unit * steps[column], markevery=every, **{"markersize": 4, "marker": "o", **style})


def _values(axes: Axes, steps: pd.DataFrame) -> list[Line2D]:
    states = [state for state in STATES if f"max.{state}" in steps]
    handles = []
    for state in states:
        label, color, marker = STATES[state]
        style = {"label": f"largest |x|, {label}", "color": color_of(color), "marker": marker}
        handles += _plot(axes, steps, f"max.{state}", **style)
    for alpha in steps["alpha"].unique():
        threshold(axes, alpha)
    axes.set(ylabel=LARGEST, yscale="log")
    values = steps[[f"max.{state}" for state in states]].to_numpy()
    log_axis(axes.yaxis, values.min(), values.max())
    return handles


def _count(axes: Axes, steps: pd.DataFrame) -> list[Line2D]:
    _plot(axes, steps, "count", color=color_of("blue"))
    axes.set(ylabel="outlier features", ylim=(-0.2, max(1.2, 1.1 * steps["count"].max())))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    return []


def _affected(axes: Axes, steps: pd.DataFrame) -> list[Line2D]:
    handles = []
    for name, (label, color, line, fill) in AFFECTED.items():
        style = {"color": color_of(color), "linestyle": line, "fillstyle": fill}
        handles += _plot(axes, steps, name, 100, label=f"affected {label}", **style)
    axes.set(ylim=(-3, 103), ylabel="affected (%)")
    return handles


def _perplexity(axes: Axes, steps: pd.DataFrame) -> list[Line2D]:
    _plot(axes, steps, "perplexity", color=color_of("blue"))
    value = steps["perplexity"]
    factor = np.exp(steps.get("perplexity_error", 0.0) / value)
    axes.fill_between(steps["step"], value / factor, value * factor, color=color_of("blue"), alpha=0.3, linewidth=0)
    axes.set(ylabel="perplexity", yscale="log")
    log_axis(axes.yaxis, (value / factor).min(), (value * factor).max())
    return []


PANELS: dict[str, Callable[[Axes, pd.DataFrame], list[Line2D]]] = {
    "values": _values,
    "count": _count,
    "affected": _affected,
    "perplexity": _perplexity,
}
