"""Explorers of a page: maps of layer by feature or projection, profiles, the text in colours, and the writers of a
feature.

An explorer is data (an `Explorer`) that explorer.js draws with Plotly, all within the page. Its content:

    row, value, unit: words for what is down a map, and for what is in its cells. first: the number of the first row.
    scales: of "log", "linear", "clipped", those to choose from.
    threshold, colors: where the colours have a step, or null; colours below it and from it on.
    choice: what the maps differ in. maps, a list:
        name, said, group: maps of one group are drawn in one profile. column: what is across.
        values: array (rows, columns). share: how many features a column has, of which it shows the largest.
        columns: their names, or null where they are numbers. marked: features to choose with a click.
        positions: {features: numbers, or null for all; values: array (T, features)}, or null.
        text: {features, values: array (rows, T, features)}, or null.
    tokens: the text, token by token, or null.

That of origins has features in the place of maps; `at_places` are values after the first position and at the first:

    places: what these are called. bars: of each part its color, its pattern and how far it stands beside its layer.
    features, a list; left: how many more there are:
        feature: its number. readers: the places that read it. states: before each layer and after all, at_places.
        parts: layer, -1 before all, and part; values: what it writes, at_places; writers: of each its name, values and
            magnitude, and as `most` the tokens on which it writes most, [token, position, term].
        gates: layer, part, norm, gain, median, rank; before and behind it the feature, at_places.
"""

import base64
import functools
import gzip
import json
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import to_hex

from outliers.show.style import HEAT

LARGEST = 60_000.0  # that an array holds in 16 bits, which go to 65,504; larger values get a scale


class Explorer(NamedTuple):
    """An interactive part of a page; content: as described above."""

    title: str
    content: dict


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


def packed(content: dict) -> str:
    """Base64 of gzip of: the length of the JSON (uint32), the JSON, and what is in its arrays, float16.

    An array is {"shape", "scale", "offset"} in the JSON; its values are within 0.05 %. All little-endian.
    """
    parts: list[bytes] = []
    places: dict[int, dict] = {}

    def place(array: np.ndarray) -> dict:
        if id(array) not in places:  # one that stands twice is there once
            finite = np.abs(array[np.isfinite(array)])
            scale = max(1.0, float(finite.max(initial=0)) / LARGEST)
            offset = sum(map(len, parts))
            parts.append((array / scale).astype("<f2").tobytes())
            places[id(array)] = {"shape": list(array.shape), "scale": scale, "offset": offset}
        return places[id(array)]

    header = json.dumps(content, default=place).encode()
    return _compressed(struct.pack("<I", len(header)) + header + b"".join(parts))


@functools.cache
def plotly() -> str:
    """The source of Plotly, packed as the data is."""
    from plotly.offline import get_plotlyjs  # late: few pages need it

    return _compressed(get_plotlyjs().encode())


def _compressed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()
