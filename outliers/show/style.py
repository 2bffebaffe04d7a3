"""Style of all figures: readable in grey and by the colour-blind, sized for a column of a paper."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TypeVar

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from outliers.errors import UserError, unknown_name

# Okabe and Ito's palette is distinct in the common forms of colour blindness; markers distinguish it in grey.
COLORS = {
    "black": "#000000",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "green": "#009E73",
    "blue": "#0072B2",
    "vermilion": "#D55E00",
    "purple": "#CC79A7",
    "grey": "#999999",
}
Panels = Axes | np.ndarray  # a figure's axes, an array if there are several
Draw = TypeVar("Draw", bound=Callable)  # a figure function, whose signature is preserved
GREY = COLORS["grey"]  # published values of others, in any style
MARKERS = "osv^DPX*"
SEQUENTIAL = "cividis"  # lightness grows evenly, so it reads in grey too
HEAT = "inferno"  # lightness grows evenly here too, through more hues
#: The rcParams of the figures, on top of matplotlib's defaults. Everything that is drawn takes sizes and colours from
#: rcParams, so that those of the caller can replace them.
LOOK = {
    "axes.axisbelow": True,
    "axes.labelsize": 9,
    "axes.prop_cycle": cycler(color=COLORS.values()),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "font.size": 10,
    "grid.color": "0.93",
    "grid.linewidth": 0.6,
    "image.cmap": HEAT,
    "legend.fontsize": 8.3,
    "legend.frameon": False,
    "lines.linewidth": 1,
    "lines.markersize": 5,
    "path.simplify_threshold": 0.3,
    "svg.hashsalt": "outliers",
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
}
LONGEST = 28  # characters of a name, of a model or of a scheme
_yours: ContextVar[bool] = ContextVar("yours", default=False)


@contextmanager
def your_style() -> Iterator[None]:
    """Draw figures within this context in the caller's rcParams: fonts, sizes, colour cycle, colour map, grid.

    Markers, hatches, lines and the grey of published values, which distinguish data, stay as they are.

    Example:
        >>> with outliers.plot.your_style():
        ...     panels = outliers.plot.heat_map(outliers.trace(model, blocks, alpha=3))
    """
    token = _yours.set(True)
    try:
        yield
    finally:
        _yours.reset(token)


@contextmanager
def house_style() -> Iterator[None]:
    """Use matplotlib's defaults with `LOOK`, not the caller's rcParams, so that files are the same everywhere."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(LOOK)
        yield


# The end of every figure function's docstring; it continues the list of arguments.
ENDING = """    ax: where to draw the one panel, in the caller's style; by default a new figure.

    Returns:
        The axes, or an array of them where there are several panels; `.figure` of one is their figure.

    Raises:
        UserError: no such panel was measured, or there are several for `ax`.
    """


def figure_function(draw: Draw) -> Draw:
    """Make a figure function draw in `LOOK`; on the caller's axes (`ax=`) and within `your_style`, in their rcParams.

    The function returns a single `Axes` if its figure has one panel. Its docstring gets the `ENDING`.
    """
    draw.__doc__ = f"{draw.__doc__}{ENDING}"

    @functools.wraps(draw)
    def drawing(*data, ax: Axes | None = None, **options):
        with house_style() if ax is None and not _yours.get() else nullcontext():
            panels = np.asarray(draw(*data, ax=ax, **options))
        return panels.item() if panels.size == 1 else panels

    return drawing


def chosen(field: str, name: str | None, names: Iterable[str], ax: Axes | None) -> list[str]:
    """Return the panels to draw: the named one, or all. field: what messages call a panel, such as "model".

    Raises:
        UserError: there is no such panel; or the caller's `ax`, which holds one panel, is to hold several.
    """
    names = list(names)
    if name is not None and name not in names:
        raise unknown_name(field, name, names)
    if ax is not None and name is None and len(names) > 1:
        raise UserError(f"ax= has room for one panel of {len(names)}; choose one by {field}=: {', '.join(names)}")
    return names if name is None else [name]


def panels_of(ax: Axes | None, rows: int, columns: int, size: tuple[float, float], **options) -> np.ndarray:
    """Return axes (rows, columns) for panels: the caller's ax, or the axes of a new figure of this size in inches.

    If the caller has imported pyplot, the new figure is registered there, so that a notebook and `show` display it.
    """
    if ax is not None:
        return np.array([[ax]])
    pyplot = sys.modules.get("matplotlib.pyplot")
    figure = (pyplot.figure if pyplot else Figure)(figsize=size, layout="constrained")
    return figure.subplots(rows, columns, squeeze=False, **options)


def color_of(name: str) -> str:
    """Return the colour of the current cycle at the place of a name in `COLORS`: within `LOOK`, the named colour."""
    cycle = matplotlib.rcParams["axes.prop_cycle"].by_key().get("color", [*COLORS.values()])
    return cycle[list(COLORS).index(name) % len(cycle)]


def brief(names: Iterable[str]) -> list[str]:
    """Shorten long names by leaving out their middle, unless that would make two equal."""
    names = list(names)
    half = (LONGEST - 1) // 2
    cut = [name if len(name) <= LONGEST else f"{name[:half]}…{name[-half:]}" for name in names]
    return cut if len(set(cut)) == len(set(names)) else names
