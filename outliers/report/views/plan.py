"""The view of a plan: the projections that stay exact, and the cost of the model with them and with fewer."""

from pathlib import Path

import numpy as np
import pandas as pd

from outliers.models.names import short_name
from outliers.plot.sweep import plan_curve, plan_points
from outliers.presets.plan import CANDIDATES, CONFIRM, exports_of, plan_of, singles_of
from outliers.quantization.plans.plan import Plan
from outliers.report.analysis import Value, exact
from outliers.report.section import Drawing, Failures, Finding, Section, failures, printed
from outliers.report.tables import Table, scatter_note, scattered
from outliers.report.views.damage import decibels
from outliers.report.words import listed, percent
from outliers.specification.kinds import Planning

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
    ("perplexity", "{perplexity:.3f}"),
    ("increase (%)", lambda row: f"{100 * row['cost']:+.2f}"),
)
PRICES = {  # of a set, by what few of is better: its column
    "count": (),
    "parameters": (("their parameters", "{price:,.0f}"),),
}
CURVE = (
    "Increase of perplexity under {scheme} against the number of improved projections (exact, or under a better "
    "scheme), for each set of the search and for the sets confirmed on other blocks. Bars: one standard deviation by "
    "rounding."
)


@failures(Failures.LOST)
def kept_plan_section(spec: Planning, folder: Path, rows: list[dict]) -> Section:
    """The section of the rows of a specification; the plan and its exports become files."""
    plan = plan_of(rows, spec.model, spec.cost, spec.draws)
    return plan_section(rows, plan, {FILE: plan.text} | exports_of(spec, plan), spec.by)


def plan_section(rows: list[dict], plan: Plan, files: dict[str, str], by: str = "count") -> Section:
    """Findings that say how many projections have to be better and what the model costs then, the table of these, and
    the curve of all sets; by: what few of is better."""
    points = plan_points(rows)
    singles = _singles(rows, plan)
    tables = [_chosen(rows, plan), _sets(points, rows, by), *([singles] if len(singles.data) else [])]
    measured = [row for row in rows if row["metric"] == "perplexity" and "stage" in row]
    notes = [scatter_note(measured)]
    tokens = next(row["blocks"] * row["block"] for row in measured)  # of the search, which comes first
    curve = plan_curve(rows, tokens=tokens, allowed=plan.measured["allowed"])
    drawing = Drawing.of("plan", CURVE.format(scheme=plan.scheme), curve)
    title = f"A plan for {short_name(plan.model)} under {plan.scheme}"
    findings = _findings(points, plan)
    return Section(title, rows, printed(tables, notes), tables, [drawing], notes, findings=findings, files=files)


def _chosen(rows: list[dict], plan: Plan) -> Table:
    """The projections that are better, those first that cost most alone."""
    better = {path: name for name, paths in plan.instead.items() for path in paths} | dict.fromkeys(plan.exact, "exact")
    unquantized = next(row["value"] for row in rows if row["metric"] == "perplexity" and row["variant"] == "fp32")
    errors = {row["projection"]: row["value"] for row in rows if row["metric"] == "damage.error_by_token"}
    under = f"{plan.scheme}+only="
    alone = [row for row in rows if row.get("alone") in better and row["variant"].startswith(under)]
    costs = {row["alone"]: row["value"] / unquantized - 1 for row in alone if row["metric"] == "perplexity"}
    kl = {row["alone"]: row["value"] for row in alone if row["metric"] == "damage.kl"}
    data = pd.DataFrame(
        [
            {"projection": path, "scheme": better[path], "cost": costs[path], "kl": kl[path], "error": errors[path]}
            for path in sorted(better, key=costs.get, reverse=True)
        ],
        columns=["projection", "scheme", "cost", "kl", "error"],
    )
    data["by_token_db"] = 10 * np.log10(data["error"].astype(float))
    caption = (
        f"The {len(data)} of {plan.projections} projections that the plan improves over {plan.scheme}: increase of "
        "perplexity and KL divergence from the unquantized model with this projection alone quantized, on the blocks "
        "of the search, and the mean error of its output per token."
    )
    return Table.of("plan_projections", caption, CHOSEN, data, names=2)


def _sets(points: pd.DataFrame, rows: list[dict], by: str) -> Table:
    """Each measured set, in the order of the search."""
    blocks = {row["stage"]: (row.get("first_block", 0), row.get("blocks", 0)) for row in rows if "stage" in row}
    names = {stage: f"{first + 1} to {first + count}" for stage, (first, count) in blocks.items()}
    data = points.drop(columns="variant").assign(blocks=points["stage"].map(names))
    columns = [*SETS[:2], *PRICES[by], *SETS[2:]]
    return Table.of("plan_sets", "Perplexity of each measured set.", columns, data, folded=True)


def _singles(rows: list[dict], plan: Plan) -> Table:
    """The plan without each of its members, those first that matter least."""
    size, unquantized = sum(map(len, (plan.exact, *plan.instead.values()))), plan.measured["unquantized"]
    without = sorted(singles_of(rows, size).items(), key=lambda single: single[1])
    costs = [(path, perplexity, perplexity / unquantized - 1) for path, perplexity in without]
    data = pd.DataFrame(costs, columns=["projection", "perplexity", "cost"])
    caption = (
        "Perplexity on the blocks that confirm the plan, without each of its projections: of one draw, and of all "
        "where one does not clearly exceed what is allowed."
    )
    return Table.of("plan_single", caption, SINGLES, data, names=1, folded=True)


def _findings(points: pd.DataFrame, plan: Plan) -> list[Finding]:
    whole = points[points["stage"] == CONFIRM].iloc[0]
    measured = plan.measured
    better = [f"{len(plan.exact)} exact"] if plan.exact or not plan.instead else []
    better += [f"{len(paths)} in {name}" for name, paths in plan.instead.items()]
    allowed, cost = exact(measured["allowed"]), Value(measured["cost"], measured["cost_deviation"])
    sentence = (
        f"With {listed(better)} of {plan.projections} projections, {plan.scheme} changes the perplexity by "
        f"{percent(*cost)} on blocks outside the search; without the plan, by "
        f"{percent(whole['cost'], whole['cost_deviation'])}"
    )
    if cost.mean > allowed.mean:
        sentence += f". No set of the {CANDIDATES} costliest projections meets the allowed {percent(allowed.mean)}"
    elif not allowed.is_above(cost):
        sentence += f". The distance to the allowed {percent(allowed.mean)} is within the scatter of rounding"
    if (without := measured.get("without_one")) is not None:
        sentence += (
            f". No single one of these projections can be left out: the increase would be at least {percent(without)}"
        )
    return [Finding(f"{sentence}.", "plan_sets")]
