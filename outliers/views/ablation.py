"""Ablation: the loss of a model without its outlier features (section 4.2 of the paper)."""

import math
from collections import defaultdict
from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes

from outliers.quantization.schemes import BASELINE
from outliers.show.claims import NEXT, Claim, say
from outliers.show.legends import legend
from outliers.show.section import NO_CONTEXT, Context, Drawing, Finding, Section, by_stack, subject_of, values_section
from outliers.show.style import Panels, chosen, color_of, figure_function, panels_of
from outliers.show.tables import MISSING, OVER_TEXT, Table, cell, with_interval
from outliers.show.value import DEVIATIONS, Value, averaged, value_of
from outliers.show.words import count, features
from outliers.views.experts import drops_section

# Subject: label in the legend, colour, hatch (which distinguishes them in grey).
SUBJECTS = {
    "outliers": ("outlier features", "blue", ""),
    "control": ("random features (mean, 95 % interval)", "orange", "//"),
}
METRICS = {  # panel: label of its axis, factor to its unit
    "top1_softmax": ("mean top-1 softmax probability", 1),
    "damage": ("increase of perplexity (%)", 100),
}
WIDTH = 0.38


@figure_function
def ablation_bars(measurements: pd.DataFrame, *, metric: str | None = None, ax: Axes | None = None) -> Panels:
    """Draw top-1 softmax probability and increase of perplexity without outlier or random features, by method.

    Example:
        >>> panels = outliers.plot.ablation_bars(outliers.ablate(model, blocks, features=[3]))

    Args:
        measurements: as `outliers.ablate` returns them, or their `summary`, which already has the intervals.
        metric: the one panel to draw, "top1_softmax", of a model with attention, or "damage"; by default both.
    """
    summary = _summed_up(measurements)
    metrics = chosen("metric", metric, [name for name in METRICS if name in summary], ax)
    methods = [method for method in summary["method"].unique() if method]
    panels = panels_of(ax, 1, len(metrics), (3.6 * len(metrics), 3.2))[0]
    unmodified = summary.loc[summary["subject"] == "none"].iloc[0]
    for axes, metric in zip(panels, metrics, strict=True):
        label, unit = METRICS[metric]
        _bars(axes, summary, methods, metric, unit)
        line = {"color": "black", "linestyle": "--", "label": "unmodified model"}
        axes.axhline(unit * unmodified[metric], **line)
        axes.set(xlabel="replacement of the features' values", ylabel=label)
        axes.set_xticks(range(len(methods)), methods)
    legend(ax, axes, panels[0].get_legend_handles_labels()[0], "upper center", 3 if len(metrics) > 1 else 1)
    return panels


def _summed_up(measurements: pd.DataFrame) -> pd.DataFrame:
    """Return the summary of measurements, in which the control draws are averaged; a summary is returned unchanged."""
    from outliers.metrics.ablations import summary  # imports torch

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
        elif (errors := rows.get(f"{metric}_error")) is not None and errors.notna().all():
            tops = values + errors * unit
            axes.errorbar(places, values, errors * unit, fmt="none", ecolor="black", capsize=3)
        for place, top, value in zip(places, tops.clip(lower=0), values, strict=True):
            text = f"{value:.3g}".replace("-", "−")
            axes.annotate(text, (place, top), (0, 4), textcoords="offset points", fontsize="small", ha="center")
    axes.margins(y=0.12)


CAPTION = (
    "Removal of features: mean top-1 softmax probability of the attention, perplexity, and its increase. Brackets: "
    "95 % interval of the mean over draws of random features{}."
)
OF_INTERVALS = f" and over the text; {OVER_TEXT}, or without a removal of the value itself"
FIGURE = "Attention and perplexity of the model without its outlier features, and without random features."
REMOVED = {  # subject of a row: what is removed
    "none": "nothing",
    "outliers": "outliers {numbers}",
    "control": "random features, {draws:.0f} draws",
    "single": "feature {numbers}",
}


