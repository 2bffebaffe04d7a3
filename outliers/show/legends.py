"""Legends, and how schemes look in every figure."""

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from outliers.quantization.schemes import SCHEMES
from outliers.show.style import COLORS, GREY, brief, color_of

SCATTER = "± 1 standard deviation"
HOLLOW = "hollow: outlier features\n(α = {}) in 16 bits"
MOST_ENTRIES, EXPLAINED = 18, 3  # of a column of a legend; in it, entries beside the schemes
# Of a legend: where that is on the caller's axes; beside them it hides no data.
PLACES = {"right upper": {"loc": "upper left", "bbox_to_anchor": (1, 1)}, "upper center": {"ncols": 1}}


def legend(ax: Axes | None, axes: Axes, handles: Sequence[Artist], place: str, columns: int = 1, **style) -> None:
    """A legend outside the axes; on the caller's, whose surroundings are not known, beside or inside them."""
    if ax is None:
        axes.figure.legend(handles=handles, ncols=columns, loc=f"outside {place}", **style)
    else:
        axes.legend(handles=handles, **{"ncols": columns} | PLACES[place], **style)


def scheme_legend(
    ax: Axes | None, axes: Axes, entries: Mapping[str, Artist], explanations: Sequence[Artist] = ()
) -> None:
    """A legend of schemes, by label what was drawn; below them what `explained` says."""
    labels = [*brief(entries), *(handle.get_label() for handle in explanations)]
    handles = [*entries.values(), *explanations]
    legend(ax, axes, handles, "right upper", legend_columns(entries), labels=labels)


def labelled(panels: Iterable[Axes]) -> dict[str, Artist]:
    """The marks of panels by their labels."""
    return {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}


def legend_columns(schemes: Collection[str]) -> int:
    """Number of columns of a legend of schemes."""
    return -(-(len(schemes) + EXPLAINED) // MOST_ENTRIES)


def entry(label: str, **style) -> Line2D:
    """An entry that explains how marks look."""
    return Line2D([], [], **({"color": "0.3", "linestyle": "none"} | style), label=label)


def explained(alphas: Iterable[float | None] = (), bars: str = "", grey: str = "") -> list[Line2D]:
    """Entries that say what hollow marks, bars and grey are, where there are some."""
    decomposed = ", ".join(f"{alpha:g}" for alpha in sorted({alpha for alpha in alphas if alpha is not None}))
    entries = [
        (decomposed and HOLLOW.format(decomposed), {"marker": "o", "fillstyle": "none"}),
        (bars, {"marker": "|"}),
        (grey, {"marker": "o", "color": GREY}),
    ]
    return [entry(label, **style) for label, style in entries if label]


# Colour, marker and line of schemes that figures have always shown; any other gets one of those that follow.
STYLES = {
    "fp32": ("black", "o", "-"),
    "absmax": ("vermilion", "v", "-"),
    "zeropoint": ("purple", "s", "-"),
    "absmax-row": ("orange", "^", "-"),
    "absmax-vector": ("sky", "D", "-"),
    "zeropoint-vector": ("blue", "P", "-"),
    "absmax-row-decomp": ("orange", "^", ":"),
    "llm.int8": ("green", "X", "--"),
    "llm.int8-zeropoint": ("blue", "P", ":"),
    "llm.int8-bnb": ("green", "*", ":"),
}
_PAIRS = list(itertools.islice(zip(itertools.cycle(list(COLORS)[6:0:-1]), itertools.cycle("<>pdh"), strict=False), 30))
OTHERS = [(color, marker, line) for line in ("-.", ":") for color, marker in _PAIRS]


def in_order(schemes: Iterable[str]) -> list[str]:
    """Each scheme once: those that come along in the order of their table, then others as they are given."""
    names = dict.fromkeys(schemes)
    return [name for name in SCHEMES if name in names] + [name for name in names if name not in SCHEMES]


def scheme_styles(rows: list[dict]) -> dict[str, dict]:
    """Styles of matplotlib for the schemes of some rows, in the order of tables; hollow markers: with decomposition."""
    decomposed = {row["scheme"] for row in rows if row.get("alpha") is not None}
    others = itertools.cycle(OTHERS)
    styles = {}
    for scheme in in_order(row["scheme"] for row in rows):
        color, marker, line = STYLES.get(scheme) or next(others)
        fill = "none" if scheme in decomposed else "full"
        style = {"color": color_of(color), "marker": marker, "linestyle": line, "fillstyle": fill}
        styles[scheme] = style | {"label": scheme}
    return styles
