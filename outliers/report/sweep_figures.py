"""Figures from rows, readable in grey and by the colour-blind."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from outliers.criterion import ALPHA
from outliers.quantization.schemes import SCHEMES
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
    """Perplexity against parameters, models of one architecture joined by a line; and, where fp32 was measured, what
    each scheme adds to it in per cent, model by model."""
    baseline = {row["model"]: row["value"] for row in rows if row["scheme"] == "fp32"}
    increases = [
        {**row, "value": 100 * (row["value"] / baseline[row["model"]] - 1)}
        for row in rows
        if row["model"] in baseline and row["scheme"] != "fp32"
    ]
    figure = Figure(figsize=(9 if increases else 5, 3.4), layout="constrained")
    axes = figure.subplots(1, 2, width_ratios=(2, 3)) if increases else [figure.subplots()]
    _plot_against_size(axes[0], rows)
    if increases:
        _plot_by_model(axes[1], increases)
    for panel in axes:
        panel.spines[["top", "right"]].set_visible(False)
    handles = {line.get_label(): line for line in axes[0].lines}
    order = [scheme for scheme in STYLES if scheme in handles]
    figure.legend([handles[scheme] for scheme in order], order, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _style(scheme: str) -> dict:
    color, marker, line = STYLES[scheme]
    fill = "full" if SCHEMES[scheme].outlier_threshold is None else "none"  # hollow: with decomposition
    style = {"color": color, "marker": marker, "linestyle": line, "fillstyle": fill, "label": scheme}
    return {**style, "markersize": 5, "linewidth": 1}


def _plot_against_size(axes: Axes, rows: list[dict]) -> None:
    order = list(STYLES)
    groups = sorted({(row["scheme"], row["architecture"]) for row in rows}, key=lambda group: order.index(group[0]))
    for scheme, architecture in groups:
        group = [row for row in rows if (row["scheme"], row["architecture"]) == (scheme, architecture)]
        points = sorted((row["parameters"], row["value"]) for row in group)
        axes.plot(*zip(*points, strict=True), **_style(scheme))
    axes.set(xscale="log", xlabel="parameters", ylabel="perplexity")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter(FuncFormatter(_count))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _plot_by_model(axes: Axes, rows: list[dict]) -> None:
    """Points of one model side by side, models from small to large."""
    models = [model for _, model in sorted({(row["parameters"], row["model"]) for row in rows})]
    schemes = [scheme for scheme in STYLES if any(row["scheme"] == scheme for row in rows)]
    for place, scheme in enumerate(schemes):
        offset = 0.7 * ((place + 0.5) / len(schemes) - 0.5)
        points = [(models.index(row["model"]) + offset, row["value"]) for row in rows if row["scheme"] == scheme]
        axes.plot(*zip(*points, strict=True), **{**_style(scheme), "linestyle": "none"})
    axes.axhline(0, color="black", linewidth=0.6)
    for boundary in range(1, len(models)):
        axes.axvline(boundary - 0.5, color="0.85", linewidth=0.6)
    axes.set_xticks(range(len(models)), [short_name(model) for model in models], rotation=35, ha="right", fontsize=8)
    axes.set_ylabel("increase over fp32 (%)")


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
        axes.axhline(ALPHA, color="black", linewidth=0.6, linestyle=":")
        axes.set_xlabel(label)
        axes.spines[["top", "right"]].set_visible(False)
    by_perplexity.xaxis.set_major_formatter("{x:.0f}")
    by_perplexity.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    by_perplexity.xaxis.set_minor_formatter(NullFormatter())
    by_step.set_ylabel("largest |hidden state|")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure
