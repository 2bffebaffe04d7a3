"""Axes of figures: scales, ticks, labels along x, reference lines, and error-bar plots of perplexity costs."""

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, Formatter, FuncFormatter, NullFormatter, NullLocator

from outliers.show.style import brief
from outliers.show.value import Value, grouped
from outliers.show.words import percent

LINEAR = 0.1  # per cent: the axis of costs is linear within ±LINEAR and logarithmic beyond
TICKS = (0.001, 0.01, 0.1, 1, 10, 100, 1000, 10_000, 10**5, 10**6, 10**7)
HOVER, BETWEEN = "hover:", "|"  # prefix of an SVG id that holds the hover texts of a line's points, and their separator
SLANTED = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"}  # style of labels along x


def threshold(axes: Axes, alpha: float) -> None:
    """Draw a horizontal line at α, labelled at its right end outside the axes, where no data can hide it."""
    axes.axhline(alpha, color="black", linewidth=0.6, linestyle=":", zorder=0)
    label_right(axes, f"α = {alpha:g}", alpha)


def label_right(axes: Axes, text: str, y: float) -> None:
    """Write a label to the right of the axes at height y (data coordinates)."""
    style = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center", "fontsize": "small"}
    axes.annotate(text, (1, y), (3, 0), **style)


def count_label(value: float, _position=None) -> str:
    """Format a number of parameters as people write it: 125M, 1.3B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.0f}"


def parameters_axis(axes: Axes) -> None:
    """Make x a logarithmic axis of the number of parameters."""
    axes.set(xscale="log", xlabel="parameters")
    low, high = axes.get_xlim()
    subs = (1,) if high > 3000 * low else (1, 3) if high > 10 * low else (1, 2, 5)
    _ticks(axes.xaxis, subs, FuncFormatter(count_label))


def perplexity_axis(axes: Axes) -> None:
    """Make x a logarithmic axis of perplexity, inverted so that better models stand on the right."""
    axes.set(xscale="log", xlabel="perplexity")
    low, high = axes.get_xlim()
    _ticks(axes.xaxis, (1, 2, 5) if high > 4 * low else (1, 1.5, 2, 3, 5, 7))
    axes.invert_xaxis()


def log_axis(axis: Axis, low: float, high: float) -> None:
    """Label a logarithmic axis whose values lie between low and high, with as many ticks as fit."""
    _ticks(axis, _subs(low, high))


def log_ticks(low: float, high: float) -> list[float]:
    """Return the ticks that `log_axis` would show between low and high."""
    return [tick for tick in _places(_subs(low, high)) if low <= tick <= high]


def _subs(low: float, high: float) -> Iterable[int]:
    return (1,) if high > 300 * low else (1, 3) if high > 30 * low else (1, 2, 5) if high > 5 * low else range(1, 10)


def _places(subs: Iterable[float]) -> list[float]:
    return [sub * 10.0**power for power in range(-9, 16) for sub in subs]


class NearTicks(FixedLocator):
    """Fixed ticks of a logarithmic axis without those more than a decade out of view, each of which takes time."""

    def __call__(self) -> list[float]:
        low, high = sorted(self.axis.get_view_interval())
        return [place for place in self.locs if low / 10 < place < high * 10]


def _ticks(axis: Axis, subs: Iterable[float], label: str | Formatter = "{x:g}") -> None:
    # Ticks are fixed because LogLocator falls back to crowded linear ticks where it finds fewer than two.
    axis.set_major_locator(NearTicks(_places(subs)))
    axis.set_major_formatter(label)
    axis.set_minor_formatter(NullFormatter())


def cost_axis(axes: Axes, values: Sequence[float]) -> None:
    """Scale y for increases of perplexity in per cent, linear near 0 and logarithmic beyond."""
    _linear_near_0(axes, values, LINEAR, "increase of perplexity (%)")


def increase_axis(axes: Axes, values: Sequence[float]) -> None:
    """Scale y for increases of log-perplexity in nats, linear near 0 and logarithmic beyond."""
    _linear_near_0(axes, values, LINEAR / 100, "increase of log-perplexity (nats)")


def _linear_near_0(axes: Axes, values: Sequence[float], linear: float, label: str) -> None:
    axes.set_yscale("symlog", linthresh=linear, linscale=0.7)
    chosen = [tick for tick in TICKS if tick >= linear]
    ticks = [sign * tick for tick in chosen for sign in (-1, 1) if tick <= 10 * max(sign * value for value in values)]
    ticks = sorted([0, *ticks])
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_minor_locator(NullLocator())
    labels = [f"{tick:+,.0f}" if abs(tick) > 10_000 else f"{tick:+g}" if tick else "0" for tick in ticks]
    axes.set_yticks(ticks, [label.replace("-", "−") for label in labels])
    axes.set_ylim(min(2 * min(values), -linear), 2 * max(*values, linear))
    axes.set_ylabel(f"{label}, linear within ±{linear:g}")


def plot_costs(
    axes: Axes, points: Iterable[tuple[str, float, Value]], styles: Mapping[str, dict], width: float = 0.5
) -> None:
    """Plot costs with error bars, one line of points per name.

    points: (name, position along x, cost as a share, shown in per cent). Points of different names at one position are
    drawn side by side. styles: matplotlib style of each name; names without a style are left out. width: of the strip
    along x that the names of one position share.
    """
    lines = grouped(points, itemgetter(0))
    for number, (name, style) in enumerate(styles.items()):
        if name in lines:
            _, places, costs = zip(*lines[name], strict=True)
            shown = zip(*(cost.shown for cost in costs), strict=True)
            means, bars = ([100 * (part or 0) for part in parts] for parts in shown)
            offset = width * ((number + 0.5) / len(styles) - 0.5)
            drawn = axes.errorbar([place + offset for place in places], means, bars, **style)
            texts = (f"{name}: {percent(*cost.shown)}" for cost in costs)
            drawn[0].set_gid(HOVER + BETWEEN.join(texts))


def name_places(axes: Axes, names: Sequence[str]) -> None:
    """Label the places 0, 1, 2, … along x with names, and draw a horizontal line at 0."""
    axes.axhline(0, color="black", linewidth=0.6)
    axes.set_xticks(range(len(names)), brief(names), **SLANTED)
    axes.set_xlim(-0.5, len(names) - 0.5)


def places_with_room(places: pd.Index, most: int) -> tuple[list[int], list]:
    """Choose evenly spaced places, with their names, so that at most about `most` labels fit."""
    step = next(step for step in (1, 2, 5, 10, 20, 50, 1000) if len(places) <= most * step)
    numbers = list(range(0, len(places), step))
    return numbers, [places[place] for place in numbers]
