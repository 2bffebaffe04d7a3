"""A data frame that is printed with all its columns."""

import shutil

import pandas as pd

DIGITS = 3


class Frame(pd.DataFrame):
    """A data frame that is printed with all columns, in several blocks if the terminal is too narrow.

    pandas drops columns and cuts long texts there unless the user's options are changed. Numbers are printed to three
    digits; the user's option for the number of rows applies. Operations return plain data frames.
    """

    def __repr__(self) -> str:
        rows = {f"{which}_rows": pd.get_option(f"display.{which}_rows") for which in ("max", "min")}
        # As text, because pandas puts one space between columns of text and two between columns of numbers.
        text = pd.DataFrame({name: column.map(_written).astype(object) for name, column in self.items()})
        width, whole = shutil.get_terminal_size().columns, text.to_string(index=False, **rows)
        fits = max(map(len, whole.splitlines())) <= width
        return whole if fits else text.to_string(index=False, line_width=width, **rows)


def _written(value) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.{DIGITS}g}" if not abs(value) >= 10**DIGITS else f"{value:,.0f}"