def ablation_section(rows: list[dict], context: Context = NO_CONTEXT) -> Section:
    """Show an ablation of features as a table and bars, one section per stack; or the loss without each expert.

    Every removal is compared with the unmodified model and with random draws: if one of them has no comparable number,
    list values.
    """
    if len(rows) < len(context.rows):
        return values_section([*context.rows])
    if any(row.get("subject") == "expert" for row in rows):
        return drops_section(rows)
    return by_stack([row for row in rows if "subject" in row], "ablated", _of_stack)


def _of_stack(_stack: str, rows: list[dict]) -> Section:
    summary = ablation_summary(rows)
    values = [f"{metric}_value" for metric in METRICS]
    data = summary.drop(columns=values, errors="ignore").dropna(axis="columns", how="all")
    caption = CAPTION.format(OF_INTERVALS if "damage_error" in data else "")
    table = Table.of("ablation", caption, COLUMNS, data, texts=2)
    drawings = [Drawing.of("ablation", FIGURE, ablation_bars(summary))]
    title = f"Ablation of {subject_of(rows[0] | {'variant': rows[0].get('scheme', BASELINE)})}"
    return Section(title, rows, [table], drawings, findings=ablation_findings(summary))


def ablation_summary(rows: list[dict]) -> pd.DataFrame:
    """Return `outliers.metrics.ablations.summary` of rows, with the scatter over the text.

    Columns METRIC_error hold the paired standard errors of differences from the unmodified model; the intervals of
    controls include them. Columns METRIC_value hold these differences as `Value`.
    """
    from outliers.metrics.ablations import summary, with_damage

    measurements: dict[tuple, dict] = {}
    values: dict[tuple, dict[str, list[Value]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        about = {name: row.get(name) for name in ("subject", "method", "draw")} | {"features": tuple(row["features"])}
        measurements.setdefault(tuple(about.values()), about)[row["metric"]] = row["value"]
        values[_arm_of(about)][row["metric"]].append(value_of(row)._replace(deviation=0.0))
    condensed = summary(with_damage(list(measurements.values())), rows[0]["seed"])
    unmodified = {metric: value for metric, (value,) in values["none", None, ()].items()}
    records = [_over_text(row, values[_arm_of(row)], unmodified) for row in condensed.to_dict("records")]
    return pd.DataFrame(records)


def _arm_of(row: dict) -> tuple:
    """Return what tells the arms of an ablation apart; all draws of controls are one."""
    return row["subject"], row["method"] or None, tuple(row["features"]) if row["subject"] == "single" else ()


def _over_text(row: dict, values: Mapping[str, list[Value]], unmodified: Mapping[str, Value]) -> dict:
    changes = {
        "top1_softmax": [value.minus(unmodified["top1_softmax"]) for value in values.get("top1_softmax", ())],
        "damage": [value.increase_over(unmodified["perplexity"]) for value in values["perplexity"]],
    }
    of_perplexity = [value.minus(unmodified["perplexity"]) for value in values["perplexity"]]
    row["perplexity_error"] = averaged(of_perplexity if row["subject"] != "none" else values["perplexity"]).error
    for metric, of_draws in changes.items():
        if not of_draws:
            continue
        change = averaged(of_draws, _deviation(row, metric))
        row |= {f"{metric}_value": change, f"{metric}_error": change.error}
        if row["subject"] == "control" and change.error is not None:
            low, high = (abs(row[f"{metric}_{end}"] - row[metric]) for end in ("low", "high"))
            row[f"{metric}_low"] = row[metric] - math.hypot(low, DEVIATIONS * change.error)
            row[f"{metric}_high"] = row[metric] + math.hypot(high, DEVIATIONS * change.error)
    return row


def _percent(row: dict, metric: str) -> str:
    if row["subject"] != "control":
        return cell(".2f", row[metric], row.get(f"{metric}_error"), 100)
    ends = [row[f"{metric}_{end}"] for end in ("low", "high")]
    return with_interval(lambda share: f"{100 * share:.2f}", row[metric], *ends)


COLUMNS = (
    ("removed", lambda row: REMOVED[row["subject"]].format(numbers=", ".join(map(str, row["features"])), **row)),
    ("method", lambda row: row["method"] or MISSING),
    ("top-1 softmax (%)", lambda row: _percent(row, "top1_softmax") if "top1_softmax" in row else MISSING),
    ("perplexity", lambda row: cell(".2f", row["perplexity"], row.get("perplexity_error"))),
    ("increase (%)", lambda row: MISSING if row["subject"] == "none" else _percent(row, "damage")),
)
TAKEN_OUT = {
    "zero": "Setting {} to zero",
    "mean": "Setting {} to the mean",
    "shuffle": "Shuffling {} over positions",
}
APART = Claim(
    "ablation",
    yes="{removal} multiplies the perplexity by {times[0]:times}; doing so with {random}, by {times[1]:times} "
    "[{times[2]:times}, {times[3]:times}].",
    no="{removal} has no measurably different effect on the perplexity than doing so with {random}: {damage:percent} "
    "and {control[damage]:percent}.",
)
ATTENTION = Claim(
    "ablation",
    "Without {features:features} the mean top-1 softmax probability of the attention {moved} from {before:.1f} to "
    "{top1_softmax:.1%}; without {random} it is {control[top1_softmax]:.1%}.",
)
SINGLE = Claim(
    "ablation",
    by="alone",
    against=[NEXT],
    yes="Of single features, feature {features[0]} raises the perplexity most when removed: {damage:percent}; the next "
    "is feature {next[features][0]} with {next[damage]:percent}.",
)


def ablation_findings(summary: pd.DataFrame) -> list[Finding]:
    """State three findings of an ablation, as far as they exceed scatter.

    They are the increase of perplexity by each method, beside that without random features; the top-1 softmax
    probability without the features, if random features have a different effect; and the single feature whose removal
    costs most.

    summary: as `ablation_summary` or `outliers.metrics.ablations.summary` returns it.
    """
    rows = summary.to_dict("records")
    controls = {row["method"]: row for row in rows if row["subject"] == "control"}
    removed = [_removal_fields(row, controls[row["method"]]) for row in rows if row["subject"] == "outliers"]
    findings = [finding for row in removed for finding in say(APART, [row], row["apart"])]
    for row in removed[:1]:
        name, control = "top1_softmax", row["control"]
        if name in row:
            before = next(100 * row[name] for row in rows if row["subject"] == "none")
            moved = "falls" if 100 * row[name] < before else "rises"
            within = control[f"{name}_low"] <= row[name] <= control[f"{name}_high"]
            if f"{name}_value" in row:
                within |= not row[f"{name}_value"].is_apart(control[f"{name}_value"])
            findings += say(ATTENTION, [] if within else [row], before=before, moved=moved)
        singles = [single for single in rows if single["subject"] == "single" and single["method"] == row["method"]]
        scatter = _change(control).deviation
        alone = [single | {"alone": _change(single)._replace(deviation=scatter)} for single in singles]
        findings += say(SINGLE, alone if len(alone) > 1 else [])
    return findings


def _removal_fields(row: dict, control: dict) -> dict:
    """Return a removal with its control and their words, as fields of claims."""
    number = len(row["features"])
    damages = row["damage"], *(control[f"damage{end}"] for end in ("", "_low", "_high"))
    removal = TAKEN_OUT.get(row["method"], f"Removing {{}} by {row['method']}").format(features(row["features"]))
    return row | {
        "damage": _change(row),
        "control": control,
        "removal": removal,
        "random": "a random feature" if number == 1 else f"{count(number)} random features",
        "apart": _change(row).is_apart(_change(control)),
        "times": [1 + damage for damage in damages],
    }


def _change(row: dict) -> Value:
    """Return the increase of perplexity in a row of a summary; one made in Python has no scatter over the text."""
    return row["damage_value"] if "damage_value" in row else Value(row["damage"], _deviation(row, "damage"))


def _deviation(row: dict, metric: str) -> float:
    """Return the standard deviation of a metric over draws of random features, and rounding; 0 for named features.

    The 95 % interval of the mean of n draws is about four standard deviations wide, divided by √n.
    """
    if row["subject"] != "control":
        return 0.0
    return math.sqrt(row["draws"]) * (row[f"{metric}_high"] - row[f"{metric}_low"]) / 4
