"""Massive activations and attention sinks: where they are, and how both change when their causes are removed."""

import pandas as pd

from outliers.criterion import MASSIVE
from outliers.models.names import short_name
from outliers.quantization.schemes import BASELINE
from outliers.runs.stages.super_weights import removals
from outliers.show.claims import Claim, say, say_each
from outliers.show.section import Finding, Section
from outliers.show.tables import MISSING, OVER_TEXT, Table
from outliers.show.value import value_of
from outliers.show.words import percent

HEADS = 8  # heads in the table, those with the most attention to the first position
CAPTION = (
    "Largest entry of the residual stream (its infinity norm, with its place) and attention to the first position "
    "(mean share over heads; share of sink heads, which give it more than 30 %) after removals in all layers at once; "
    "perplexity, and its increase (%){}."
)
HEADS_CAPTION = (
    "Heads with the most attention to the first position: its mean share over later queries, and its margin in nats "
    "over the other visible positions."
)
DESCRIPTIONS = {
    "nothing": "nothing",
    "weight": "the weight {weight}",
    "neuron": "the whole neuron",
    "activation": "massive entries after layer {massive_layer:.0f}",
    "feature": "feature {feature} at all its readers",
    "position": "the first position in all attention",
}
REPORTED = ("weight", "activation", "position")  # removals that sentences report
COLUMNS = (
    ("removed", "{without}"),
    ("perplexity", "{perplexity:,.2f}"),
    ("increase (%)", lambda row: percent(*value_of(row, "cost").shown, "") if row["cost"] else MISSING),
    ("largest entry", "{entry:,.0f}"),
    ("feature", "{feature:.0f}"),
    ("layer", "{layer:.0f}"),
    ("position", "{position:.0f}"),
    ("first position (%)", lambda row: f"{100 * row['share']:.1f}"),
    ("sink heads (%)", lambda row: f"{100 * row['heads']:.1f}"),
)
HEAD_COLUMNS = (
    ("layer", "{layer:.0f}"),
    ("head", "{head:.0f}"),
    ("first position (%)", lambda row: f"{100 * row['value']:.1f}"),
    ("margin (nats)", "{margin:.2f}"),
)


def massive_section(rows: list[dict]) -> Section:
    becomes, heads = after_removals(rows), _heads(rows)
    caption = CAPTION.format(f"; {OVER_TEXT}" if "cost_error" in becomes else "")
    tables = [
        Table.of("massive", caption, COLUMNS, becomes, texts=1),
        Table.of("sinks", HEADS_CAPTION, HEAD_COLUMNS, heads, heads.head(HEADS), texts=0, folded=True),
    ]
    title = f"Massive activations and attention sinks of {short_name(rows[0]['model'])}"
    return Section(title, rows, tables=tables)


def after_removals(rows: list[dict]) -> pd.DataFrame:
    """Return one row per removal.

    Columns are `removed`, in words `without`, `perplexity`, `cost` (relative increase) with its `cost_error` over the
    text, the largest `entry` of the residual stream with `feature`, `layer` and `position`, and `share` and `heads` of
    the attention to the first position.
    """
    plain = [row for row in rows if row["variant"] == BASELINE]
    rows_removed: list[dict] = []
    for removed, variant in removals(plain).items():
        name = variant.name
        measured = [row for row in rows if row["variant"] == name]
        perplexity = next(value_of(row) for row in measured if row["metric"] == "perplexity")
        entry = max((row for row in measured if row["metric"] == "residual.value"), key=lambda row: abs(row["value"]))
        sinks = next(row for row in measured if row["metric"] == "sinks")
        if not rows_removed:
            whole, feature = perplexity, entry["feature"]
        cost = perplexity.increase_over(whole)
        rows_removed.append(
            {
                "removed": removed,
                "without": DESCRIPTIONS[removed].format(**variant.fields(), feature=feature),
                "perplexity": perplexity.mean,
                "cost": cost.mean,
                "cost_error": cost.error,
                "entry": entry["value"],
                **{name: entry[name] for name in ("feature", "layer", "position")},
                "share": sinks["value"],
                "heads": sinks["heads"],
            }
        )
    return pd.DataFrame(rows_removed).dropna(axis="columns", how="all")


def _heads(rows: list[dict]) -> pd.DataFrame:
    heads = pd.DataFrame(row for row in rows if row["metric"] == "sinks.head" and row["variant"] == BASELINE)
    return heads[["layer", "head", "value", "margin"]].sort_values("value", ascending=False, kind="stable")


LARGEST = Claim(
    "massive",
    "The largest entry of the residual stream is {entry:amount}, in feature {feature} at position {position} after "
    "layer {layer}: {kind}. The first position receives {share:part} of the attention (mean over heads), and more than "
    "30 % from {heads:part} of the heads.",
)
WITHOUT = Claim(
    "massive",
    "Without {without} the largest entry is {entry:amount}, the first position receives {share:part} of the attention, "
    "and the perplexity {change:changed}.",
)


def massive_findings(rows: list[dict]) -> list[Finding]:
    """State the largest entry and the attention to the first position, then how removals change both."""
    whole, *others = after_removals(rows).to_dict("records")
    kind = "a massive activation" if abs(whole["entry"]) > MASSIVE else "not a massive activation"
    shown = [row for row in others if row["removed"] in REPORTED and whole["heads"]]
    without = say_each(WITHOUT, (row | {"feature": whole["feature"], "change": value_of(row, "cost")} for row in shown))
    return [*say(LARGEST, [whole], kind=kind), *without]
