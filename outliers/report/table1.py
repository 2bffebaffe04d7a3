"""Table 1 of the paper from rows: schemes down, models across, perplexity in the cells."""

import pandas as pd
from tabulate import tabulate

from outliers.models.names import distinct_names
from outliers.quantization.schemes import BASELINE, SCHEMES
from outliers.report.paper import Key, key_of
from outliers.report.section import Drawing, Section, Table
from outliers.report.sweep_figures import costs, sweep_figure

LARGE = 1e7  # from here on powers of ten are written
ONCE = (
    "Compare within a column. Each was measured once: rounding alone scatters an 8-bit perplexity, by some hundredths "
    "of a per cent in pocket models and by about one per cent in real ones; --draws 4 measures how far."
)
DRAWN = (
    "Compare within a column. Mean ± standard deviation over {} draws of embeddings changed by 1e-6, which rounding "
    "alone causes: a difference below two standard deviations is none."
)


def sweep_section(rows: list[dict]) -> Section:
    """What a sweep shows."""
    table = table1(rows)
    draws = rows[0].get("draws", 1)
    note = DRAWN.format(draws) if draws > 1 else ONCE
    tables = [published_table(rows), *cost_table(rows)]
    caption = (
        "What each 8-bit scheme costs of perplexity, and what it cost the models of the paper (Table 1, grey). Hollow "
        "markers: outlier features in 16 bits. Bars: one standard deviation by rounding."
        if len(tables) > 1
        else "Perplexity by model size. Hollow markers: outlier features in 16 bits."
    )
    drawings = [Drawing("perplexity", caption, sweep_figure(rows))]
    printed = f"{terminal(table, scatter(rows))}\n\n{note}"
    return Section("Perplexity under 8-bit schemes", printed, tables, drawings, [note], {}, rows)


def measured(rows: list[dict]) -> dict[Key, float]:
    """Perplexities by the keys of the published ones."""
    return {(key_of(row["model"]), row["scheme"]): row["value"] for row in rows}


def table1(rows: list[dict], column: str = "value") -> pd.DataFrame:
    """Perplexity, or another column of the rows, by scheme (index, in the order of `SCHEMES`) and model (columns, in
    the order of the rows)."""
    frame = pd.DataFrame([row for row in rows if row["metric"] == "perplexity"])
    table = frame.reindex(columns=["scheme", "model", column]).pivot(index="scheme", columns="model", values=column)
    return table.loc[[name for name in SCHEMES if name in table.index], frame["model"].unique()]


def scatter(rows: list[dict]) -> pd.DataFrame:
    """The standard deviation of each perplexity over draws, in the shape of `table1`; empty where there was one."""
    return table1(rows, "standard_deviation").astype(float)


def terminal(table: pd.DataFrame, scatter: pd.DataFrame) -> str:
    """The table for a terminal: scheme names as a user types them, model names broken at their hyphens."""
    headers = ["perplexity", *(name.replace("-", "\n") for name in _names(table))]
    cells = [[scheme, *_cells(table.loc[scheme], scatter.loc[scheme])] for scheme in table.index]
    align = ["left"] + ["right"] * len(table.columns)
    return tabulate(cells, headers, tablefmt="simple", disable_numparse=True, colalign=align)


def published_table(rows: list[dict]) -> Table:
    """The table with the paper's own row labels."""
    table, deviations = table1(rows), scatter(rows)
    headers = ["Perplexity", *_names(table)]
    cells = [
        [_label(scheme, rows[0]["dtype"]), *_cells(table.loc[scheme], deviations.loc[scheme])] for scheme in table.index
    ]
    return Table("table1", "Perplexity by scheme and model.", headers, cells, table.reset_index())


def cost_table(rows: list[dict]) -> list[Table]:
    """What each scheme adds to the perplexity of a model, in per cent; none where fp32 was not measured."""
    found = costs(rows)
    if not found:
        return []
    table, deviations = table1(found), scatter(found)
    headers = ["Increase (%)", *_names(table)]
    cells = [
        [_label(scheme, rows[0]["dtype"]), *_cells(table.loc[scheme], deviations.loc[scheme], "+.2f")]
        for scheme in table.index
    ]
    caption = f"What each scheme adds to the perplexity under {BASELINE}, in per cent."
    return [Table("table1_increase", caption, headers, cells, table.reset_index())]


def _names(table: pd.DataFrame) -> list[str]:
    return list(distinct_names((model, None) for model in table.columns).values())


def _label(scheme: str, dtype: str) -> str:
    if scheme == BASELINE and dtype != "float32":
        return f"{dtype}, not quantized"
    return SCHEMES[scheme].label


def _cells(values: pd.Series, deviations: pd.Series, form: str = ".2f") -> list[str]:
    """What is missing is a dash, never a number; those of broken models are short."""
    return [
        "-" if pd.isna(value) else _cell(value, form) + ("" if pd.isna(deviation) else f"±{_cell(deviation, '.2f')}")
        for value, deviation in zip(values, deviations, strict=True)
    ]


def _cell(value: float, form: str) -> str:
    return f"{value:{form}}" if abs(value) < LARGE else f"{value:{form.replace('f', 'e')}}"
