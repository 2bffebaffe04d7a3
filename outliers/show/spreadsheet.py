"""CSV files whose cells no spreadsheet takes for formulas: names of models and texts of tokens come from strangers.

A cell that begins like a formula, or would begin so where a spreadsheet splits it, gets an apostrophe in front, and one
more if it already has some, so that it can be read back.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from pandas.api.types import is_numeric_dtype

FORMULA = r"'*[=+\-@\uff1d\uff0b\uff0d\uff20]"  # full-width forms too
START = r"(^|[;\t\r\n])"  # of a cell: some spreadsheets split at semicolons and tabs in any file
ESCAPE, UNESCAPE = re.compile(f"{START}({FORMULA})"), re.compile(f"{START}'({FORMULA})")


class _Lines(list):
    r"""The lines of a CSV file, ending in "\n"; pandas writes "\r\n", so that it quotes cells with either line end."""

    def write(self, line: str) -> None:
        self.append(line.removesuffix("\r\n") + "\n")


def to_csv(frame: pd.DataFrame) -> str:
    """Return a frame as the text of a CSV file, with numbers in six digits and cells escaped."""
    lines = _Lines()
    _changed(frame, escaped).to_csv(lines, index=False, float_format="%.6g", lineterminator="\r\n")
    return "".join(lines)


def read_csv(file: Path) -> pd.DataFrame:
    """Read a file of `to_csv`; an empty cell becomes NaN, and no other text does."""
    return _changed(pd.read_csv(file, keep_default_na=False, na_values=[""]), _unescaped)


def escaped(text: str) -> str:
    """Escape a text that a spreadsheet could take for a formula; leave numbers unchanged."""
    return text if _is_number(text) else ESCAPE.sub(r"\1'\2", text)


def _unescaped(text: str) -> str:
    return UNESCAPE.sub(r"\1\2", text)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _changed(frame: pd.DataFrame, change: Callable[[str], str]) -> pd.DataFrame:
    """Apply a change to the headers, texts, lists and dictionaries of a frame."""

    def cell(value: object) -> object:
        return change(str(value)) if isinstance(value, (str, list, tuple, dict)) else value

    cells = frame.apply(lambda column: column if is_numeric_dtype(column) else column.map(cell))
    return cells.set_axis([cell(header) for header in frame.columns], axis="columns")
