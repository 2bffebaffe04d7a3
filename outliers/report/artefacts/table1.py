"""Table 1 of the paper: schemes down, models across, perplexity in the cells; and the figure of what schemes cost."""

from collections.abc import Iterable

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator
from tabulate import tabulate

from outliers.models.names import distinct_names
from outliers.quantization.schemes import BASELINE, label_of
from outliers.report.paper import Artefact, Key, Published, grid, key_of
from outliers.report.section import Drawing, Section, Table, scatter_note
from outliers.report.style import GREY, bare, in_order, parameters_axis, scheme_styles
from outliers.specification.kinds import Experiment

FAIRSEQ = [f"fairseq-dense-{size}" for size in ("125m", "1.3b", "2.7b", "6.7b", "13b")]
PRINTED = {  # of these models, as the paper prints it
    "fp32": (25.65, 15.91, 14.43, 13.30, 12.45),
    "absmax": (87.76, 16.55, 15.11, 14.59, 19.08),
    "zeropoint": (56.66, 16.24, 14.76, 13.49, 13.94),
    "absmax-row": (30.93, 17.08, 15.24, 14.13, 16.49),
    "absmax-vector": (35.84, 16.82, 14.98, 14.13, 16.48),
    "zeropoint-vector": (25.72, 15.94, 14.36, 13.38, 13.47),
    "absmax-row-decomp": (30.76, 16.19, 14.65, 13.25, 12.46),
    "llm.int8": (25.83, 15.93, 14.44, 13.24, 12.45),
    "llm.int8-zeropoint": (25.69, 15.92, 14.43, 13.24, 12.45),
}
PUBLISHED = Published(
    "LLM.int8(), Table 1",
    ("model", "scheme"),
    grid(dict(zip(FAIRSEQ, zip(*PRINTED.values(), strict=True), strict=True)), PRINTED),
    "{:.2f}",
)
LARGE = 1e7  # from here on powers of ten are written
LINEAR = 0.1  # per cent: within it the scale of costs is linear, beyond it logarithmic
TICKS = (0.1, 1, 10, 100, 1000, 10_000)


def sweep_section(rows: list[dict]) -> Section:
    """What a sweep shows."""
    draws = rows[0].get("draws", 1)
    note = f"Compare within a column. {scatter_note(draws)}"
    tables = [perplexity_table(rows), *cost_table(rows)]
    caption = (
        "What each 8-bit scheme costs of perplexity, and what it cost the models of the paper (Table 1, grey). Hollow "
        "markers: outlier features in 16 bits. Bars: one standard deviation by rounding."
        if len(tables) > 1
        else "Perplexity by model size. Hollow markers: outlier features in 16 bits."
    )
    drawings = [Drawing("perplexity", caption, sweep_figure(rows))]
    printed = f"{terminal(table1(rows), scatter(rows))}\n\n{note}"
    return Section("Perplexity under 8-bit schemes", rows, printed, tables, drawings, [note])


def measured(rows: list[dict]) -> dict[Key, float]:
    """Perplexities by the keys of the published ones."""
    return {(key_of(row["model"]), row["scheme"]): row["value"] for row in rows}


def table1(rows: list[dict], column: str = "value") -> pd.DataFrame:
    """Perplexity, or another column of the rows, by scheme (index; those that come along in the order of `SCHEMES`,
    then others) and model (columns, in the order of the rows)."""
    frame = pd.DataFrame([row for row in rows if row["metric"] == "perplexity"])
    table = frame.reindex(columns=["scheme", "model", column]).pivot(index="scheme", columns="model", values=column)
    return table.loc[in_order(frame["scheme"]), frame["model"].unique()]


def scatter(rows: list[dict]) -> pd.DataFrame:
    """The standard deviation of each perplexity over draws, in the shape of `table1`; empty where there was one."""
    return table1(rows, "standard_deviation").astype(float)


def terminal(table: pd.DataFrame, scatter: pd.DataFrame) -> str:
    """The table for a terminal: scheme names as a user types them, model names broken at their hyphens."""
    headers = ["perplexity", *(name.replace("-", "\n") for name in _names(table.columns))]
    cells = [[scheme, *_cells(table.loc[scheme], scatter.loc[scheme])] for scheme in table.index]
    align = ["left"] + ["right"] * len(table.columns)
    return tabulate(cells, headers, tablefmt="simple", disable_numparse=True, colalign=align)


def perplexity_table(rows: list[dict]) -> Table:
    """The table with the paper's own row labels."""
    return _with_labels("table1", "Perplexity by scheme and model.", "Perplexity", rows, ".2f")


def cost_table(rows: list[dict]) -> list[Table]:
    """What each scheme adds to the perplexity of a model, in per cent; none where fp32 was not measured."""
    found = costs(rows)
    if not found:
        return []
    dtype = rows[0]["dtype"]
    baseline = BASELINE if dtype == "float32" else f"{dtype} without quantization"
    caption = f"What each scheme adds to the perplexity under {baseline}, in per cent."
    return [_with_labels("table1_increase", caption, "Increase (%)", found, "+.2f")]


