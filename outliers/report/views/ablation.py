"""The view of an ablation: section 4.2 of the paper."""

import math

import pandas as pd

from outliers.models.names import short_name
from outliers.plot.ablation import ablation_bars
from outliers.quantization.schemes import BASELINE
from outliers.show.section import Drawing, Failures, Finding, Section, by_stack, failures
from outliers.show.tables import MISSING, Table, with_interval
from outliers.show.value import Value, exact
from outliers.show.words import count, features, percent, times

CAPTION = (
    "Removal of features: mean top-1 softmax probability of the attention, perplexity, and its increase. Brackets: "
    "95 % interval of the mean over draws of random features."
)
FIGURE = "Attention and perplexity of the model without its outlier features, and without random features."
REMOVED = {  # subject of a row: what is taken out
    "none": "nothing",
    "outliers": "outliers {numbers}",
    "control": "random features, {draws:.0f} draws",
    "single": "feature {numbers}",
}


@failures(Failures.LOST)
def ablation_section(rows: list[dict]) -> Section:
    """The summary of an ablation as a table and as bars, without the trace that has found its features; of several
    stacks, whose features are taken out one stack at a time, that of each."""
    rows = [row for row in rows if "subject" in row]
    by_stack_name = {
        stack: [row for row in rows if {row.get("ablated", stack), row.get("stack", stack)} == {stack}]
        for stack in dict.fromkeys(row["ablated"] for row in rows if "ablated" in row) or [""]
    }
    return by_stack({stack: _of_stack(rows_of_stack) for stack, rows_of_stack in by_stack_name.items()}, rows)


def _of_stack(rows: list[dict]) -> Section:
    summary = ablation_summary(rows)
    table = ablation_table(summary)
    drawings = [Drawing.of("ablation", FIGURE, ablation_bars(summary))]
    scheme = rows[0].get("scheme", BASELINE)
    title = f"Ablation of {short_name(rows[0]['model'])}{'' if scheme == BASELINE else f' under {scheme}'}"
    return Section(title, rows, table.form("simple"), [table], drawings, findings=ablation_findings(summary))


def ablation_summary(rows: list[dict]) -> pd.DataFrame:
    """`outliers.metrics.ablations.summary` of rows."""
    from outliers.metrics.ablations import damages, summary

    measurements: dict[tuple, dict] = {}
    for row in rows:
        about = {name: row.get(name) for name in ("subject", "method", "draw")} | {"features": tuple(row["features"])}
        measurements.setdefault(tuple(about.values()), about)[row["metric"]] = row["value"]
    return summary(damages(list(measurements.values())), rows[0]["seed"])


def ablation_table(summary: pd.DataFrame) -> Table:
    """The summary as people read it; random features with the 95 % interval of their mean."""
    return Table.of("ablation", CAPTION, COLUMNS, summary, names=2)


def _percent(row: dict, metric: str) -> str:
    ends = [row[f"{metric}_{end}"] for end in ("low", "high")] if row["subject"] == "control" else []
    return with_interval(lambda share: f"{100 * share:.2f}", row[metric], *ends)


COLUMNS = (
    ("removed", lambda row: REMOVED[row["subject"]].format(numbers=", ".join(map(str, row["features"])), **row)),
    ("method", lambda row: row["method"] or MISSING),
    ("top-1 softmax (%)", lambda row: _percent(row, "top1_softmax")),
    ("perplexity", "{perplexity:.2f}"),
    ("increase (%)", lambda row: MISSING if row["subject"] == "none" else _percent(row, "damage")),
)
TAKEN_OUT = {
    "zero": "Setting {} to zero",
    "mean": "Setting {} to the mean",
    "shuffle": "Shuffling {} over positions",
}
ENDS = ("", "_low", "_high")  # of the names of a mean and of its interval


def ablation_findings(summary: pd.DataFrame) -> list[Finding]:
    """Loss of the model by each method beside random features; effect of single features; the attention.

    summary: that of `outliers.metrics.ablations.summary`.
    """
    rows = summary.to_dict("records")
    pairs = [
        (row, control)
        for row in rows
        for control in rows
        if row["subject"] == "outliers" and control["subject"] == "control" and row["method"] == control["method"]
    ]
    before = next(row for row in rows if row["subject"] == "none")
    sentences = [_damage(*pair) for pair in pairs]
    sentences += [*_attention(*pairs[0], before), *_single(rows, pairs[0][1])] if pairs else []
    return [Finding(sentence, "ablation") for sentence in sentences]


def _damage(row: dict, control: dict) -> str:
    """Effect of removing the features; more than that of random features only beyond their scatter."""
    removal = TAKEN_OUT.get(row["method"], f"Removing {{}} by {row['method']}").format(features(row["features"]))

    drawn = f"doing so with {_random(row)}"
    if not exact(row["damage"]).is_apart(Value(control["damage"], _deviation(control))):
        return (
            f"{removal} has no measurably different effect on the perplexity than {drawn}: {percent(row['damage'])} "
            f"and {percent(control['damage'])}."
        )
    ratio, *control_interval = (1 + value for value in (row["damage"], *(control[f"damage{end}"] for end in ENDS)))
    return (
        f"{removal} multiplies the perplexity by {times(ratio)}; {drawn}, by {with_interval(times, *control_interval)}."
    )


def _random(row: dict) -> str:
    return "a random feature" if len(row["features"]) == 1 else f"{count(len(row['features']))} random features"


def _attention(row: dict, control: dict, before: dict) -> list[str]:
    """The attention without the features, if it is otherwise without random ones."""
    name = "top1_softmax"
    if control[f"{name}_low"] <= row[name] <= control[f"{name}_high"]:
        return []
    moved = "falls" if row[name] < before[name] else "rises"
    return [
        f"Without {features(row['features'])} the mean top-1 softmax probability of the attention {moved} from "
        f"{100 * before[name]:.1f} to {100 * row[name]:.1f} %; without {_random(row)} it is "
        f"{100 * control[name]:.1f} %."
    ]


def _single(rows: list[dict], control: dict) -> list[str]:
    """The one of several features with the largest effect alone, if one has it."""
    alone = [row for row in rows if row["subject"] == "single" and row["method"] == control["method"]]
    alone.sort(key=lambda row: -row["damage"])
    values = [Value(row["damage"], _deviation(control)) for row in alone[:2]]
    if len(alone) < 2 or not values[0].is_above(values[1]):
        return []
    most, second = alone[:2]
    return [
        f"Of single features, feature {most['features'][0]} raises the perplexity most when removed: "
        f"{percent(most['damage'])}; the next is feature {second['features'][0]} with {percent(second['damage'])}."
    ]


def _deviation(control: dict) -> float:
    """The standard deviation of the damage by one draw of random features, rounding included: the 95 % interval of the
    mean of n draws is about four of it wide, divided by the root of n."""
    return math.sqrt(control["draws"]) * (control["damage_high"] - control["damage_low"]) / 4
