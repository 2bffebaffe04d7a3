"""Write what a sweep measured into its folder."""

import io
from pathlib import Path

import pandas as pd

from outliers.experiment.rows import write_whole
from outliers.report.figures import perplexity_by_size
from outliers.report.table1 import published_form, table1, terminal


def write_sweep(rows: list[dict], folder: str | Path) -> str:
    """Write the rows as Parquet, Table 1 as Markdown, CSV and LaTeX, and the figure; return what to print."""
    folder, table, dtype = Path(folder), table1(rows), rows[0]["dtype"]
    figure = perplexity_by_size(rows)
    contents = {
        "rows.parquet": pd.DataFrame(rows).to_parquet(index=False),
        "table1.md": published_form(table, dtype, "github"),
        "table1.tex": published_form(table, dtype, "latex_booktabs"),
        "table1.csv": table.to_csv(float_format="%.6g"),
        "perplexity.png": _image(figure, "png"),
        "perplexity.svg": _image(figure, "svg"),
    }
    for name, content in contents.items():
        write_whole(folder / name, content)
    return f"\n{terminal(table)}\n\nRows, tables and figure: {folder}/"


def _image(figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=200)
    return buffer.getvalue()
