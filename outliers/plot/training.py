"""Training runs that differ in one thing each: what grows in them."""

import textwrap

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from outliers.plot.axes import count_label, log_axis
from outliers.plot.legends import entry, legend
from outliers.plot.style import BLUE, GREY, VERMILION, brief, chosen, color_of, figure_function, panels_of
from outliers.report.analysis import Rows, records

ABOUT = ("run", "seed", "steps", "model", "parameters", "int8", "decomposition")  # fields of rows
COLUMNS = 4  # of panels
ALONG, LARGEST = "training step", "largest |x|"
# What is drawn of a run, by its name in the legend: metrics of which the largest counts, colour, line.
LINES = {
    "residual stream": (("max.residual",), BLUE, "-"),
    "inputs of projections": (("max.attn_in", "max.attn_out", "max.ffn_in", "max.ffn_out"), VERMILION, "--"),
}


def checkpoints(rows: Rows) -> pd.DataFrame:
    """One row a run, seed and step at which it was looked at, in the order of the rows.

    Columns: `ABOUT`, `step`, every metric, and `METRIC_deviation` of those that were measured several times.
    """
    wide: dict[tuple, dict] = {}
    for row in records(rows):
        step = int(row["checkpoint"].rpartition("-")[2])
        about = {name: row.get(name) for name in ABOUT} | {"step": step}
        checkpoint = wide.setdefault((row["run"], row["seed"], step), about)
        checkpoint[row["metric"]] = row["value"]
        if "standard_deviation" in row:
            checkpoint[f"{row['metric']}_deviation"] = row["standard_deviation"]
    return pd.DataFrame(wide.values())


def trained(rows: Rows) -> pd.DataFrame:
    """Of `checkpoints` those of models that are trained: one row a run and seed."""
    return checkpoints(rows).query("step == steps").reset_index(drop=True)


@figure_function
def causes(rows: Rows, *, run: str | None = None, ax: Axes | None = None) -> Axes | np.ndarray:
    """The largest |x| along training runs that differ in one thing each, a panel a run, with its perplexity at the end.

    A line a seed. The first run, from which the others differ, stands behind each of them in grey.

    Args:
        rows: of training runs.
        run: the one to draw, by its name; by default all.
        ax: where to draw it, in the caller's style; by default a new figure.

    Returns:
        The axes, or an array of them; `.figure` of one is their figure.

    Raises:
        UserError: there is no such run, or there are several for `ax`.
    """
    points = checkpoints(rows)
    names = list(dict.fromkeys(points["run"]))
    shown, first = chosen("run", run, names, ax), points[points["run"] == names[0]]
    panels = _panels(ax, len(shown))
    for axes, name in zip(panels, shown, strict=True):
        own = points[points["run"] == name]
        _plot_lines(axes, first, {"color": GREY, "linewidth": 0.8, "zorder": 1})
        _plot_lines(axes, own, {})
        axes.set_title(_title(name, own), fontsize="small")
    _scale(panels, points)
    handles = [entry(label, color=color_of(color), linestyle=line) for label, (_, color, line) in LINES.items()]
    if set(shown) - {names[0]}:
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


def _plot_lines(axes: Axes, of_run: pd.DataFrame, style: dict) -> None:
    """Each seed of a run."""
    for metrics, color, line in LINES.values():
        metrics = of_run.columns.intersection(metrics)
        for _, of_seed in of_run.groupby("seed", sort=False):
            ordered = of_seed.sort_values("step")
            axes.plot(
                ordered["step"], ordered[metrics].max(axis=1), **{"color": color_of(color), "linestyle": line} | style
            )


def _title(name: str, of_run: pd.DataFrame) -> str:
    perplexity = of_run.loc[of_run["step"] == of_run["steps"], "perplexity"].mean()
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
