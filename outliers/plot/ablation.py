"""Loss of a model without features (section 4.2 of the paper), or without single weights, drawn."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from outliers.show.axes import cost_axis, name_places
from outliers.show.legends import legend
from outliers.show.style import chosen, color_of, figure_function, panels_of

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
# Treatment: what the legend says, colour, marker, and how far beside the middle of its candidate.
TREATMENTS = {
    "weight": ("the weight", "vermilion", "o", -0.35),
    "nearest": ("the weights nearest in magnitude", "grey", "x", -0.21),
    "random": ("random weights of equal magnitude", "grey", "x", -0.21),
    "largest": ("the largest weight of its matrix", "black", "^", -0.07),
    "neuron": ("its whole neuron", "blue", "s", 0.07),
    "row": ("its whole row", "green", "D", 0.21),
    "massive": ("massive activation at its mean", "orange", "*", 0.35),
}


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


@figure_function
def weight_costs(found: pd.DataFrame, *, ax: Axes | None = None) -> Axes:
    """Increase of perplexity with each candidate super weight set to zero, in per cent, beside its controls.

    Example:
        >>> axes = outliers.plot.weight_costs(outliers.super_weights(model, blocks, controls=2))

    Args:
        found: as `outliers.super_weights` returns it.
    """
    rows = controlled(found)
    names = list(dict.fromkeys(rows["candidate"]))
    ((axes,),) = panels_of(ax, 1, 1, (3.4 + 1.1 * len(names), 4.2))
    for treatment, (label, color, marker, beside) in TREATMENTS.items():
        treated = rows[rows["treatment"] == treatment]
        places = [names.index(name) + beside for name in treated["candidate"]]
        style = {"color": color_of(color), "marker": marker, "linestyle": "none", "label": label}
        if places:
            axes.plot(places, 100 * treated["cost"], **style)
    name_places(axes, [called(*place) for place in rows.groupby("candidate", sort=False)["layer"].first().items()])
    for between in range(1, len(names)):
        axes.axvline(between - 0.5, color="0.9", linewidth=0.6)
    cost_axis(axes, list(100 * rows["cost"]))
    legend(ax, axes, axes.get_legend_handles_labels()[0], "right upper")
    return axes


def controlled(costs: pd.DataFrame) -> pd.DataFrame:
    """The rows of candidates that are compared with controls, without what multiplies them."""
    compared = costs.loc[costs["treatment"] == "neuron", "candidate"]
    return costs[costs["candidate"].isin(compared) & costs["treatment"].isin(list(TREATMENTS))]


def called(candidate: str, layer: int) -> str:
    """A weight by its layer and its place: layer 11 [507, 1229]."""
    return f"layer {layer:.0f} {candidate[candidate.rindex('[') :].replace(',', ', ')}"
