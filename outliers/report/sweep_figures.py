"""The figure of a sweep, from its rows."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from outliers.models.names import distinct_names
from outliers.quantization.schemes import BASELINE, SCHEMES
from outliers.report.paper import PUBLISHED
from outliers.report.style import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, bare, parameters_axis

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
LINEAR = 0.1  # per cent: within it the scale of costs is linear, beyond it logarithmic
TICKS = (0.1, 1, 10, 100, 1000, 10_000)


def costs(rows: list[dict]) -> list[dict]:
    """What a scheme adds to the perplexity of its model, in per cent, in the place of each row's value; and its
    standard deviation. Of models whose perplexity without quantization is there."""
    baseline = {row["model"]: row["value"] for row in rows if row["scheme"] == BASELINE}
    found = []
    for row in rows:
        if row["model"] in baseline and row["scheme"] != BASELINE:
            cost = {"value": 100 * (row["value"] / baseline[row["model"]] - 1)}
            if "standard_deviation" in row:
                cost["standard_deviation"] = 100 * row["standard_deviation"] / baseline[row["model"]]
            found.append(row | cost)
    return found


def sweep_figure(rows: list[dict]) -> Figure:
    """What each scheme adds to the perplexity of each model, beside the models of the paper; where nothing was measured
    without quantization, perplexity against parameters."""
    found = costs(rows)
    figure = Figure(figsize=(9, 4.2) if found else (5, 3.4), layout="constrained")
    axes = figure.subplots()
    if found:
        _plot_costs(axes, found, costs(_published_rows()))
    else:
        _plot_against_size(axes, rows)
    bare(axes)
    handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    order = [scheme for scheme in STYLES if scheme in handles]
    figure.legend([handles[scheme] for scheme in order], order, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _style(scheme: str) -> dict:
    color, marker, line = STYLES[scheme]
    fill = "full" if SCHEMES[scheme].outlier_threshold is None else "none"  # hollow: with decomposition
    style = {"color": color, "marker": marker, "linestyle": line, "fillstyle": fill, "label": scheme}
    return {**style, "markersize": 5, "linewidth": 1}


def _plot_against_size(axes: Axes, rows: list[dict]) -> None:
    """Models of one architecture are joined by a line."""
    order = list(STYLES)
    groups = sorted({(row["scheme"], row["architecture"]) for row in rows}, key=lambda group: order.index(group[0]))
    for scheme, architecture in groups:
        group = [row for row in rows if (row["scheme"], row["architecture"]) == (scheme, architecture)]
        points = sorted((row["parameters"], row["value"]) for row in group)
        axes.plot(*zip(*points, strict=True), **_style(scheme))
    parameters_axis(axes)
    axes.set_ylabel("perplexity")


def _published_rows() -> list[dict]:
    """Table 1 as published, as rows."""
    return [
        {"model": model, "scheme": scheme, "value": value}
        for (model, scheme), value in PUBLISHED["table1"].values.items()
    ]


def _plot_costs(axes: Axes, rows: list[dict], published: list[dict]) -> None:
    """Points of one model side by side; models from small to large, then those of the paper in grey."""
    ours = [model for _, model in sorted({(row["parameters"], row["model"]) for row in rows})]
    theirs = list(dict.fromkeys(row["model"] for row in published))
    schemes = [scheme for scheme in STYLES if any(row["scheme"] == scheme for row in rows)]
    for models, first, points in ((ours, 0, rows), (theirs, len(ours), published)):
        for place, scheme in enumerate(schemes):
            offset = first + 0.7 * ((place + 0.5) / len(schemes) - 0.5)
            of_scheme = [row for row in points if row["scheme"] == scheme]
            grey = {} if models is ours else {"color": GREY, "label": None}
            axes.errorbar(
                [models.index(row["model"]) + offset for row in of_scheme],
                [row["value"] for row in of_scheme],
                [row.get("standard_deviation", 0) for row in of_scheme],
                **{**_style(scheme), "linestyle": "none", **grey},
            )
    axes.axhline(0, color="black", linewidth=0.6)
    for boundary in range(1, len(ours) + len(theirs)):
        edge = {"color": "0.4", "linewidth": 1} if boundary == len(ours) else {"color": "0.85", "linewidth": 0.6}
        axes.axvline(boundary - 0.5, **edge)
    names = list(distinct_names((model, None) for model in ours).values())
    names += [name.replace("fairseq-dense-", "paper, ") for name in theirs]
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axes.set_xlim(-0.5, len(names) - 0.5)
    _cost_axis(axes, [row["value"] for row in (*rows, *published)])
    axes.set_ylabel(f"increase of perplexity (%), linear within ±{LINEAR:g}")


def _cost_axis(axes: Axes, values: list[float]) -> None:
    """A scale on which a tenth of a per cent and a hundred can both be read."""
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.7)
    ticks = [sign * tick for tick in TICKS for sign in (-1, 1) if tick <= 10 * max(sign * value for value in values)]
    ticks = sorted([0, *ticks])
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(ticks, [f"{tick:+g}".replace("-", "−") if tick else "0" for tick in ticks])
    axes.set_ylim(2 * min(*values, -LINEAR), 2 * max(*values, LINEAR))
    axes.grid(axis="y", color="0.93", linewidth=0.6)
    axes.set_axisbelow(True)
