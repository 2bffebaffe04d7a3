"""What an ablation shows, drawn: section 4.2 of the paper."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outliers.plot.style import BLUE, ORANGE, bare

# Subject: what the legend says, colour, hatch (which tells them apart in grey).
SUBJECTS = {
    "outliers": ("outlier features", BLUE, ""),
    "control": ("random features (mean, 95 % interval)", ORANGE, "//"),
}
WIDTH = 0.38


def ablation_bars(summary: pd.DataFrame) -> Figure:
    """Top-1 softmax probability and perplexity damage without the outliers and without random features, by method."""
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    top1, damage = figure.subplots(1, 2)
    methods = [method for method in summary["method"].unique() if method]
    as_it_is = summary.loc[summary["subject"] == "none", "top1_softmax"].item()
    _bars(top1, summary, methods, "top1_softmax", 1)
    top1.axhline(as_it_is, color="black", linestyle="--", linewidth=1, label="model as it is")
    top1.set_ylabel("mean top-1 softmax probability")
    _bars(damage, summary, methods, "damage", 100)
    damage.axhline(0, color="black", linewidth=0.6)
    damage.set_ylabel("increase of perplexity (%)")
    for axes in (top1, damage):
        axes.set_xticks(range(len(methods)), methods)
        axes.set_xlabel("what replaces the features' values")
    bare(top1, damage)
    figure.legend(*top1.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    return figure


def _bars(axes: Axes, summary: pd.DataFrame, methods: list[str], metric: str, unit: float) -> None:
    for side, (subject, (label, color, hatch)) in enumerate(SUBJECTS.items()):
        rows = summary[summary["subject"] == subject].set_index("method").loc[methods]
        places = [number + (side - 0.5) * WIDTH for number in range(len(methods))]
        values = rows[metric] * unit
        style = {"color": color, "hatch": hatch, "edgecolor": "white", "label": label}
        axes.bar(places, values, WIDTH, **style)
        tops = values
        if subject == "control":
            low, tops = (rows[f"{metric}_{end}"] * unit for end in ("low", "high"))
            axes.errorbar(places, values, [values - low, tops - values], fmt="none", ecolor="black", capsize=3, lw=1)
        for place, top, value in zip(places, tops.clip(lower=0), values, strict=True):
            axes.annotate(f"{value:.3g}", (place, top), (0, 4), textcoords="offset points", fontsize=7, ha="center")
    axes.margins(y=0.12)
