"""Explorers of a page: interactive maps by layer and feature or projection, profiles, coloured text, and writers.

An explorer is data (an `Explorer`) that explorer.js draws with Plotly, all within the page. Its content:

    row, value, unit: labels of a map's rows and of its values, and their unit. first: the number of the first row.
    scales: the colour scales to choose from, by name, each as `Scale.in_page`. choice: what the maps differ in. maps, a
        list: name, said, group: maps of one group are drawn in one profile. column: label of the columns.
        values: array (rows, columns). share: number of features in a column, which shows the largest of them.
        columns: their names, or null where they are numbers. marked: features that a click chooses.
        text: {features, values: array (rows, T, features)}, or null.
    positions: by group {features: numbers, or null for all; values: array (T, features)}.
    tokens: the text, token by token, or null.

The explorer of origins has features instead of maps; `at_places` means values after the first position and at the
first:

    places: names of the two. bars: colour, pattern and offset beside the layer, for each part.
    features, a list; left: how many more there are:
        feature: its number. readers: the places that read it. states: before each layer and after all, at_places.
        parts: layer (-1 before all layers) and part; values: what it writes, at_places; writers: name, values and
            magnitude of each, and as `most` the tokens on which it writes most, [token, position, term].
        gates: layer, part, norm, gain, median, rank; the feature before and behind the norm, at_places.
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

CELLS = 150_000  # of a map at most: in larger ones neighbouring features share a column, which shows the largest
PLOTLY = Path(__file__).with_name("plotly.js.gz")  # plotly.js-cartesian-dist-min of the npm registry, MIT licence


class Explorer(NamedTuple):
    """An interactive part of a page. content: see the module. instead: the name of the drawing that it replaces."""

    title: str
    content: dict
    instead: str = ""

    @property
    def packed(self) -> str:
        """The content as base64 of gzipped JSON.

        Numbers in arrays are rounded as the page shows them; NaN becomes null and infinity "∞".
        """
        return _base64(gzip.compress(json.dumps(self.content, default=_rounded).encode(), mtime=0))


def of_maps(
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
    """Make an explorer with a choice of maps.

    maps: results of `map_of`, which differ in `choice`. row, value, unit: labels of a map's rows and of its values, and
    their unit. scales: the colour scales to choose from; by default one linear scale over all finite values. more:
    further fields of the content.
    """
    if scales is None:
        finite = np.concatenate([table["values"][np.isfinite(table["values"])] for table in maps])
        scales = {"linear": Scale(Normalize(finite.min(initial=0), finite.max(initial=1e-9)), colormaps[HEAT])}
    content = {"row": row, "first": 0, "value": value, "unit": unit, "choice": choice, "maps": list(maps)}
    content |= {"scales": {name: scale.in_page for name, scale in scales.items()}, "positions": {}, "tokens": None}
    return Explorer(title, content | more, instead)


def map_of(name: str, column: str, table: pd.DataFrame | np.ndarray, group: str = "") -> dict:
    """Make the content of one map from a table, or from an array with numbered rows and columns; NaN is no value.

    column: label of the columns. group: name shared by maps whose profiles are drawn together.
    """
    named = isinstance(table, pd.DataFrame)
    values, names = (table.to_numpy(dtype=float), list(table.columns)) if named else (table, None)
    share = 1 if named else -(-values.size // CELLS)
    across = {"column": column, "share": share, "features": values.shape[1], "columns": names}
    around = {"said": "", "marked": [], "text": None}
    return {"name": name, "group": group, "values": pooled(values, share), **across, **around}


def plotly() -> str:
    """Return the source of Plotly as base64 of gzip, like `Explorer.packed`."""
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
