"""Ablation: the loss of a model without its outlier features (section 4.2 of the paper)."""

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from outliers.quantization.schemes import BASELINE
from outliers.show.legends import legend
from outliers.show.section import Drawing, Failures, Finding, Section, by_stack, failures, subject_of
from outliers.show.style import chosen, color_of, figure_function, panels_of
from outliers.show.tables import MISSING, Table, with_interval
from outliers.show.value import Value, exact
from outliers.show.words import count, features, percent, times

# Subject: what the legend says, colour, hatch (which tells them apart in grey).
SUBJECTS = {
    "outliers": ("outlier features", "blue", ""),
    "control": ("random features (mean, 95 % interval)", "orange", "//"),
}
METRICS = {  # of a panel: what its axis says, and in which unit
    "top1_softmax": ("mean top-1 softmax probability", 1),
    "damage": ("increase of perplexity (%)", 100),
}
WIDTH = 0.38


@figure_function
def ablation_bars(
    measurements: pd.DataFrame, *, metric: str | None = None, ax: Axes | None = None
) -> Axes | np.ndarray:
    """Top-1 softmax probability and perplexity damage without the outliers and without random features, by method.

    Example:
        >>> panels = outliers.plot.ablation_bars(outliers.ablate(model, blocks, features=[3]))

    Args:
        measurements: as `outliers.ablate` returns them, or their `summary`, which has the intervals already.
        metric: the one panel to draw, "top1_softmax" or "damage"; by default both.
    """
    metrics = chosen("metric", metric, METRICS, ax)
    summary = _summed_up(measurements)
    methods = [method for method in summary["method"].unique() if method]
    panels = panels_of(ax, 1, len(metrics), (3.6 * len(metrics), 3.2))[0]
    as_it_is = summary.loc[summary["subject"] == "none"].iloc[0]
    for axes, metric in zip(panels, metrics, strict=True):
        label, unit = METRICS[metric]
        _bars(axes, summary, methods, metric, unit)
        line = {"color": "black", "linestyle": "--", "label": "unmodified model"}
        axes.axhline(unit * as_it_is[metric], **line)
        axes.set(xlabel="replacement of the features' values", ylabel=label)
        axes.set_xticks(range(len(methods)), methods)
    legend(ax, axes, panels[0].get_legend_handles_labels()[0], "upper center", 3 if len(metrics) > 1 else 1)
    return panels


def _summed_up(measurements: pd.DataFrame) -> pd.DataFrame:
    """The summary of measurements, of which each control draw is one."""
    from outliers.metrics.ablations import summary  # which imports torch

    return measurements if "damage_low" in measurements else summary(measurements)


def _bars(axes: Axes, summary: pd.DataFrame, methods: list[str], metric: str, unit: float) -> None:
    for side, (subject, (label, color, hatch)) in enumerate(SUBJECTS.items()):
        rows = summary[summary["subject"] == subject].set_index("method").loc[methods]
        places = [number + (side - 0.5) * WIDTH for number in range(len(methods))]
        values = rows[metric] * unit
        axes.bar(places, values, WIDTH, color=color_of(color), hatch=hatch, edgecolor="white", label=label)
        tops = values
        if subject == "control":
            low, tops = (rows[f"{metric}_{end}"] * unit for end in ("low", "high"))
            axes.errorbar(places, values, [values - low, tops - values], fmt="none", ecolor="black", capsize=3)
        for place, top, value in zip(places, tops.clip(lower=0), values, strict=True):
            axes.annotate(
                f"{value:.3g}", (place, top), (0, 4), textcoords="offset points", fontsize="small", ha="center"
            )
    axes.margins(y=0.12)


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
    return by_stack([row for row in rows if "subject" in row], "ablated", _of_stack)


def _of_stack(_stack: str, rows: list[dict]) -> Section:
    summary = ablation_summary(rows)
    table = Table.of("ablation", CAPTION, COLUMNS, summary, names=2)
    drawings = [Drawing.of("ablation", FIGURE, ablation_bars(summary))]
    title = f"Ablation of {subject_of(rows[0] | {'variant': rows[0].get('scheme', BASELINE)})}"
    return Section(title, rows, table.form("simple"), [table], drawings, findings=ablation_findings(summary))


def ablation_summary(rows: list[dict]) -> pd.DataFrame:
    """`outliers.metrics.ablations.summary` of rows."""
    from outliers.metrics.ablations import damages, summary

    measurements: dict[tuple, dict] = {}
    for row in rows:
        about = {name: row.get(name) for name in ("subject", "method", "draw")} | {"features": tuple(row["features"])}
        measurements.setdefault(tuple(about.values()), about)[row["metric"]] = row["value"]
    return summary(damages(list(measurements.values())), rows[0]["seed"])


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
