"""What all figures share: readable in grey and by the colour-blind, sized for a column of a paper."""

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

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


def bare(*panels: Axes) -> None:
    """Take away the frame's upper and right side."""
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