def costs(rows: list[dict]) -> list[dict]:
    """What a scheme adds to the perplexity of its model, in per cent, in the place of each row's value; and its
    standard deviation. Of models whose perplexity without quantization is there."""
    baseline = {row["model"]: row["value"] for row in rows if row["scheme"] == BASELINE}
    found = []
    for row in rows:
        if row["model"] in baseline and row["scheme"] != BASELINE:
            cost = {"value": 100 * (row["value"] / baseline[row["model"]] - 1)}
            if "standard_deviation" in row:
                cost["standard_deviation"] = 100 * row["standard_deviation"] / baseline[row["model"]]
            found.append(row | cost)
    return found


def _with_labels(name: str, caption: str, heading: str, rows: list[dict], form: str) -> Table:
    table, deviations = table1(rows), scatter(rows)
    cells = [
        [_label(scheme, rows[0]["dtype"]), *_cells(table.loc[scheme], deviations.loc[scheme], form)]
        for scheme in table.index
    ]
    return Table(name, caption, [heading, *_names(table.columns)], cells, table.reset_index())


def _names(models: Iterable[str]) -> list[str]:
    return list(distinct_names((model, None) for model in models).values())


def _label(scheme: str, dtype: str) -> str:
    """The paper's, or ours; of a scheme of somebody else its name."""
    if scheme == BASELINE and dtype != "float32":
        return f"{dtype}, not quantized"
    return label_of(scheme)


def _cells(values: pd.Series, deviations: pd.Series, form: str = ".2f") -> list[str]:
    """What is missing is a dash, never a number; those of broken models are short."""
    return [
        "-" if pd.isna(value) else _cell(value, form) + ("" if pd.isna(deviation) else f"±{_cell(deviation, '.2f')}")
        for value, deviation in zip(values, deviations, strict=True)
    ]


def _cell(value: float, form: str) -> str:
    return f"{value:{form}}" if abs(value) < LARGE else f"{value:{form.replace('f', 'e')}}"


def sweep_figure(rows: list[dict]) -> Figure:
    """What each scheme adds to the perplexity of each model, beside the models of the paper; where nothing was measured
    without quantization, perplexity against parameters."""
    found = costs(rows)
    figure = Figure(figsize=(9, 4.2) if found else (5, 3.4), layout="constrained")
    axes = figure.subplots()
    styles = scheme_styles(found or rows)
    if found:
        _plot_costs(axes, found, styles)
    else:
        _plot_against_size(axes, rows, styles)
    bare(axes)
    handles = dict(zip(*axes.get_legend_handles_labels()[::-1], strict=True))
    shown = [handles[scheme] for scheme in styles]
    figure.legend(shown, list(styles), loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _plot_against_size(axes: Axes, rows: list[dict], styles: dict[str, dict]) -> None:
    """Models of one architecture are joined by a line."""
    order = list(styles)
    for place, architecture in sorted({(order.index(row["scheme"]), row["architecture"]) for row in rows}):
        group = [row for row in rows if (row["scheme"], row["architecture"]) == (order[place], architecture)]
        points = sorted((row["parameters"], row["value"]) for row in group)
        axes.plot(*zip(*points, strict=True), **styles[order[place]])
    parameters_axis(axes)
    axes.set_ylabel("perplexity")


def _plot_costs(axes: Axes, rows: list[dict], styles: dict[str, dict]) -> None:
    """Points of one model side by side; models from small to large, then those of the paper in grey."""
    of_paper = [{"model": key[0], "scheme": key[1], "value": value} for key, value in PUBLISHED.values.items()]
    published = costs(of_paper)
    ours = [model for _, model in sorted({(row["parameters"], row["model"]) for row in rows})]
    for models, first, points in ((ours, 0, rows), (FAIRSEQ, len(ours), published)):
        for place, (scheme, style) in enumerate(styles.items()):
            offset = first + 0.7 * ((place + 0.5) / len(styles) - 0.5)
            of_scheme = [row for row in points if row["scheme"] == scheme]
            grey = {} if models is ours else {"color": GREY, "label": None}
            axes.errorbar(
                [models.index(row["model"]) + offset for row in of_scheme],
                [row["value"] for row in of_scheme],
                [row.get("standard_deviation", 0) for row in of_scheme],
                **{**style, "linestyle": "none", **grey},
            )
    axes.axhline(0, color="black", linewidth=0.6)
    for boundary in range(1, len(ours) + len(FAIRSEQ)):
        edge = {"color": "0.4", "linewidth": 1} if boundary == len(ours) else {"color": "0.85", "linewidth": 0.6}
        axes.axvline(boundary - 0.5, **edge)
    names = [*_names(ours), *(name.replace("fairseq-dense-", "paper, ") for name in FAIRSEQ)]
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axes.set_xlim(-0.5, len(names) - 0.5)
    cost_axis(axes, [row["value"] for row in (*rows, *published)])
    axes.set_ylabel(f"increase of perplexity (%), linear within ±{LINEAR:g}")


def cost_axis(axes: Axes, values: list[float]) -> None:
    """A scale on which a tenth of a per cent and a hundred can both be read."""
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.7)
    ticks = [sign * tick for tick in TICKS for sign in (-1, 1) if tick <= 10 * max(sign * value for value in values)]
    ticks = sorted([0, *ticks])
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(ticks, [f"{tick:+g}".replace("-", "−") if tick else "0" for tick in ticks])
    axes.set_ylim(2 * min(*values, -LINEAR), 2 * max(*values, LINEAR))
    axes.grid(axis="y", color="0.93", linewidth=0.6)
    axes.set_axisbelow(True)


ARTEFACTS = {"table1": Artefact("Table 1", Experiment, sweep_section, PUBLISHED, measured)}
