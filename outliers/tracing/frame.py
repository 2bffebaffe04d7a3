"""A data frame that a terminal shows whole."""

import shutil

import pandas as pd

DIGITS = 3


class Frame(pd.DataFrame):
    """A data frame whose printed form has all columns, in several lines where the terminal is too narrow.

    pandas leaves columns out there, and cuts long texts, unless options are changed, which are the user's. Numbers are
    printed to three digits; rows that are more than the user's option says are left out as always. What is computed
    from it is a plain data frame.
    """

    def __repr__(self) -> str:
        rows = {f"{which}_rows": pd.get_option(f"display.{which}_rows") for which in ("max", "min")}
        # Of text, for pandas puts one space between columns of text and two between those of numbers.
        text = pd.DataFrame({name: column.map(_written).astype(object) for name, column in self.items()})
        width, whole = shutil.get_terminal_size().columns, text.to_string(index=False, **rows)
        fits = max(map(len, whole.splitlines())) <= width
        return whole if fits else text.to_string(index=False, line_width=width, **rows)


def _written(value) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.{DIGITS}g}" if not abs(value) >= 10**DIGITS else f"{value:,.0f}"
