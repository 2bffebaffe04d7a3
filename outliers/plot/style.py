"""What all figures share: readable in grey and by the colour-blind, sized for a column of a paper."""

import functools
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from outliers.errors import UserError, unknown_name
from outliers.quantization.schemes import SCHEMES

# Okabe and Ito's palette, which stays apart in the common forms of colour blindness; markers keep it apart in grey.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE, GREY = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
    "#999999",
)
COLORS = (BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE, GREY)
MARKERS = "osv^DPX*"
SEQUENTIAL = "cividis"  # lightness grows evenly, with and without colour
HEAT = "inferno"  # so does its, through more hues
#: The rcParams of the figures, beside matplotlib's own defaults; everything that is drawn takes its sizes and colours
#: from rcParams, so that those of the caller can stand in their place.
LOOK = {
    "axes.axisbelow": True,
    "axes.labelsize": 9,
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 9,
    "font.size": 9,
    "grid.color": "0.93",
    "grid.linewidth": 0.6,
    "image.cmap": HEAT,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1,
    "lines.markersize": 5,
    "svg.hashsalt": "outliers",
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
}
LINEAR = 0.1  # per cent: within it the scale of costs is linear, beyond it logarithmic
TICKS = (0.1, 1, 10, 100, 1000, 10_000)
LONGEST = 28  # characters of a name, of a model or of a scheme
SLANTED = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}  # names along x
SCATTER = "± 1 standard deviation"
HOLLOW = "hollow: outlier features\n(α = {}) in 16 bits"
MOST_ENTRIES, EXPLAINED = 18, 3  # of a column of a legend; in it, entries beside the schemes
BESIDE = {"loc": "upper left", "bbox_to_anchor": (1, 1)}  # of axes, their legend, which hides no data there
PLACES = {"right upper": BESIDE, "upper center": {}}  # of a legend: where that is on the caller's axes

_yours: ContextVar[bool] = ContextVar("yours", default=False)


@contextmanager
def your_style() -> Iterator[None]:
    """Figures that are made in this context follow the caller's rcParams: fonts, sizes, colour cycle, colour map, grid.

    What tells things apart beyond that stays: markers, hatches, lines, and the grey of published values.
    """
    token = _yours.set(True)
    try:
        yield
    finally:
        _yours.reset(token)


@contextmanager
def look() -> Iterator[None]:
    """matplotlib's defaults with `LOOK`, whatever the caller's rcParams are, so that files are the same everywhere."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(LOOK)
        yield


def figure_function(draw: Callable) -> Callable:
    """A function that draws in `LOOK`; on axes of the caller's (`ax=`) and in `your_style` in the caller's rcParams."""

    @functools.wraps(draw)
    def drawing(*data, ax: Axes | None = None, **options):
        with look() if ax is None and not _yours.get() else nullcontext():
            return draw(*data, ax=ax, **options)

    return drawing


def chosen(field: str, name: str | None, names: Iterable[str], ax: Axes | None) -> list[str]:
    """The panels that a figure has: the one that is asked for, else all.

    Raises:
        UserError: there is no such panel; or there are several for the axes of the caller's, which have room for one.
    """
    names = list(names)
    if name is not None and name not in names:
        raise unknown_name(field, name, names)
    if ax is not None and name is None and len(names) > 1:
        raise UserError(f"ax= has room for one panel of {len(names)}; choose one by {field}=: {', '.join(names)}")
    return names if name is None else [name]


def panels_of(ax: Axes | None, rows: int, columns: int, size: tuple[float, float], **options) -> np.ndarray:
    """Axes for the panels of a figure, (rows, columns): those of the caller's, else on a new figure of this size.

    Where the caller has imported pyplot the figure is one of pyplot's, so that a notebook and `show` display it.
    """
    if ax is not None:
        return np.array([[ax]])
    pyplot = sys.modules.get("matplotlib.pyplot")
    figure = (pyplot.figure if pyplot else Figure)(figsize=size, layout="constrained")
    return figure.subplots(rows, columns, squeeze=False, **options)


def returned(panels: np.ndarray) -> Axes | np.ndarray:
    """Axes alone where a figure has one panel."""
    return panels.item() if panels.size == 1 else panels


def legend(ax: Axes | None, axes: Axes, handles: Sequence[Artist], place: str, columns: int = 1) -> None:
    """A legend outside the axes; on the caller's, whose surroundings are not known, beside or inside them."""
    if ax is None:
        axes.figure.legend(handles=handles, ncols=columns, loc=f"outside {place}")
    else:
        axes.legend(handles=handles, **PLACES[place])


def scheme_legend(
    ax: Axes | None, axes: Axes, entries: Mapping[str, object], rows: list[dict], bars: str | None, *others
) -> None:
    """A legend of schemes that says what hollow marks and bars are, where there are some.

    entries: by label what was drawn. rows: what it is of. bars: what they are. others: further entries.
    """
    alphas = sorted({row["alpha"] for row in rows if row.get("alpha") is not None})
    hollow = HOLLOW.format(", ".join(f"{alpha:g}" for alpha in alphas))
    explained = [said(hollow, marker="o", fillstyle="none")] * bool(alphas) + [said(bars, marker="|")] * bool(bars)
    handles, labels = [*entries.values(), *explained, *others], [*brief(entries)]
    labels += [one.get_label() for one in (*explained, *others)]
    style = {"handles": handles, "labels": labels, "ncols": legend_columns(entries)}
    if ax is None:
        axes.figure.legend(loc="outside right upper", **style)
    else:
        axes.legend(**BESIDE, **style)


