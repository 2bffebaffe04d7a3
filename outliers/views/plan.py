"""The view of a plan: the projections that stay exact, and the model's cost with them and with fewer."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from outliers.models.names import short_name
from outliers.quantization.plans.plan import Plan
from outliers.runs.stages.plan import CANDIDATES, CONFIRM, CostAlone, exports_of, perplexities_without_each, plan_of
from outliers.show.axes import cost_axis
from outliers.show.claims import Claim, say
from outliers.show.section import Context, Drawing, Finding, Section, values_section
from outliers.show.style import color_of, figure_function, panels_of
from outliers.show.tables import Table, scatter_note, scattered
from outliers.show.value import RowsOrFrame, comparable_rows, exact, scattered_by, value_of
from outliers.show.words import decibels, span

STAGES = {  # stage of a plan: label in the legend, colour, marker, fill
    "search": ("on the blocks of the search", "blue", "o", "none"),
    "confirm": ("on other blocks", "vermilion", "s", "full"),
}


def plan_points(rows: Iterable[Mapping]) -> pd.DataFrame:
    """Return the cost of each set of projections that a plan measured, one row per set.

    Columns: `stage` ("search", or "confirm" on other blocks), `chosen` (number of improved projections), `price` (their
    number, or that of their parameters), `perplexity`, `cost` (relative increase of perplexity), both with _deviation
    and _error, and `variant`.
    """
    rows = [row for row in rows if row.get("stage") in STAGES]
    exact = {row["stage"]: value_of(row) for row in rows if "chosen" not in row}
    points = []
    for row in rows:
        if "chosen" in row:
            measured, cost = value_of(row), value_of(row).increase_over(exact[row["stage"]])
            point = {name: row[name] for name in ("stage", "chosen", "price", "variant")}
            for name, value in (("perplexity", measured), ("cost", cost)):
                point |= {name: value.mean, f"{name}_deviation": value.deviation, f"{name}_error": value.error}
            points.append(point)
    return pd.DataFrame(points).drop_duplicates(["stage", "variant"], ignore_index=True)


def expected_costs(rows: Iterable[Mapping], tokens: int) -> list[float]:
    """Return the expected cost of a scheme, as a share, with the 0, 1, 2, … costliest projections improved.

    An improved projection is exact or has a better scheme. The increases of log-perplexity by the others are added to
    the measured cost with all of them improved. tokens: number of tokens on which single projections were measured.
    """
    rows = [row for row in rows if row["metric"] in ("perplexity", "damage.kl")]
    searched = [row for row in rows if row.get("stage") == "search"]
    exact, most = (
        next(row for row in searched if "chosen" not in row),
        max(searched, key=lambda row: row.get("chosen", 0)),
    )
    under = next((row["variant"].partition("+only=")[0] for row in rows if "alone" in row), "")
    alone = [
        CostAlone.of(math.log(costs["perplexity"] / exact["value"]), costs["damage.kl"], tokens)
        for costs in _alone(rows, under).to_dict("records")
    ]
    gains = sorted((costs.loss for costs in alone), reverse=True)
    left = math.log(most["value"] / exact["value"])
    return [math.expm1(left + math.fsum(gains[count:])) for count in range(len(gains) + 1)]


def _alone(rows: Iterable[Mapping], scheme: str) -> pd.DataFrame:
    """Return perplexity and divergence with each projection (index) alone quantized under a scheme."""
    alone = [row for row in rows if "alone" in row and row["variant"] == f"{scheme}+only={row['alone']}"]
    frame = pd.DataFrame(alone, columns=["alone", "metric", "value"])
    return frame.pivot_table(index="alone", columns="metric", values="value", aggfunc="last")


@figure_function
def plan_curve(
    rows: RowsOrFrame, *, tokens: int | None = None, allowed: float | None = None, ax: Axes | None = None
) -> Axes:
    """Draw the increase of perplexity under a scheme, in per cent, against the number of improved projections.

    Points are the sets that the search of a plan measured, and the confirmed sets.

    Error bars are one standard deviation by the text and rounding.

    Example:
        >>> axes = outliers.plot.plan_curve(outliers.frame("results/kept/plans/absmax"))

    Args:
        rows: of a plan.
        tokens: number of tokens that the search measured on; if given, a line shows the expected cost with the
            costliest projections improved.
        allowed: the allowed cost, as a share, drawn as a line.
    """
    points = plan_points(comparable_rows(rows))
    axes = panels_of(ax, 1, 1, (4.8, 3.4)).item()
    for stage, (label, color, marker, fill) in STAGES.items():
        sets = points[points["stage"] == stage].sort_values("chosen")
        style = {"color": color_of(color), "marker": marker, "fillstyle": fill, "linestyle": "none", "label": label}
        bars = [100 * (value_of(row, "cost").bar or 0) for row in sets.to_dict("records")]
        axes.errorbar(sets["chosen"], 100 * sets["cost"], yerr=bars, **style)
    costs_of_all = (100 * points["cost"]).tolist()
    if tokens is not None:
        expected = [100 * cost for cost in expected_costs(comparable_rows(rows), tokens)]
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


FILE = "plan.yaml"
CHOSEN = (
    ("projection", "{projection}"),
    ("scheme", "{scheme}"),
    ("alone: increase (%)", lambda row: f"{100 * row['cost']:+.2f}"),
    ("KL (nats)", "{kl:.4f}"),
    ("error per token (dB)", lambda row: decibels(row["by_token_db"])),
)
SETS = (
    ("blocks", "{blocks}"),
    ("improved projections", "{chosen:.0f}"),
    ("perplexity", scattered("perplexity", ".3f")),
    ("increase (%)", scattered("cost", "+.2f", 100)),
)
SINGLES = (
    ("left out", "{projection}"),
    ("perplexity", scattered("perplexity", ".3f")),
    ("increase (%)", scattered("cost", "+.2f", 100)),
)
PRICES = {  # column of a set's price, by what a plan minimizes
    "count": (),
    "parameters": (("their parameters", "{price:,.0f}"),),
}
CURVE = (
    "Increase of perplexity under {scheme} against the number of improved projections (exact, or under a better "
    "scheme), for each set of the search and for the sets confirmed on other blocks. Bars: one standard deviation by "
    "{scatter}."
)


def plan_rows_section(rows: list[dict], context: Context) -> Section:
    """Show the plan that an experiment's rows define; the plan and its exports become files.

    A search chooses among all sets that it measured: if one of them has no comparable number, list values.
    """
    if len(rows) < len(context.rows):
        return values_section([*context.rows])
    experiment, folder, _ = context
    plan = plan_of(rows, experiment.model, experiment.cost, experiment.draws)
    files = {FILE: plan.text} | exports_of(experiment.export, plan, experiment.revision)
    section = plan_section(rows, plan, files, experiment.by)
    note = f"The plan is {folder / FILE}: python -m outliers.measure {experiment.model} --variant @{folder / FILE}"
    return section._replace(printed=f"{section.text}\n\n{note}", notes=[*section.notes, f"{note}."])


def plan_section(rows: list[dict], plan: Plan, files: dict[str, str], by: str = "count") -> Section:
    """Show how many projections have to be improved, and the cost then: findings, tables, and the curve of all sets.

    by: what the plan minimizes.
    """
    points = plan_points(rows)
    every = _chosen(rows, plan), _sets(points, rows, by), _singles(rows, plan)
    tables = [table for table in every if len(table.data)]
    measured = [row for row in rows if row["metric"] == "perplexity" and "stage" in row]
    notes = [scatter_note(measured)]
    tokens = next(row["blocks"] * row["block"] for row in measured)  # of the search, whose rows come first
    curve = plan_curve(rows, tokens=tokens, allowed=plan.measured["allowed"])
    scatter = scattered_by(measured)
    drawing = Drawing.of("plan", CURVE.format(scheme=plan.scheme, scatter=scatter), curve)
    title = f"A plan for {short_name(plan.model)} under {plan.scheme}"
    findings = _findings(points, plan, scatter)
    return Section(title, rows, tables, [drawing], notes, findings=findings, files=files)


def _chosen(rows: list[dict], plan: Plan) -> Table:
    better = {path: name for name, paths in plan.instead.items() for path in paths} | dict.fromkeys(plan.exact, "exact")
    unquantized = next(row["value"] for row in rows if row["metric"] == "perplexity" and row["variant"] == "fp32")
    errors = {row["projection"]: row["value"] for row in rows if row["metric"] == "damage.error_by_token"}
    alone = _alone(rows, plan.scheme).reindex(index=list(better), columns=["perplexity", "damage.kl"])
    data = pd.DataFrame({"projection": list(better), "scheme": list(better.values())})
    data[["cost", "kl"]] = alone.assign(perplexity=alone["perplexity"] / unquantized - 1).to_numpy()
    data["error"] = data["projection"].map(errors).astype(float)
    data["by_token_db"] = 10 * np.log10(data["error"])
    data = data.sort_values("cost", ascending=False, kind="stable", ignore_index=True)
    caption = (
        f"The {len(data)} of {plan.projections} projections that the plan improves over {plan.scheme}: increase of "
        "perplexity and KL divergence from the unquantized model with this projection alone quantized, on the blocks "
        "of the search, and the mean error of its output per token."
    )
    return Table.of("plan_projections", caption, CHOSEN, data, texts=2)


def _sets(points: pd.DataFrame, rows: list[dict], by: str) -> Table:
    blocks = {row["stage"]: (row.get("first_block", 0), row.get("blocks", 0)) for row in rows if "stage" in row}
    names = {stage: span(first + 1, first + count) for stage, (first, count) in blocks.items()}
    data = points.drop(columns="variant").assign(blocks=points["stage"].map(names))
    columns = [*SETS[:2], *PRICES[by], *SETS[2:]]
    return Table.of("plan_sets", "Perplexity of each measured set.", columns, data, folded=True)


def _singles(rows: list[dict], plan: Plan) -> Table:
    """Make the table of the plan without each of its projections, those that matter least first."""
    size = sum(map(len, (plan.exact, *plan.instead.values())))
    confirmed = (row for row in rows if row.get("stage") == CONFIRM and "chosen" not in row)
    unquantized = value_of(next(confirmed))
    without = sorted(perplexities_without_each(rows, size).items(), key=lambda single: single[1].mean)
    costs = [(path, *perplexity[:3], *perplexity.increase_over(unquantized)[:3]) for path, perplexity in without]
    bars = ["perplexity_deviation", "perplexity_error", "cost_deviation", "cost_error"]
    data = pd.DataFrame(costs, columns=["projection", "perplexity", *bars[:2], "cost", *bars[2:]])
    data = data.astype(dict.fromkeys(bars, float))
    caption = (
        "Perplexity on the blocks that confirm the plan, without each of its projections: of one draw, and of all "
        "draws (±) where one does not clearly exceed what is allowed or the least."
    )
    return Table.of("plan_single", caption, SINGLES, data, texts=1, folded=True)


IMPROVED = Claim(
    "plan_sets",
    yes="With {better:listed} of {projections} projections, {scheme} changes the perplexity by {cost:percent} on "
    "blocks outside the search; without the plan, by {whole:percent}[[. No set of the {tried} costliest projections "
    "meets the allowed {missed:percent}]][[. The distance to the allowed {near:percent} is within the scatter of "
    "{scatter}]][[. None of these projections can be left out: without the one that can be spared best, the increase "
    "is {without_one:percent}]].",
    no="Nothing has to stay exact: with all {projections} projections under {scheme}, the perplexity changes by "
    "{cost:percent} on blocks outside the search[[. The distance to the allowed {near:percent} is within the scatter "
    "of {scatter}]].",
)


def _findings(points: pd.DataFrame, plan: Plan, scatter: str) -> list[Finding]:
    allowed, cost = plan.measured["allowed"], value_of(plan.measured, "cost")
    whole, *_ = points[points["stage"] == CONFIRM].to_dict("records")
    better = {"exact": plan.exact} | {f"in {name}": paths for name, paths in plan.instead.items()}
    about = {
        "better": [f"{len(paths)} {how}" for how, paths in better.items() if paths],
        "cost": cost,
        "whole": value_of(whole, "cost"),
        "without_one": value_of(plan.measured, "without_one") if "without_one" in plan.measured else None,
        "scatter": scatter,
        "tried": CANDIDATES,
        "missed": allowed if cost.mean > allowed else None,
        "near": allowed if cost.mean <= allowed and not exact(allowed).is_above(cost) else None,
    }
    return say(IMPROVED, [vars(plan) | plan.measured | about], bool(about["better"]))
