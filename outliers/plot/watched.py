"""How outlier features grow in a model while it trains."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from outliers.errors import UserError
from outliers.plot.axes import log_axis, threshold
from outliers.plot.emergence import AFFECTED, by_model
from outliers.plot.legends import legend
from outliers.plot.style import BLACK, BLUE, GREEN, ORANGE, VERMILION, chosen, color_of, figure_function, panels_of
from outliers.report.analysis import Rows, records

# Where values are: what a line is called, its colour and mark.
STATES = {
    "residual": ("residual stream", BLACK, "o"),
    "attn_in": ("attn_in", BLUE, "s"),
    "attn_out": ("attn_out", GREEN, "^"),
    "ffn_in": ("ffn_in", VERMILION, "v"),
    "ffn_out": ("ffn_out", ORANGE, "D"),
}
MARKED = 20  # points of a line that have a mark, about


def watched(rows: Rows) -> dict[str, pd.DataFrame]:
    """Of each model that was watched while it trained, a row a step: `step`, and the metrics of `outliers.watch`."""
    models: dict[str, list[dict]] = {}
    for row in records(rows):
        models.setdefault(row["model"], []).append(row)
    tables = {model: by_model(own) for model, own in models.items()}
    return {model: _by_step(table) for model, table in tables.items() if "max.residual" in table}


def _by_step(table: pd.DataFrame) -> pd.DataFrame:
    steps = table["checkpoint"].str.extract(r"(\d+)$", expand=False).astype(int)
    return table.assign(step=steps).sort_values("step", ignore_index=True)


@figure_function
def growth(rows: Rows, *, panel: str | None = None, ax: Axes | None = None) -> Axes | np.ndarray:
    """How outlier features grow in a model while it trains, by step.

    Largest values of each hidden state; number of outlier features; layers and positions that the most common one
    affects, or without one the feature that comes nearest; perplexity.

    Args:
        rows: of one model, as `outliers.OutlierCallback` writes them.
        panel: the one to draw, "values", "count", "affected" or "perplexity"; by default all.
        ax: where to draw that panel, in the caller's style; by default a new figure.

    Returns:
        The axes: one, or an array of all panels.

    Raises:
        UserError: there is no such panel, or `ax` has no room for several; or the rows are of several models, or of
            none that was watched.
    """
    tables = watched(rows)
    if len(tables) != 1:
        names = ", ".join(tables) or "none"
        raise UserError(f"rows of {len(tables)} models that were watched ({names}); expected those of one")
    (steps,), shown = tables.values(), chosen("panel", panel, PANELS, ax)
    shape, size = ((1, 1), (5.6, 2.9)) if len(shown) == 1 else ((2, 2), (8.4, 5.0))
    panels = panels_of(ax, *shape, size, sharex=True)
    handles = []
    for axes, name in zip(panels.flat, shown, strict=True):
        handles += PANELS[name](axes, steps)
    for axes in panels[-1]:
        axes.set_xlabel("training step")
    if handles:
        legend(ax, axes, handles, "right upper")
    return panels


def _plot(axes: Axes, steps: pd.DataFrame, column: str, unit: float = 1, **style) -> list[Line2D]:
    every = max(1, round(len(steps) / MARKED))
    return axes.plot(steps["step"], unit * steps[column], markevery=every, **{"markersize": 4, "marker": "o", **style})


def _values(axes: Axes, steps: pd.DataFrame) -> list[Line2D]:
    shown = [state for state in STATES if f"max.{state}" in steps]
    handles = []
    for state in shown:
        label, color, marker = STATES[state]
        handles += _plot(
            axes, steps, f"max.{state}", label=f"largest |x|, {label}", color=color_of(color), marker=marker
        )
    for alpha in steps["alpha"].unique():
        threshold(axes, alpha)
    axes.set(ylabel="largest |x|", yscale="log")
    values = steps[[f"max.{state}" for state in shown]].to_numpy()
    log_axis(axes.yaxis, values.min(), values.max())
    return handles


def _count(axes: Axes, steps: pd.DataFrame) -> list[Line2D]:
    _plot(axes, steps, "count", color=color_of(BLUE))
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
    _plot(axes, steps, "perplexity", color=color_of(BLUE))
    axes.set(ylabel="perplexity", yscale="log")
    log_axis(axes.yaxis, steps["perplexity"].min(), steps["perplexity"].max())
    return []


PANELS: dict[str, Callable[[Axes, pd.DataFrame], list[Line2D]]] = {
    "values": _values,
    "count": _count,
    "affected": _affected,
    "perplexity": _perplexity,
}
