"""Maps: values by row and column in shades of colour."""

from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LogNorm, Normalize, to_hex
from matplotlib.font_manager import FontProperties
from matplotlib.image import AxesImage

from outliers.show.axes import log_ticks
from outliers.show.style import color_of

MOST_COLUMNS = 1024  # of a map; where there are more, neighbours share one that shows their largest
DIGIT = 0.85  # of the size of its font takes one of a column's number in width, and some room


class Scale(NamedTuple):
    """Colours of values, in a figure and in an explorer alike; said: what a legend says of them."""

    norm: Normalize
    colors: Colormap
    said: str = ""

    @property
    def in_page(self) -> dict:
        """The scale as explorer.js reads it."""
        low, high, log = self.norm.vmin, self.norm.vmax, isinstance(self.norm, LogNorm)
        ticks = log_ticks(low, high) if log else np.linspace(low, high, 5).tolist()
        colors = [to_hex(color) for color in self.colors(np.arange(self.colors.N))]
        return {"log": log, "low": low, "high": high, "ticks": ticks, "colors": colors, "said": self.said}


def map_on(axes: Axes, values: np.ndarray, scale: Scale, first: int = 0) -> AxesImage:
    """Values (rows, columns) as a map whose rows are numbered from the first on; NaN has no colour of the scale."""
    rows, columns = values.shape
    shown = pooled(values, -(-columns // MOST_COLUMNS))
    style = {"norm": scale.norm, "cmap": scale.colors, "aspect": "auto", "interpolation": "none"}
    image = axes.imshow(shown, extent=(-0.5, columns - 0.5, first + rows - 0.5, first - 0.5), **style)
    axes.spines[:].set_visible(True)
    axes.grid(False)
    return image


def pooled(values: np.ndarray, share: int) -> np.ndarray:
    """Columns of (rows, columns), each the largest of so many neighbours."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % share)))
    return padded.reshape(len(values), -1, share).max(2)


def number_above(axes: Axes, columns: dict[int, int], width: int) -> None:
    """Write numbers above a map of a width at some columns, the first ones where they are close to each other."""
    points = 72 * axes.bbox.width / axes.figure.dpi
    digit = DIGIT * FontProperties(size="small").get_size_in_points() / points
    numbered: list[int] = []
    for place in columns:
        if all(abs(place - other) > digit * len(str(width)) * width for other in numbered):
            numbered.append(place)
    above = axes.secondary_xaxis("top")
    above.set_xticks(numbered, [str(columns[at]) for at in numbered], fontsize="small", color=color_of("vermilion"))
    above.tick_params(color=color_of("vermilion"), length=3, pad=1)
