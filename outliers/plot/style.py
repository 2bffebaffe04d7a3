"""What all figures share: readable in grey and by the colour-blind, sized for a column of a paper."""

import itertools
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

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
LINEAR = 0.1  # per cent: within it the scale of costs is linear, beyond it logarithmic
TICKS = (0.1, 1, 10, 100, 1000, 10_000)


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
    subs = (1,) if high > 300 * low else (1, 3) if high > 30 * low else (1, 2, 5) if high > 3 * low else range(1, 10)
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
    axes.grid(axis="y", color="0.93", linewidth=0.6)
    axes.set_axisbelow(True)


def bare(*panels: Axes) -> None:
    """Take away the frame's upper and right side."""
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)


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
        look = {"color": color, "marker": marker, "linestyle": line, "fillstyle": fill}
        styles[scheme] = look | {"label": scheme, "markersize": 5, "linewidth": 1}
    return styles
