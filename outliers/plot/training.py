"""Along training: what grows in runs that differ in one thing each, and in one model that was watched."""

import textwrap
from collections.abc import Callable, Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from outliers.errors import UserError
from outliers.plot.emergence import AFFECTED
from outliers.show.axes import count_label, log_axis, threshold
from outliers.show.legends import entry, legend
from outliers.show.style import GREY, brief, chosen, color_of, figure_function, panels_of
from outliers.show.value import Rows, records

ABOUT = ("run", "seed", "steps", "model", "parameters", "int8", "decomposition")  # fields of rows
COLUMNS = 4  # of panels
ALONG, LARGEST = "training step", "largest |x|"
# What is drawn of a run, by its name in the legend: metrics of which the largest counts, colour, line.
LINES = {
    "residual stream": (("max.residual",), "blue", "-"),
    "inputs of projections": (("max.attn_in", "max.attn_out", "max.ffn_in", "max.ffn_out"), "vermilion", "--"),
}
# Where values are: what a line is called, its colour and mark.
STATES = {
    "residual": ("residual stream", "black", "o"),
    "attn_in": ("attn_in", "blue", "s"),
    "attn_out": ("attn_out", "green", "^"),
    "ffn_in": ("ffn_in", "vermilion", "v"),
    "ffn_out": ("ffn_out", "orange", "D"),
}
MARKED = 20  # points of a line that have a mark, about


def checkpoints(rows: Rows, about: Iterable[str] = ABOUT) -> pd.DataFrame:
    """One row a run, seed and step at which it was looked at, in the order of the rows.

    Columns: fields of rows, `about`; `step`, every metric, and `METRIC_deviation` of those that were measured several
    times.
    """
    wide: dict[tuple, dict] = {}
    for row in records(rows):
        step = int(row["checkpoint"].rpartition("-")[2])
        key = row.get("run"), row.get("seed"), step
        checkpoint = wide.setdefault(key, {**dict.fromkeys(about), "step": step})
        checkpoint |= {name: row[name] for name in about if name in row} | {row["metric"]: row["value"]}
        if "standard_deviation" in row:
            checkpoint[f"{row['metric']}_deviation"] = row["standard_deviation"]
    return pd.DataFrame(wide.values())


def trained(rows: Rows) -> pd.DataFrame:
    """Of `checkpoints` those of models that are trained: one row a run and seed."""
    return checkpoints(rows).query("step == steps").reset_index(drop=True)


def of_runs(trained: pd.DataFrame, column: str) -> dict[str, dict[int, float]]:
    """A column of `trained` by run and seed, where it is known."""
    known = trained[trained[column].notna()]
    return {
        run: dict(zip(group["seed"], group[column], strict=True)) for run, group in known.groupby("run", sort=False)
    }


def rows_of_watched(rows: Rows) -> dict[str, list[dict]]:
    """The rows of each model that was watched while it trained; of an encoder-decoder those of each view."""
    rows = records(rows)
    places = dict.fromkeys((row["model"], row.get("stack", "")) for row in rows if row["metric"] == "max.residual")
    return {
        f"{model} ({stack})" if stack else model: [
            row for row in rows if row["model"] == model and row.get("stack", stack) == stack
        ]
        for model, stack in places
    }


def watched(rows: Rows) -> dict[str, pd.DataFrame]:
    """Of each of `rows_of_watched` a row a step: `step`, `alpha`, metrics of `outliers.watch`."""
    tables = {name: checkpoints(rows_of_model, ["alpha"]) for name, rows_of_model in rows_of_watched(rows).items()}
    return {name: table.sort_values("step", ignore_index=True) for name, table in tables.items()}