def legend_columns(schemes: Collection[str]) -> int:
    """How many columns a legend of schemes takes."""
    return -(-(len(schemes) + EXPLAINED) // MOST_ENTRIES)


def said(label: str, **style) -> Line2D:
    """An entry of a legend that explains how marks look."""
    return Line2D([], [], **({"color": "0.3", "linestyle": "none"} | style), label=label)


def color_of(color: str) -> str:
    """The colour of the cycle that stands in the place of one of `COLORS`, which is itself in `LOOK`."""
    cycle = matplotlib.rcParams["axes.prop_cycle"].by_key().get("color", COLORS)
    return cycle[COLORS.index(color) % len(cycle)]


def brief(names: Iterable[str]) -> list[str]:
    """Names with their middle left out where they are long, as far as they stay distinct."""
    names = list(names)
    half = (LONGEST - 1) // 2
    cut = [name if len(name) <= LONGEST else f"{name[:half]}…{name[-half:]}" for name in names]
    return cut if len(set(cut)) == len(set(names)) else names


def threshold(axes: Axes, alpha: float) -> None:
    """A line at α, named at its end, outside the axes, where no line of data runs through it."""
    axes.axhline(alpha, color="black", linewidth=0.6, linestyle=":", zorder=0)
    beside(axes, f"α = {alpha:g}", alpha)


def beside(axes: Axes, text: str, y: float) -> None:
    """Name a height of the axes, at their right."""
    style = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center", "fontsize": "small"}
    axes.annotate(text, (1, y), (3, 0), **style)


def count_label(value: float, _position=None) -> str:
    """A number of parameters as people write it: 125M, 1.3B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def parameters_axis(axes: Axes) -> None:
    """Parameters along x."""
    axes.set(xscale="log", xlabel="parameters")
    low, high = axes.get_xlim()
    subs = (1,) if high > 3000 * low else (1, 3) if high > 10 * low else (1, 2, 5)
    _ticks(axes, subs, FuncFormatter(count_label))


def perplexity_axis(axes: Axes) -> None:
    """Perplexity along x, better models to the right."""
    axes.set(xscale="log", xlabel="perplexity")
    low, high = axes.get_xlim()
    _ticks(axes, (1, 2, 5) if high > 4 * low else (1, 1.5, 2, 3, 5, 7), "{x:g}")
    axes.invert_xaxis()


def _ticks(axes: Axes, subs: tuple[int, ...], label) -> None:
    # Fixed, for LogLocator falls back to crowded linear ticks where it finds less than two.
    axes.xaxis.set_major_locator(FixedLocator([sub * 10**power for power in range(16) for sub in subs]))
    axes.xaxis.set_major_formatter(label)
    axes.xaxis.set_minor_formatter(NullFormatter())


def log_axis(axis: Axis, low: float, high: float) -> None:
    """Label a logarithmic axis that shows values between two with as many numbers as have room."""
    subs = (1,) if high > 300 * low else (1, 3) if high > 30 * low else (1, 2, 5) if high > 5 * low else range(1, 10)
    axis.set_major_locator(FixedLocator([sub * 10.0**power for power in range(-9, 10) for sub in subs]))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def cost_axis(axes: Axes, values: list[float]) -> None:
    """A scale on which a tenth of a per cent and a hundred can both be read."""
    axes.set_yscale("symlog", linthresh=LINEAR, linscale=0.7)
    ticks = [sign * tick for tick in TICKS for sign in (-1, 1) if tick <= 10 * max(sign * value for value in values)]
    ticks = sorted([0, *ticks])
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(ticks, [f"{tick:+g}".replace("-", "−") if tick else "0" for tick in ticks])
    axes.set_ylim(2 * min(*values, -LINEAR), 2 * max(*values, LINEAR))
    axes.grid(axis="y")


# Colour, marker and line of schemes that figures have always shown; any other gets one of those that follow.
STYLES = {
    "fp32": (BLACK, "o", "-"),
    "absmax": (VERMILION, "v", "-"),
    "zeropoint": (PURPLE, "s", "-"),
    "absmax-row": (ORANGE, "^", "-"),
    "absmax-vector": (SKY, "D", "-"),
    "zeropoint-vector": (BLUE, "P", "-"),
    "absmax-row-decomp": (ORANGE, "^", ":"),
    "llm.int8": (GREEN, "X", "--"),
    "llm.int8-zeropoint": (BLUE, "P", ":"),
    "llm.int8-bnb": (GREEN, "*", ":"),
}
OTHERS = [(COLORS[6 - number % 6], "<>pdh"[number % 5], line) for line in ("-.", ":") for number in range(30)]


def in_order(schemes: Iterable[str]) -> list[str]:
    """Each scheme once: those that come along in the order of their table, then others as they are given."""
    found = dict.fromkeys(schemes)
    return [name for name in SCHEMES if name in found] + [name for name in found if name not in SCHEMES]


def scheme_styles(rows: list[dict]) -> dict[str, dict]:
    """How matplotlib draws each scheme of some rows, in the order of tables; hollow markers: with decomposition."""
    decomposed = {row["scheme"] for row in rows if row.get("alpha") is not None}
    others = itertools.cycle(OTHERS)
    styles = {}
    for scheme in in_order(row["scheme"] for row in rows):
        color, marker, line = STYLES.get(scheme) or next(others)
        fill = "none" if scheme in decomposed else "full"
        style = {"color": color_of(color), "marker": marker, "linestyle": line, "fillstyle": fill}
        styles[scheme] = style | {"label": scheme}
    return styles
