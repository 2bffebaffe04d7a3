"""Write a measurement into its folder: rows, tables, figures and the page."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pandas as pd

from outliers.files import PAGE, write_whole
from outliers.show.page import page
from outliers.show.section import Section, figure_bytes
from outliers.show.spreadsheet import to_csv
from outliers.show.tables import Table

FORMATS = {"md": "github", "tex": "latex_booktabs"}


def write(section: Section, folder: str | Path, command: str) -> str:
    """Write the files of one measurement and its page, `report.html`; return the text to print.

    command: what a person types to repeat the run.
    """
    write_files(section, Path(folder))
    write_whole(Path(folder) / PAGE, page(section.title, [section], command))
    return f"\n{section.terminal}\n\nRows, tables, figures and page: {folder}/"


def files_of(section: Section) -> dict[str, Callable[[], str | bytes]]:
    """Return the files of a section by name, as functions that make their content.

    These are rows as Parquet, tables as Markdown, LaTeX and CSV, figures as PNG and SVG, and further texts.
    """
    files: dict[str, Callable] = {"rows.parquet": lambda: _columns(section.rows).to_parquet(index=False)}
    for table in section.tables:
        files |= {f"{table.name}.{ending}": partial(_text, table, form) for ending, form in FORMATS.items()}
    data = {table.name: table.data for table in section.tables} | section.further
    files |= {f"{name}.csv": partial(to_csv, frame) for name, frame in data.items()}
    files |= {name: partial(str, text) for name, text in section.files.items()}
    for drawing in section.drawings:
        files[f"{drawing.name}.svg"] = partial(getattr, drawing, "svg")
        files[f"{drawing.name}.png"] = partial(figure_bytes, drawing.figure, "png")
    return files


def write_files(section: Section, folder: Path) -> None:
    for name, content in files_of(section).items():
        write_whole(folder / name, content())


def _text(table: Table, form: str) -> str:
    return table.form(form) + "\n"


def _kinds(values: Iterable) -> set[tuple]:
    """Return the types of the values in a column: int counts as float, a list by its elements, an empty list not."""
    values = list(values)
    kinds = {(float if kind is int else kind,) for kind in set(map(type, values)) - {list}}
    lists = (value for value in values if isinstance(value, list) and value)
    return kinds | {(list, *sorted(_kinds(value), key=str)) for value in lists}


def _columns(rows: list[dict]) -> pd.DataFrame:
    """Make a frame whose columns have one type each, as Parquet requires; columns of mixed types become text."""
    frame = pd.DataFrame(rows)
    for column in frame.columns:
        if len(_kinds(frame[column].dropna())) > 1:
            frame[column] = frame[column].map(str, na_action="ignore")
    return frame
