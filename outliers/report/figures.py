"""Figures from rows, readable in grey and by the colour-blind."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from outliers.report.table1 import short_name

# Okabe and Ito's palette, which stays apart in the common forms of colour blindness; markers keep it apart in grey.
STYLES = {
    "fp32": ("#000000", "o", "-"),
    "absmax": ("#D55E00", "v", "-"),
    "zeropoint": ("#CC79A7", "s", "-"),
    "absmax-row": ("#E69F00", "^", "-"),
    "absmax-vector": ("#56B4E9", "D", "-"),
    "zeropoint-vector": ("#0072B2", "P", "-"),
    "absmax-row-decomp": ("#E69F00", "^", ":"),
    "llm.int8": ("#009E73", "X", "--"),
    "llm.int8-zeropoint": ("#0072B2", "P", ":"),
}


def _count(value: float, _position=None) -> str:
    """A number of parameters as people write it: 125M, 1.3B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def perplexity_by_size(rows: list[dict]) -> Figure:
    """Perplexity against parameters by scheme and, where fp32 was measured, what each scheme adds to it in per cent.

    Models of one architecture are joined by a line.
    """
    baseline = {row["model"]: row["value"] for row in rows if row["scheme"] == "fp32"}
    increases = [
        {**row, "value": 100 * (row["value"] / baseline[row["model"]] - 1)}
        for row in rows
        if row["model"] in baseline and row["scheme"] != "fp32"
    ]
    panels = {"perplexity": rows, "increase over fp32 (%)": increases}
    panels = {label: points for label, points in panels.items() if points}
    figure = Figure(figsize=(1.7 + 2.9 * len(panels), 3.3), layout="constrained")
    for axes, (label, points) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _plot_by_size(axes, points)
        axes.set_ylabel(label)
    handles = {line.get_label(): line for axes in figure.axes for line in axes.lines}
    order = [scheme for scheme in STYLES if scheme in handles]
    figure.legend([handles[scheme] for scheme in order], order, loc="outside right upper", frameon=False, fontsize=8)
    if increases:
        figure.axes[1].axhline(0, color="black", linewidth=0.6)
    return figure


def _plot_by_size(axes: Axes, rows: list[dict]) -> None:
    for scheme, (color, marker, line) in STYLES.items():
        for architecture in sorted({row["architecture"] for row in rows}):
            points = sorted(
                (row["parameters"], row["value"])
                for row in rows
                if row["scheme"] == scheme and row["architecture"] == architecture
            )
            if points:
                style = {"color": color, "marker": marker, "linestyle": line, "markersize": 4.5, "linewidth": 1}
                axes.plot(*zip(*points, strict=True), label=scheme, **style)
    axes.set_xscale("log")
    axes.set_xlabel("parameters")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(_count))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)


def emergence_along_training(checkpoints: pd.DataFrame) -> Figure:
    """Largest hidden state and perplexity of models along their training (columns as in `pocket/emergence.csv`)."""
    figure = Figure(figsize=(7.6, 3.3), layout="constrained")
    by_step, by_perplexity = figure.subplots(1, 2, sharey=True)
    colors = ["#999999", "#E69F00", "#56B4E9", "#000000", "#0072B2", "#009E73", "#D55E00", "#CC79A7"]
    for number, (model, points) in enumerate(checkpoints.groupby("model", sort=False)):
        style = {"color": colors[number % 8], "marker": "ovs^DPX*"[number % 8], "markersize": 4, "linewidth": 1}
        by_step.plot(points["step"], points["max"], label=short_name(model), **style)
        by_perplexity.plot(points["perplexity"], points["max"], **style)
    by_perplexity.set_xscale("log")
    by_perplexity.invert_xaxis()
    for axes, label in ((by_step, "training step"), (by_perplexity, "perplexity")):
        axes.axhline(6, color="black", linewidth=0.6, linestyle=":")
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    by_perplexity.xaxis.set_major_formatter("{x:.0f}")
    by_perplexity.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    by_perplexity.xaxis.set_minor_formatter(NullFormatter())
    by_step.set_ylabel("largest |hidden state|")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure
