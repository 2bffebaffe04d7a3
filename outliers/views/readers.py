"""Readers of features: cost of removing each feature at each place beside random ones, and effect on attention."""

from collections.abc import Iterator, Mapping
from itertools import islice

import numpy as np
import pandas as pd

from outliers.models.names import short_name
from outliers.runs.stages.readers import readings
from outliers.show.claims import Claim, say
from outliers.show.section import Finding, Section
from outliers.show.tables import MISSING, OVER_TEXT, Table, cell, scattered
from outliers.show.value import exact, value_of
from outliers.show.words import percent
from outliers.views.origins import is_read, random_costs

MEASURES = ("cost", "top1_softmax", "share", "margin")  # measures for which random features give a mean and a deviation
NAMED = 4  # places named in a sentence
NATS = 0.1  # smallest change of the margin that is stated
HEADS = 4  # heads of a feature and place in the table

READERS_CAPTION = (
    "Features set to zero at the inputs of some projections (their readers): perplexity, with the change propagated "
    "through all layers; its increase{over_text}; the increase of {controls} random features at the same place (mean "
    "± standard deviation); and the difference in these deviations. For queries, keys and values, with the change made "
    "in one layer at a time and not propagated: mean top-1 softmax probability of the attention; attention to the "
    "first position (mean over heads); its margin in nats over the other visible positions; and the share of sink "
    "heads, which give it more than 30 %."
)
HEADS_CAPTION = (
    "Heads whose margin of the first position changes most without a feature at a reader of the attention, beyond two "
    "standard deviations of random features: margin with and without the feature, the difference, that of random "
    "features, and the attention to the first position."
)


def _deviations(row: Mapping) -> str:
    mean, deviation, *_ = value_of(row, "cost_controls")
    return f"{(row['cost'] - mean) / deviation:,.1f}" if deviation else MISSING


COLUMNS = (
    ("feature", "{feature:.0f}"),
    ("reader", lambda row: row["place"] or "nothing removed"),
    ("perplexity", "{perplexity:.3f}"),
    ("increase (%)", lambda row: scattered("cost", "+.2f", 100)(row) if row["place"] else MISSING),
    ("random features (%)", scattered("cost_controls", "+.2f", 100)),
    ("deviations", _deviations),
    ("top-1 softmax (%)", lambda row: cell(".2f", row["top1_softmax"], unit=100)),
    ("first position (%)", lambda row: cell(".2f", row["share"], unit=100)),
    ("margin (nats)", "{margin:.3f}"),
    ("sink heads (%)", lambda row: cell(".1f", row["sinks"], unit=100)),
)
HEAD_COLUMNS = (
    ("feature", "{feature:.0f}"),
    ("reader", "{place}"),
    ("layer", "{layer}"),
    ("head", "{head}"),
    ("margin (nats)", "{before:.2f}"),
    ("without", "{margin:.2f}"),
    ("difference", "{change:+.2f}"),
    ("random features", scattered("change_controls", "+.2f")),
    ("first position (%)", lambda row: cell(".1f", row["share_before"], unit=100)),
    ("without (%)", lambda row: cell(".1f", row["share"], unit=100)),
)


def readers_section(rows: list[dict]) -> Section:
    table = readings(rows)
    summary, heads = summary_of(table), changed_heads(table)
    controls = int(table.loc[table["subject"] == "control", "draw"].max()) + 1
    known = summary["cost_error"].notna().any()
    caption = READERS_CAPTION.format(controls=controls, over_text=f" ({OVER_TEXT})" if known else "")
    numbers = summary.drop(columns=["increase"] if known else ["increase", "cost_error"])
    tables = [Table.of("readers", caption, COLUMNS, numbers, texts=2)]
    if len(heads):
        tables.append(Table.of("heads", HEADS_CAPTION, HEAD_COLUMNS, heads, texts=2))
    title = f"Readers of features of {short_name(rows[0]['model'])}"
    return Section(title, rows, tables=tables)


def summary_of(table: pd.DataFrame) -> pd.DataFrame:
    """Add to the data frame of `outliers.readers` the mean and standard deviation of random features at each place.

    The columns are MEASURE_controls and MEASURE_controls_deviation. The unmodified model comes first.
    """
    table = table.drop(columns=["shares", "margins"], errors="ignore").reindex(
        columns=["subject", "place", "feature", "perplexity", *MEASURES, "sinks", "cost_error", "increase"]
    )
    controls = table[table["subject"] == "control"].groupby("place")[[*MEASURES]]
    means, deviations = controls.mean().add_suffix("_controls"), controls.std().add_suffix("_controls_deviation")
    return table[table["subject"] != "control"].join(means.join(deviations), on="place").reset_index(drop=True)


def changed_heads(table: pd.DataFrame) -> pd.DataFrame:
    """Return the heads whose margin each feature changes most at each place, beyond the change by random features."""
    if "margins" not in table:
        return pd.DataFrame()
    whole = table[table["subject"] == "none"].iloc[0]
    in_attention = table[table["margins"].notna()]
    heads = []
    for row in in_attention[in_attention["subject"] == "feature"].to_dict("records"):
        others = in_attention[(in_attention["subject"] == "control") & (in_attention["place"] == row["place"])]
        change, drawn = row["margins"] - whole["margins"], np.stack(others["margins"]) - whole["margins"]
        by_size = np.dstack(np.unravel_index(np.argsort(-abs(change), None), change.shape))[0].tolist()
        changes = (
            {
                "feature": row["feature"],
                "place": row["place"],
                "layer": layer,
                "head": head,
                "before": whole["margins"][layer, head],
                "margin": row["margins"][layer, head],
                "change": change[layer, head],
                "change_controls": drawn[:, layer, head].mean(),
                "change_controls_deviation": drawn[:, layer, head].std(ddof=1),
                "share_before": whole["shares"][layer, head],
                "share": row["shares"][layer, head],
            }
            for layer, head in by_size
        )
        heads += islice((head_change for head_change in changes if _is_apart(head_change, "change")), HEADS)
    return pd.DataFrame(heads)


def _is_apart(row: Mapping, measure: str) -> bool:
    return exact(row[measure]).is_apart(value_of(row, f"{measure}_controls"))


READ = Claim(
    "readers",
    yes="Feature {feature} is read by {places:listed}; in brackets, the increase of perplexity with the feature set to "
    "zero at this reader alone. A random feature costs at most {usual:percent} there, on average.",
    no="Feature {feature} has no reader at which it matters measurably more than random features: without it at "
    "{place} the perplexity changes by {increase:percent}, without random features by {usual:percent}.",
)
PREFERRED = Claim(
    "readers",
    "Without feature {feature} at {place}, the margin of the first position (mean over heads) changes from "
    "{whole[margin]:amount} to {margin:amount} nats and its share of the attention from {whole[share]:part} to "
    "{share:part}; without a random feature the margin is {margin_controls:amount} ± "
    "{margin_controls_deviation:amount} nats.",
)


def readers_findings(table: pd.DataFrame) -> Iterator[Finding]:
    """State for each feature its readers, and the place where its removal changes the first position's margin most.

    Both exceed the scatter of random features.
    """
    summary, usual = summary_of(table), random_costs(table)
    whole = summary.iloc[0].to_dict()
    for _, of_feature in summary.iloc[1:].groupby("feature", sort=False):
        rows = of_feature.sort_values("cost", ascending=False).to_dict("records")
        rows = [row | {"usual": usual[row["place"]]} for row in rows]
        reading = [row for row in rows if is_read(row["increase"], row["usual"])][:NAMED]
        places = [f"{row['place']} ({percent(*row['increase'].shown)})" for row in reading]
        if reading:
            yield from say(READ, [max(reading, key=lambda row: row["usual"].mean)], places=places)
        else:
            yield from say(READ, [max(rows, key=lambda row: abs(row["cost"]))], False)
        changes = {place: abs(row["margin"] - whole["margin"]) for place, row in enumerate(rows)}
        changed = [place for place, change in changes.items() if change >= NATS and _is_apart(rows[place], "margin")]
        yield from say(PREFERRED, [rows[place] for place in sorted(changed, key=changes.get)[-1:]], whole=whole)
