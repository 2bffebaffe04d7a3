"""What an ablation says."""

import math

import pandas as pd

from outliers.report.analysis import Value, exact
from outliers.report.findings.words import features, percent, times
from outliers.report.section import Finding
from outliers.report.tables import with_interval

TAKEN_OUT = {
    "zero": "Setting {} to zero",
    "mean": "Setting {} to the mean",
    "shuffle": "Shuffling {} over positions",
}
ENDS = ("", "_low", "_high")  # of the names of a mean and of its interval


def ablation_findings(summary: pd.DataFrame) -> list[Finding]:
    """What the model loses by each method beside random features; what single features do; the attention.

    summary: that of `outliers.measurements.ablation.summary`.
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
    """What is lost without the features; that it is more than random features cost only beyond their scatter."""
    what = TAKEN_OUT.get(row["method"], f"Taking {{}} out by {row['method']}").format(features(row["features"]))
    drawn = f"{'another feature' if len(row['features']) == 1 else 'as many others'}, drawn at random,"
    if not exact(row["damage"]).is_apart(Value(control["damage"], _deviation(control))):
        return (
            f"{what} changes the perplexity by {percent(row['damage'])}, {drawn} by {percent(control['damage'])}: "
            "that it matters more could not be shown."
        )
    ratio, *of_control = (1 + value for value in (row["damage"], *(control[f"damage{end}"] for end in ENDS)))
    return f"{what} multiplies the perplexity by {times(ratio)}, {drawn} by {with_interval(times, *of_control)}."


def _attention(row: dict, control: dict, before: dict) -> list[str]:
    """How the attention is without the features, if it is otherwise without random ones."""
    name = "top1_softmax"
    if control[f"{name}_low"] <= row[name] <= control[f"{name}_high"]:
        return []
    moved = "falls" if row[name] < before[name] else "rises"
    return [
        f"Without {features(row['features'])} the mean top-1 softmax probability of the attention {moved} from "
        f"{100 * before[name]:.1f} to {100 * row[name]:.1f} %; without random features it is "
        f"{100 * control[name]:.1f} %."
    ]


def _single(rows: list[dict], control: dict) -> list[str]:
    """Which of several features does most alone, if one does."""
    alone = [row for row in rows if row["subject"] == "single" and row["method"] == control["method"]]
    alone.sort(key=lambda row: -row["damage"])
    values = [Value(row["damage"], _deviation(control)) for row in alone[:2]]
    if len(alone) < 2 or not values[0].is_above(values[1]):
        return []
    most, second = alone[:2]
    return [
        f"Alone, feature {most['features'][0]} does most: {percent(most['damage'])}; the next, feature "
        f"{second['features'][0]}, {percent(second['damage'])}."
    ]


def _deviation(control: dict) -> float:
    """The standard deviation of the damage by one draw of random features, rounding included: the 95 % interval of the
    mean of n draws is about four of it wide, divided by the root of n."""
    return math.sqrt(control["draws"]) * (control["damage_high"] - control["damage_low"]) / 4
