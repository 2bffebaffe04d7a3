"""What an ablation shows: section 4.2 of the paper."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outliers.models.names import short_name
from outliers.quantization.schemes import BASELINE
from outliers.report.section import Drawing, Section, Table
from outliers.report.style import BLUE, ORANGE, bare

# Subject: what the legend says, colour, hatch (which tells them apart in grey).
SUBJECTS = {
    "outliers": ("outlier features", BLUE, ""),
    "control": ("random features (mean, 95 % interval)", ORANGE, "//"),
}
WIDTH = 0.38
HEADERS = ["without", "method", "top-1 softmax (%)", "perplexity", "damage (%)"]


def ablation_section(rows: list[dict]) -> Section:
    """The summary of an ablation as a table and as bars."""
    found = ablation_summary(rows)
    table = ablation_table(found)
    drawings = [Drawing("ablation", "What the model loses without features.", ablation_bars(found))]
    scheme = rows[0].get("scheme", BASELINE)
    title = f"Ablation of {short_name(rows[0]['model'])}{'' if scheme == BASELINE else f' under {scheme}'}"
    return Section(title, rows, table.form("simple"), [table], drawings)


def ablation_summary(rows: list[dict]) -> pd.DataFrame:
    """`outliers.measurements.ablation.summary` of rows."""
    from outliers.measurements.ablation import damages, summary

    cells: dict[tuple, dict] = {}
    for row in rows:
        cell = {name: row.get(name) for name in ("subject", "method", "draw")} | {"features": tuple(row["features"])}
        cells.setdefault(tuple(cell.values()), cell)[row["metric"]] = row["value"]
    return summary(damages(list(cells.values())), rows[0]["seed"])


def ablation_table(found: pd.DataFrame) -> Table:
    """The summary as people read it; random features with the 95 % interval of their mean."""
    cells = [
        [
            _what(row),
            row["method"] or "-",
            _with_interval(row, "top1_softmax", 100),
            f"{row['perplexity']:.2f}",
            "-" if row["subject"] == "none" else _with_interval(row, "damage", 100),
        ]
        for row in found.to_dict("records")
    ]
    caption = "Features taken out: mean top-1 softmax probability of the attention, perplexity, and its increase."
    return Table("ablation", caption, HEADERS, cells, found, names=2)


def _what(row: dict) -> str:
    numbers = ", ".join(map(str, row["features"]))
    names = {
        "none": "nothing",
        "outliers": f"outliers {numbers}",
        "control": f"random features, {row['draws']:.0f} draws",
        "single": f"feature {numbers}",
    }
    return names[row["subject"]]


def _with_interval(row: dict, metric: str, unit: float) -> str:
    value = f"{row[metric] * unit:.2f}"
    if row["subject"] != "control":
        return value
    return f"{value} [{row[f'{metric}_low'] * unit:.2f}, {row[f'{metric}_high'] * unit:.2f}]"


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
