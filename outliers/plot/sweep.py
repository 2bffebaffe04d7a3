"""What schemes cost of perplexity, drawn beside Table 1 of the paper."""

from collections.abc import Iterable

from matplotlib.axes import Axes

from outliers.models.names import distinct_names
from outliers.plot.published import FAIRSEQ, published_rows
from outliers.plot.records import Rows, records
from outliers.plot.style import (
    GREY,
    LINEAR,
    SCATTER,
    SLANTED,
    brief,
    cost_axis,
    figure_function,
    legend_columns,
    log_axis,
    panels_of,
    parameters_axis,
    said,
    scheme_legend,
    scheme_styles,
)
from outliers.quantization.schemes import BASELINE


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


def names_of(models: Iterable[str]) -> list[str]:
    """The short names of models, whole ones where two share theirs."""
    return list(distinct_names((model, None) for model in models).values())


@figure_function
def sweep_costs(rows: Rows, *, paper: bool = True, ax: Axes | None = None) -> Axes:
    """What each scheme adds to the perplexity of each model, in per cent; where nothing was measured without
    quantization, perplexity against parameters.

    Bars are one standard deviation by rounding, of rows of several draws.

    Args:
        rows: of a sweep.
        paper: whether the models of the paper stand beside, in grey.
        ax: where to draw, in the caller's style; by default a new figure.
    """
    rows = records(rows)
    found = costs(rows)
    styles = scheme_styles(found or rows)
    models = len({row["model"] for row in found}) + paper * len(FAIRSEQ)
    size = (0.6 + 0.46 * models + 2.6 * legend_columns(styles), 4.2) if found else (6.4, 3.4)
    axes = panels_of(ax, 1, 1, size).item()
    if found:
        _plot_costs(axes, found, styles, paper)
    else:
        _plot_against_size(axes, rows, styles)
    drawn = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    entries = {scheme: drawn[scheme] for scheme in styles}
    bars = SCATTER if any("standard_deviation" in row for row in found or rows) else None
    grey = [said("grey: the paper, Table 1", marker="o", color=GREY)] if found and paper else []
    scheme_legend(ax, axes, entries, found or rows, bars, *grey)
    return axes


def _plot_against_size(axes: Axes, rows: list[dict], styles: dict[str, dict]) -> None:
    """Models of one architecture are joined by a line."""
    order = list(styles)
    for place, architecture in sorted({(order.index(row["scheme"]), row["architecture"]) for row in rows}):
        group = [row for row in rows if (row["scheme"], row["architecture"]) == (order[place], architecture)]
        points = sorted((row["parameters"], row["value"], row.get("standard_deviation", 0)) for row in group)
        axes.errorbar(*zip(*points, strict=True), **styles[order[place]])
    parameters_axis(axes)
    axes.set(yscale="log", ylabel="perplexity")
    log_axis(axes.yaxis, *axes.get_ylim())


def _plot_costs(axes: Axes, rows: list[dict], styles: dict[str, dict], paper: bool) -> None:
    """Points of one model side by side; models from small to large, then those of the paper in grey."""
    published, theirs = (costs(published_rows()), FAIRSEQ) if paper else ([], [])
    ours = [model for _, model in sorted({(row["parameters"], row["model"]) for row in rows})]
    for models, first, points in ((ours, 0, rows), (theirs, len(ours), published)):
        for place, (scheme, style) in enumerate(styles.items()):
            offset = first + 0.7 * ((place + 0.5) / len(styles) - 0.5)
            of_scheme = [row for row in points if row["scheme"] == scheme]
            grey = {} if models is ours else {"color": GREY, "label": None}
            axes.errorbar(
                [models.index(row["model"]) + offset for row in of_scheme],
                [row["value"] for row in of_scheme],
                [row.get("standard_deviation", 0) for row in of_scheme],
                **{**style, "linestyle": "none", **grey},
            )
    axes.axhline(0, color="black", linewidth=0.6)
    for boundary in range(1, len(ours) + len(theirs)):
        edge = {"color": "0.4", "linewidth": 1} if boundary == len(ours) else {"color": "0.85", "linewidth": 0.6}
        axes.axvline(boundary - 0.5, **edge)
    names = [*brief(names_of(ours)), *(name.replace("fairseq-dense-", "paper, ") for name in theirs)]
    axes.set_xticks(range(len(names)), names, **SLANTED)
    axes.set_xlim(-0.5, len(names) - 0.5)
    cost_axis(axes, [row["value"] for row in (*rows, *published)])
    axes.set_ylabel(f"increase of perplexity (%), linear within ±{LINEAR:g}")
