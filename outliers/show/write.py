"""Write what was measured into its folder: rows, tables, figures and the page."""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from outliers.files import write_whole
from outliers.show.page import page
from outliers.show.section import Section, drawn
from outliers.show.spreadsheet import to_csv

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
        write_whole(folder / f"{name}.csv", to_csv(frame))
    for name, text in section.files.items():
        write_whole(folder / name, text)
    for drawing in section.drawings:
        write_whole(folder / f"{drawing.name}.svg", drawing.svg)
        write_whole(folder / f"{drawing.name}.png", drawn(drawing.figure, "png"))


def _kinds(values: Iterable) -> set[tuple]:
    """The kinds of values in one column of Parquet, and of lists of them; a list of none is of any."""
    values = list(values)
    kinds = {(float if kind is int else kind,) for kind in set(map(type, values)) - {list}}
    lists = (value for value in values if isinstance(value, list) and value)
    return kinds | {(list, *sorted(_kinds(value), key=str)) for value in lists}


def _columns(rows: list[dict]) -> pd.DataFrame:
    """Rows as columns of one type each, as Parquet has them: where kinds are mixed, all are words."""
    frame = pd.DataFrame(rows)
    for column in frame.columns:
        if len(_kinds(frame[column].dropna())) > 1:
            frame[column] = frame[column].map(str, na_action="ignore")
    return frame
