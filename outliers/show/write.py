"""Write what was measured into its folder: rows, tables, figures and the page."""

from pathlib import Path

import pandas as pd

from outliers.files import write_whole
from outliers.show.page import page
from outliers.show.section import Section, drawn

FORMATS = {"md": "github", "tex": "latex_booktabs"}


def write(section: Section, folder: str | Path, command: str) -> str:
    """Write the files of one measurement and its page, `report.html`; return what to print.

    command: what a person types to repeat the run.
    """
    write_files(section, Path(folder))
    write_whole(Path(folder) / "report.html", page(section.title, [section], command))
    return f"\n{section.terminal}\n\nRows, tables, figures and page: {folder}/"


def write_files(section: Section, folder: Path) -> None:
    """Write rows as Parquet, tables as Markdown, LaTeX and CSV, figures as PNG and SVG, texts as they are."""
    write_whole(folder / "rows.parquet", _columns(section.rows).to_parquet(index=False))
    for table in section.tables:
        for ending, form in FORMATS.items():
            write_whole(folder / f"{table.name}.{ending}", table.form(form) + "\n")
    data = {table.name: table.data for table in section.tables} | section.further
    for name, frame in data.items():
        write_whole(folder / f"{name}.csv", frame.to_csv(index=False, float_format="%.6g"))
    for name, text in section.files.items():
        write_whole(folder / name, text)
    for drawing in section.drawings:
        write_whole(folder / f"{drawing.name}.svg", drawing.svg)
        write_whole(folder / f"{drawing.name}.png", drawn(drawing.figure, "png"))


def _kind(value) -> tuple:
    """The kind of values in one column of Parquet, or of lists of them."""
    if isinstance(value, list):
        return list, *sorted({_kind(entry) for entry in value}, key=str)
    return (float if isinstance(value, int) and not isinstance(value, bool) else type(value),)


def _columns(rows: list[dict]) -> pd.DataFrame:
    """Rows as columns of one type each, as Parquet has them: where kinds are mixed, all are words."""
    frame = pd.DataFrame(rows)
    for column in frame.columns:
        kinds = {_kind(value) for value in frame[column].dropna() if value != []}
        if len(kinds) > 1:
            frame[column] = frame[column].map(str, na_action="ignore")
    return frame
