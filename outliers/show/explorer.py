"""Explorers of a page: maps of layer by feature or projection, profiles, the text in colours, and the writers of a
feature.

An explorer is data (an `Explorer`) that explorer.js draws with Plotly, all within the page. Its content:

    row, value, unit: words for what is down a map, and for what is in its cells. first: the number of the first row.
    scales: by name those to choose from, as `Scale.in_page` has them. choice: what the maps differ in. maps, a list:
        name, said, group: maps of one group are drawn in one profile. column: what is across.
        values: array (rows, columns). share: how many features a column has, of which it shows the largest.
        columns: their names, or null where they are numbers. marked: features to choose with a click.
        text: {features, values: array (rows, T, features)}, or null.
    positions: by group {features: numbers, or null for all; values: array (T, features)}.
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
import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.colors import Normalize

from outliers.show.maps import Scale, pooled
from outliers.show.style import HEAT

CELLS = 150_000  # of a map of an array at most: in wider ones neighbours share columns, each the largest of them
PLOTLY = Path(__file__).with_name("plotly.js.gz")  # plotly.js-cartesian-dist-min of the npm registry, MIT licence


class Explorer(NamedTuple):
    """An interactive part of a page; content: as described above. instead: the drawing whose place it takes."""

    title: str
    content: dict
    instead: str = ""


def of_tables(
    title: str,
    maps: Sequence[dict],
    row: str,
    value: str,
    choice: str,
    unit: str = "",
    scales: Mapping[str, Scale] | None = None,
    instead: str = "",
    **more,
) -> Explorer:
    """Maps to choose from.

    maps: those of `map_of`, which differ in `choice`. row, value, unit: words for what is down a map, and for what is
    in its cells. scales: to choose from, by default from the least value to the largest. more: of the content.
    """
    if scales is None:
        finite = np.concatenate([one["values"][np.isfinite(one["values"])] for one in maps])
        scales = {"linear": Scale(Normalize(finite.min(initial=0), finite.max(initial=1e-9)), colormaps[HEAT])}
    content = {"row": row, "first": 0, "value": value, "unit": unit, "choice": choice, "maps": list(maps)}
    content |= {"scales": {name: scale.in_page for name, scale in scales.items()}, "positions": {}, "tokens": None}
    return Explorer(title, content | more, instead)


def map_of(name: str, column: str, table: pd.DataFrame | np.ndarray, group: str = "") -> dict:
    """A map of a table, or of an array, whose rows and columns are numbered from 0 on; NaN where there is nothing.

    column: a word for what is across. group: of maps whose profiles are drawn together.
    """
    named = isinstance(table, pd.DataFrame)
    values, names = (table.to_numpy(dtype=float), list(table.columns)) if named else (table, None)
    share = 1 if named else -(-values.size // CELLS)
    across = {"column": column, "share": share, "features": values.shape[1], "columns": names}
    around = {"said": "", "marked": [], "text": None}
    return {"name": name, "group": group, "values": pooled(values, share), **across, **around}


def packed(content: dict) -> str:
    """Base64 of gzip of JSON, with numbers of arrays rounded as the page shows them; NaN is null, infinity a sign."""
    return _base64(gzip.compress(json.dumps(content, default=_rounded).encode(), mtime=0))


def plotly() -> str:
    """The source of Plotly, packed as the data is."""
    return _base64(PLOTLY.read_bytes())


def _rounded(values: np.ndarray) -> list:
    size = np.abs(values)
    unit = 10.0 ** np.select([size >= 100, size >= 10, size >= 0.1], [0, 1, 2], 4)
    shown = (np.round(values * unit) / unit).astype(object)
    shown[np.isnan(values)] = None
    shown[np.isinf(values)] = "∞"
    shown[np.isneginf(values)] = "−∞"
    return shown.tolist()


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