@figure_function
def causes(rows: Rows, *, run: str | None = None, ax: Axes | None = None) -> Axes | np.ndarray:
    """The largest |x| along training runs that differ in one thing each, a panel a run, with its perplexity at the end.

    A line a seed. The first run, from which the others differ, stands behind each of them in grey.

    Example:
        >>> panels = outliers.plot.causes(outliers.frame("results/kept/training-runs/causes"))

    Args:
        rows: of training runs.
        run: the one to draw, by its name; by default all.
    """
    points = checkpoints(rows)
    names = list(dict.fromkeys(points["run"]))
    chosen_runs, first = chosen("run", run, names, ax), points[points["run"] == names[0]]
    panels = _panels(ax, len(chosen_runs))
    for axes, name in zip(panels, chosen_runs, strict=True):
        points_of_run = points[points["run"] == name]
        _plot_lines(axes, first, {"color": GREY, "linewidth": 0.8, "zorder": 1})
        _plot_lines(axes, points_of_run, {})
        axes.set_title(_title(name, points_of_run), fontsize="small")
    _scale(panels, points)
    handles = [entry(label, color=color_of(color), linestyle=line) for label, (_, color, line) in LINES.items()]
    if set(chosen_runs) - {names[0]}:
        handles.append(entry(f"grey: {brief(names[:1])[0]}", color=GREY, linestyle="-"))
    if len(panels) == 1:
        panels[0].set(xlabel=ALONG, ylabel=LARGEST)
        legend(ax, panels[0], handles, "right upper")
    else:
        panels[0].figure.supxlabel(ALONG, fontsize="medium")
        panels[0].figure.supylabel(LARGEST, fontsize="medium")
        legend(ax, panels[0], handles, "upper center", min(len(panels), len(handles)))
    return panels


def _panels(ax: Axes | None, count: int) -> np.ndarray:
    """So many panels in rows of `COLUMNS`."""
    columns = min(COLUMNS, count)
    lines = -(-count // columns)
    size = (5.2, 2.6) if count == 1 else (0.6 + 1.6 * columns, 0.9 + 1.45 * lines)
    panels = panels_of(ax, lines, columns, size, sharex=True, sharey=True)
    for axes in panels.flat[count:]:
        axes.remove()
    return panels.ravel()[:count]


def _plot_lines(axes: Axes, points_of_run: pd.DataFrame, style: dict) -> None:
    """Each seed of a run."""
    for metrics, color, line in LINES.values():
        metrics = points_of_run.columns.intersection(metrics)
        for _, points_of_seed in points_of_run.groupby("seed", sort=False):
            ordered = points_of_seed.sort_values("step")
            look = {"color": color_of(color), "linestyle": line} | style
            axes.plot(ordered["step"], ordered[metrics].max(axis=1), **look)


def _title(name: str, points_of_run: pd.DataFrame) -> str:
    perplexity = points_of_run.loc[points_of_run["step"] == points_of_run["steps"], "perplexity"].mean()
    return f"{textwrap.fill(brief([name])[0], 24)}\nperplexity {perplexity:.1f}"


def _scale(panels: np.ndarray, points: pd.DataFrame) -> None:
    """Logarithmic scales, with numbers along x below the last panel of each column."""
    metrics = points.columns.intersection([metric for metrics, *_ in LINES.values() for metric in metrics])
    low, high = points[metrics].min(axis=None), points[metrics].max(axis=None)
    for axes in panels:
        axes.set(xscale="log", yscale="log")
        axes.grid(axis="y")
        log_axis(axes.xaxis, points["step"].min(), points["step"].max())
        axes.xaxis.set_major_formatter(count_label)
        log_axis(axes.yaxis, low, high)
    for axes in panels[-COLUMNS:]:
        axes.xaxis.set_tick_params(labelbottom=True)


@figure_function
def growth(rows: Rows, *, panel: str | None = None, ax: Axes | None = None) -> Axes | np.ndarray:
    """Growth of outlier features in a model while it trains, by step.

    Largest values of each hidden state; number of outlier features; layers and positions that the most common one
    affects, or without one the feature that comes nearest; perplexity.

    Example:
        >>> panels = outliers.plot.growth(outliers.frame("results/kept/growth"))

    Args:
        rows: of one model, as `outliers.OutlierCallback` writes them; those of several are refused.
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
    axes.set(ylabel="perplexity", yscale="log")
    log_axis(axes.yaxis, steps["perplexity"].min(), steps["perplexity"].max())
    return []


PANELS: dict[str, Callable[[Axes, pd.DataFrame], list[Line2D]]] = {
    "values": _values,
    "count": _count,
    "affected": _affected,
    "perplexity": _perplexity,
}
