"""The figure of a sweep, from its rows."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outliers.experiment.spec import short_name
from outliers.quantization.schemes import SCHEMES
from outliers.report.style import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, bare, parameters_axis

STYLES = {
    "fp32": (BLACK, "o", "-"),
    "absmax": (VERMILION, "v", "-"),
    "zeropoint": (PURPLE, "s", "-"),
    "absmax-row": (ORANGE, "^", "-"),
    "absmax-vector": (SKY, "D", "-"),
    "zeropoint-vector": (BLUE, "P", "-"),
    "absmax-row-decomp": (ORANGE, "^", ":"),
    "llm.int8": (GREEN, "X", "--"),
    "llm.int8-zeropoint": (BLUE, "P", ":"),
    "llm.int8-bnb": (GREEN, "*", ":"),
}


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
    bare(*axes)
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
    parameters_axis(axes)
    axes.set_ylabel("perplexity")


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
