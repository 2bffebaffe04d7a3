"""Cost of schemes, drawn beside Table 1 of the paper."""

import math
from collections.abc import Iterable, Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from outliers.models.names import distinct_names
from outliers.plot.axes import cost_axis, log_axis, name_places, parameters_axis, plot_costs
from outliers.plot.legends import SCATTER, explained, legend_columns, scheme_legend, scheme_styles
from outliers.plot.published import FAIRSEQ, published_rows
from outliers.plot.style import GREY, color_of, figure_function, panels_of
from outliers.presets.plan import Alone
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
    """Increase of each model's perplexity under each scheme, in per cent; where nothing was measured without
    quantization, perplexity against parameters.

    Bars are one standard deviation by rounding, of rows of several draws.

    Example:
        >>> rows = outliers.sweep(models=["pocket/gpt2-0.1m"], schemes=["fp32", "absmax"], block=64, blocks=2)
        >>> axes = outliers.plot.sweep_costs(rows)

    Args:
        rows: of a sweep.
        paper: whether the models of the paper stand beside, in grey.
    """
    rows = records(rows)
    measured = costs_of_schemes(rows)
    rows_shown = measured or rows
    styles = scheme_styles(rows_shown)
    models = len({row["model"] for row in measured}) + (len(FAIRSEQ) if paper else 0)
    size = (0.6 + 0.46 * models + 2.6 * legend_columns(styles), 4.2) if measured else (6.4, 3.4)
    axes = panels_of(ax, 1, 1, size).item()
    if measured:
        _plot_costs(axes, measured, styles, paper)
    else:
        _plot_against_size(axes, rows, styles)
    drawn = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    bars = SCATTER if any("standard_deviation" in row for row in rows_shown) else ""
    grey = "grey: the paper, Table 1" if measured and paper else ""
    explanations = explained((row.get("alpha") for row in rows_shown), bars, grey)
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
    """Cost of each measured set of a plan: a row a set, with `stage` ("search", or "confirm" on other blocks), `chosen`
    (how many projections are better), `price` (what that takes), `perplexity`, `cost` and, as a share of the perplexity
    without quantization, its `cost_deviation`; and the `variant`.
    """
    rows = [row for row in rows if row.get("stage") in STAGES]
    exact = {row["stage"]: row["value"] for row in rows if "chosen" not in row}
    points = []
    for row in rows:
        if "chosen" in row:
            measured, cost = value_of(row), value_of(row).beside(exact[row["stage"]])
            point = {name: row[name] for name in ("stage", "chosen", "price", "variant")}
            point |= {"perplexity": measured.mean, "perplexity_deviation": measured.deviation}
            points.append(point | {"cost": cost.mean, "cost_deviation": cost.deviation})
    return pd.DataFrame(points).drop_duplicates(["stage", "variant"], ignore_index=True)


def expected_costs(rows: Iterable[Mapping], tokens: int) -> list[float]:
    """Expected cost of a scheme with no projection exact, with the first one, and so on, as shares: by what each costs
    alone, the rest being as with all of them; tokens: on which that was measured."""
    rows = [row for row in rows if row["metric"] in ("perplexity", "damage.kl")]
    searched = [row for row in rows if row.get("stage") == "search"]
    exact, most = (
        next(row for row in searched if "chosen" not in row),
        max(searched, key=lambda row: row.get("chosen", 0)),
    )
    alone = [row for row in rows if "alone" in row and row["variant"].endswith(f"+only={row['alone']}")]
    under = alone[0]["variant"].partition("+only=")[0] if alone else ""
    by_projection: dict[str, dict] = {}
    for row in alone:
        if row["variant"].startswith(f"{under}+only="):
            by_projection.setdefault(row["alone"], {})[row["metric"]] = row["value"]
    gains = sorted(
        (
            Alone.of(math.log(costs["perplexity"] / exact["value"]), costs["damage.kl"], tokens).loss
            for costs in by_projection.values()
        ),
        reverse=True,
    )
    left = math.log(most["value"] / exact["value"])
    return [math.expm1(left + math.fsum(gains[count:])) for count in range(len(gains) + 1)]


@figure_function
def plan_curve(rows: Rows, *, tokens: int | None = None, allowed: float | None = None, ax: Axes | None = None) -> Axes:
    """Increase of perplexity under a scheme against the number of improved projections, in per cent, for each set that
    the search of a plan measured, and those that were confirmed. Bars are one standard deviation by rounding.

    Example:
        >>> axes = outliers.plot.plan_curve(outliers.frame("results/kept/plans/absmax"))

    Args:
        rows: of a plan.
        tokens: on which the search measured; with them a line shows what projections that cost most alone should save.
        allowed: what it may cost, as a share, a line.
    """
    points = plan_points(records(rows))
    axes = panels_of(ax, 1, 1, (4.8, 3.4)).item()
    for stage, (label, color, marker, fill) in STAGES.items():
        sets = points[points["stage"] == stage].sort_values("chosen")
        style = {"color": color_of(color), "marker": marker, "fillstyle": fill, "linestyle": "none", "label": label}
        bars = 100 * sets["cost_deviation"].astype(float)
        axes.errorbar(sets["chosen"], 100 * sets["cost"], yerr=bars, **style)
    costs_of_all = (100 * points["cost"]).tolist()
    if tokens is not None:
        expected = [100 * cost for cost in expected_costs(records(rows), tokens)]
        axes.plot(expected, color="0.4", label="expected from costs alone, costliest first", zorder=1)
        costs_of_all += expected
    if allowed is not None:
        axes.axhline(100 * allowed, color="0.4", linewidth=0.8, linestyle="--", label="allowed")
    cost_axis(axes, costs_of_all)
    if min(costs_of_all) > 0:
        axes.set_ylim(bottom=min(costs_of_all) / 2)
        axes.set_ylabel("increase of perplexity (%)")
    axes.set_xlabel("improved projections (exact, or under a better scheme)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    return axes
