"""Table 1 of the paper from rows: schemes down, models across, perplexity in the cells."""

import pandas as pd
from tabulate import tabulate

from outliers.experiment.spec import short_name
from outliers.quantization.schemes import SCHEMES
from outliers.report.paper import Key, key_of
from outliers.report.section import Drawing, Section, Table
from outliers.report.sweep_figures import perplexity_by_size


def sweep_section(rows: list[dict]) -> Section:
    """What a sweep shows."""
    table = table1(rows)
    notes = [
        "Compare within a column. Rounding alone scatters an 8-bit perplexity by 0.004 to 0.03 % at the size of the "
        "pocket models; smaller differences mean nothing."
    ]
    caption = "Perplexity, and what each 8-bit scheme adds to it. Hollow markers: outlier features in 16 bits."
    drawings = [Drawing("perplexity", caption, perplexity_by_size(rows))]
    return Section(
        "Perplexity under 8-bit schemes", terminal(table), [published_table(rows)], drawings, notes, {}, rows
    )


def measured(rows: list[dict]) -> dict[Key, float]:
    """Perplexities by the keys of the published ones."""
    return {(key_of(row["model"]), row["scheme"]): row["value"] for row in rows}


def table1(rows: list[dict]) -> pd.DataFrame:
    """Perplexity by scheme (index, in the order of `SCHEMES`) and model (columns, in the order of the rows)."""
    frame = pd.DataFrame([row for row in rows if row["metric"] == "perplexity"])
    table = frame.pivot(index="scheme", columns="model", values="value")
    return table.loc[[name for name in SCHEMES if name in table.index], frame["model"].unique()]


def terminal(table: pd.DataFrame) -> str:
    """The table for a terminal: scheme names as a user types them, model names broken at their hyphens."""
    headers = ["perplexity", *(short_name(model).replace("-", "\n") for model in table.columns)]
    cells = [[scheme, *_cells(row)] for scheme, row in table.iterrows()]
    align = ["left"] + ["right"] * len(table.columns)
    return tabulate(cells, headers, tablefmt="simple", disable_numparse=True, colalign=align)


def published_table(rows: list[dict]) -> Table:
    """The table with the paper's own row labels."""
    table = table1(rows)
    headers = ["Perplexity", *map(short_name, table.columns)]
    cells = [[_label(scheme, rows[0]["dtype"]), *_cells(row)] for scheme, row in table.iterrows()]
    return Table("table1", "Perplexity by scheme and model.", headers, cells, table.reset_index())


def _label(scheme: str, dtype: str) -> str:
    if scheme == "fp32" and dtype != "float32":
        return f"{dtype}, not quantized"
    return SCHEMES[scheme].label


def _cells(row: pd.Series) -> list[str]:
    """What is missing is a dash, never a number."""
    return ["-" if pd.isna(value) else f"{value:.2f}" for value in row]
