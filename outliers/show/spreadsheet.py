"""Frames as CSV, which no spreadsheet takes for formulas: names of models and texts of tokens come from strangers.

A cell that begins as a formula does, or would where a spreadsheet divides it, has an apostrophe before that, and one
more where it has some already, so that it can be read back.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
from pandas.api.types import is_numeric_dtype

FORMULA = r"'*[=+\-@\uff1d\uff0b\uff0d\uff20]"  # also as wide as a Chinese character
START = r"(^|[;\t\r\n])"  # of a cell: some spreadsheets divide at semicolons and tabs, whatever the file is
ESCAPE, UNESCAPE = re.compile(f"{START}({FORMULA})"), re.compile(f"{START}'({FORMULA})")


class _Lines(list):
    """The lines of a CSV file, which end as those of Unix, while line ends of both kinds are quoted in cells."""

    def write(self, line: str) -> None:
        """Append a line that ends as those of Windows."""
        self.append(line.removesuffix("\r\n") + "\n")


def to_csv(frame: pd.DataFrame) -> str:
    """A frame as the text of a CSV file; numbers have six digits."""
    lines = _Lines()
    _changed(frame, escaped).to_csv(lines, index=False, float_format="%.6g", lineterminator="\r\n")
    return "".join(lines)


def read_csv(file: Path) -> pd.DataFrame:
    """The frame of such a file; an empty cell is NaN, and every other one what it says."""
    return _changed(pd.read_csv(file, keep_default_na=False, na_values=[""]), _unescaped)


def escaped(text: str) -> str:
    """A text that no spreadsheet takes for a formula; a number as it is."""
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
    """A frame whose headers and texts, and what is written as text, are changed."""

    def cell(value: object) -> object:
        return change(str(value)) if isinstance(value, (str, list, tuple, dict)) else value

    found = frame.apply(lambda column: column if is_numeric_dtype(column) else column.map(cell))
    return found.set_axis([cell(header) for header in frame.columns], axis="columns")
