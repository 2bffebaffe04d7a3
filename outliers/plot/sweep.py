"""What schemes cost of perplexity, drawn beside Table 1 of the paper."""

from collections.abc import Iterable, Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from outliers.models.names import distinct_names
from outliers.plot.axes import cost_axis, log_axis, name_places, parameters_axis, plot_costs
from outliers.plot.legends import SCATTER, explained, legend_columns, scheme_legend, scheme_styles
from outliers.plot.published import FAIRSEQ, published_rows
from outliers.plot.style import GREY, color_of, figure_function, panels_of
from outliers.quantization.schemes import BASELINE
from outliers.report.analysis import Rows, costs, records, value_of

STAGES = {  # of a plan: what the legend says, colour, marker, and whether it is filled
    "search": ("on the blocks of the search", "blue", "o", "none"),
    "confirm": ("on other blocks", "vermilion", "s", "full"),
}


def costs_of_schemes(rows: list[dict]) -> list[dict]:
    """Of rows with their costs, as `outliers.report.analysis.costs` has them, those of what quantizes."""
    return [row for row in costs(rows) if row["scheme"] != BASELINE]


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
    """
    rows = records(rows)
    measured = costs_of_schemes(rows)
    shown = measured or rows
    styles = scheme_styles(shown)
    models = len({row["model"] for row in measured}) + (len(FAIRSEQ) if paper else 0)
    size = (0.6 + 0.46 * models + 2.6 * legend_columns(styles), 4.2) if measured else (6.4, 3.4)
    axes = panels_of(ax, 1, 1, size).item()
    if measured:
        _plot_costs(axes, measured, styles, paper)
    else:
        _plot_against_size(axes, rows, styles)
    drawn = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    bars = SCATTER if any("standard_deviation" in row for row in shown) else ""
    grey = "grey: the paper, Table 1" if measured and paper else ""
    explanations = explained((row.get("alpha") for row in shown), bars, grey)
    scheme_legend(ax, axes, {scheme: drawn[scheme] for scheme in styles}, explanations)
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
    published, theirs = (costs_of_schemes(published_rows()), FAIRSEQ) if paper else ([], [])
    ours = [model for _, model in sorted({(row["parameters"], row["model"]) for row in rows})]
    for models, first, points, grey in (
        (ours, 0, rows, {}),
        (theirs, len(ours), published, {"color": GREY, "label": None}),
    ):
        lines = {scheme: [] for scheme in styles}
        for row in points:
            if row["scheme"] in lines:
                lines[row["scheme"]].append((first + models.index(row["model"]), row["cost"]))
        plot_costs(axes, lines, {scheme: style | {"linestyle": "none"} | grey for scheme, style in styles.items()}, 0.7)
    name_places(axes, [*names_of(ours), *(name.replace("fairseq-dense-", "paper, ") for name in theirs)])
    for boundary in range(1, len(ours) + len(theirs)):
        edge = {"color": "0.4", "linewidth": 1} if boundary == len(ours) else {"color": "0.85", "linewidth": 0.6}
        axes.axvline(boundary - 0.5, **edge)
    axes.grid(axis="y")
    cost_axis(axes, [100 * row["cost"].mean for row in (*rows, *published)])


def plan_points(rows: Iterable[Mapping]) -> pd.DataFrame:
    """What each measured set of a plan costs: a row a set, with `stage` ("search", or "confirm" on other blocks),
    `chosen` (how many projections are better), `price` (what that takes), `perplexity`, `cost` and, as a share of the
    perplexity without quantization, its `cost_deviation`; and the `variant`.
    """
    rows = [row for row in rows if "stage" in row]
    exact = {row["stage"]: row["value"] for row in rows if "chosen" not in row}
    points = [row | {"found": value_of(row).beside(exact[row["stage"]])} for row in rows if "chosen" in row]
    columns = ["stage", "chosen", "price", "perplexity", "perplexity_deviation", "cost", "cost_deviation", "variant"]
    return pd.DataFrame(
        [
            [
                *(row[name] for name in columns[:3]),
                row["value"],
                row.get("standard_deviation"),
                *row["found"],
                row["variant"],
            ]
            for row in points
        ],
        columns=columns,
    ).drop_duplicates(["stage", "variant"], ignore_index=True)


@figure_function
def plan_curve(rows: Rows, *, allowed: float | None = None, ax: Axes | None = None) -> Axes:
    """What a scheme costs of perplexity against how many projections are better, in per cent, for each set that the
    search of a plan measured, and those that were confirmed. Bars are one standard deviation by rounding.

    Args:
        rows: of a plan.
        allowed: what it may cost, as a share, a line.
    """
    points = plan_points(records(rows))
    axes = panels_of(ax, 1, 1, (4.6, 3.2)).item()
    for stage, (label, color, marker, fill) in STAGES.items():
        of_stage = points[points["stage"] == stage].sort_values("chosen")
        style = {"color": color_of(color), "marker": marker, "fillstyle": fill, "linestyle": "none", "label": label}
        bars = 100 * of_stage["cost_deviation"].astype(float)
        axes.errorbar(of_stage["chosen"], 100 * of_stage["cost"], yerr=bars, **style)
    if allowed is not None:
        axes.axhline(100 * allowed, color="0.4", linewidth=0.8, linestyle="--", label="allowed")
    axes.set(xlabel="projections that stay exact, or get a better scheme", ylabel="increase of perplexity (%)")
    costly = points["cost"].max() > 10 * max(points["cost"].min(), 1e-3)
    if costly:
        axes.set_yscale("symlog", linthresh=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return axes
