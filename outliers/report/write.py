"""Write what a sweep measured into its folder."""

import io
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from outliers.files import write_whole
from outliers.report.figures import perplexity_by_size
from outliers.report.table1 import published_form, table1, terminal


def write_sweep(rows: list[dict], folder: str | Path) -> str:
    """Write the rows as Parquet, Table 1 as Markdown, CSV and LaTeX, and the figure; return what to print."""
    folder, table, dtype = Path(folder), table1(rows), rows[0]["dtype"]
    contents = {
        "rows.parquet": pd.DataFrame(rows).to_parquet(index=False),
        "table1.md": published_form(table, dtype, "github"),
        "table1.tex": published_form(table, dtype, "latex_booktabs"),
        "table1.csv": table.to_csv(float_format="%.6g"),
    }
    for name, content in contents.items():
        write_whole(folder / name, content)
    write_figure(perplexity_by_size(rows), folder / "perplexity")
    return f"\n{terminal(table)}\n\nRows, tables and figure: {folder}/"


def write_figure(figure: Figure, stem: Path) -> None:
    """Write a figure as `stem`.png and `stem`.svg."""
    for kind in ("png", "svg"):
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=200)
        write_whole(stem.with_suffix(f".{kind}"), buffer.getvalue())
