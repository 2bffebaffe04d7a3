"""Explorers of tables of numbers, each a map in shades of colour."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import to_hex

from outliers.plot.style import HEAT
from outliers.report.section import Explorer


def of_tables(title: str, maps: Sequence[dict], row: str, value: str, choice: str, unit: str = "") -> Explorer:
    """Maps to choose from.

    maps: those of `map_of`, which differ in `choice`. row, value, unit: words for what is down a map, and for what is
    in its cells.
    """
    colors = [[], [to_hex(color) for color in colormaps[HEAT](np.linspace(0, 1, 32))]]
    shades = {"scales": ["linear"], "threshold": None, "colors": colors}
    labels = {"row": row, "first": 0, "value": value, "unit": unit, "choice": choice}
    return Explorer(title, {**labels, **shades, "maps": list(maps), "tokens": None})


def map_of(name: str, column: str, table: pd.DataFrame, group: str = "") -> dict:
    """A map of a table, whose rows are numbered from 0 on and whose columns have names; NaN where there is nothing.

    column: a word for what is across. group: of maps whose profiles are drawn together.
    """
    columns = list(table.columns)
    around = {"said": "", "marked": [], "positions": None, "text": None}
    across = {"column": column, "share": 1, "features": len(columns), "columns": columns}
    return {"name": name, "group": group, "values": table.to_numpy(dtype=float), **across, **around}
