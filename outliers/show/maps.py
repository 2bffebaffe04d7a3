"""Maps (heat maps): values by row and column as colours."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm, Normalize, to_hex
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage

from outliers.show.axes import log_ticks, places_with_room
from outliers.show.style import Panels, color_of

FAINTEST = 0.01  # share of the values that have the darkest colour, or lie below a logarithmic axis
HIGHEST = 40  # inches, of a figure of many maps
MOST_COLUMNS = 1024  # of a map; where there are more, neighbours share a column that shows their largest value
DIGIT = 0.85  # width of one digit of a column's number, some room included, as a share of the font size


class Scale(NamedTuple):
    """The colours of values, shared by a figure and an explorer. said: the text of the legend."""

    norm: Normalize
    colors: Colormap
    said: str = ""

    @property
    def in_page(self) -> dict:
        low, high, log = self.norm.vmin, self.norm.vmax, isinstance(self.norm, LogNorm)
        ticks = log_ticks(low, high) if log else np.linspace(low, high, 5).tolist()
        colors = [to_hex(color) for color in self.colors(np.arange(self.colors.N))]
        return {"log": log, "low": low, "high": high, "ticks": ticks, "colors": colors, "said": self.said}


def map_on(axes: Axes, values: np.ndarray, scale: Scale, first: int = 0) -> AxesImage:
    """Draw values (rows, columns) as a map whose rows are numbered from `first`; NaN gets no colour of the scale."""
    rows, columns = values.shape
    shown = pooled(values, -(-columns // MOST_COLUMNS))
    style = {"norm": scale.norm, "cmap": scale.colors, "aspect": "auto", "interpolation": "none"}
    image = axes.imshow(shown, extent=(-0.5, columns - 0.5, first + rows - 0.5, first - 0.5), **style)
    axes.spines[:].set_visible(True)
    axes.grid(False)
    return image


def maps_by_layer(panels: Panels, maps: Mapping[str, pd.DataFrame], scale: Scale, rows: str, most: int) -> None:
    """Draw maps of log-perplexity below each other, by title, with layers as columns and one bar of colours.

    rows: the label of the rows. most: the number of rows that get a tick.
    """
    for axes, (title, table) in zip(panels[:, 0], maps.items(), strict=True):
        image = map_on(axes, table.to_numpy(), scale)
        axes.set_title(title, loc="left", fontsize="small")
        axes.set_xticks(*places_with_room(table.columns, 16))
        axes.set_yticks(*places_with_room(table.index, most))
        axes.set_ylabel(rows)
    axes.set_xlabel("layer")
    axes.figure.colorbar(image, ax=list(panels.flat)).set_label("log-perplexity\n(nats a token)")


def pooled(values: np.ndarray, share: int) -> np.ndarray:
    """Reduce each group of `share` neighbouring columns of values (rows, columns) to their maximum."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % share)))
    return padded.reshape(len(values), -1, share).max(2)


def number_above(axes: Axes, columns: dict[int, int], width: int) -> None:
    """Write numbers above a map of the given width, {column: number}; where they would overlap, the first one stays."""
    points = 72 * axes.bbox.width / axes.figure.dpi
    digit = DIGIT * FontProperties(size="small").get_size_in_points() / points
    numbered: list[int] = []
    for place in columns:
        if all(abs(place - other) > digit * len(str(width)) * width for other in numbered):
            numbered.append(place)
    above = axes.secondary_xaxis("top")
    above.set_xticks(numbered, [str(columns[at]) for at in numbered], fontsize="small", color=color_of("vermilion"))
    above.tick_params(color=color_of("vermilion"), length=3, pad=1)
