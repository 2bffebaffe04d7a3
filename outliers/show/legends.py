"""Legends, and the colours, markers and lines of variants in every figure."""

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from outliers.quantization.schemes import SCHEMES
from outliers.show.style import COLORS, GREY, brief, color_of

SCATTER = "± 1 standard deviation"
THRESHOLD = re.compile(r"\+alpha=[^+]+")  # in the name of a variant
HOLLOW = "hollow: outlier features\n(α = {}) in 16 bits"
MOST_ENTRIES, EXPLAINED = 18, 3  # entries in a column of a legend; the entries reserved for explanations
# Place of a legend on the caller's axes, by its place on a figure of ours; beside the axes it hides no data.
ANCHORS = {"right upper": {"loc": "upper left", "bbox_to_anchor": (1, 1)}, "upper center": {"ncols": 1}}


def legend(ax: Axes | None, axes: Axes, handles: Sequence[Artist], place: str, columns: int = 1, **style) -> None:
    """Draw a legend outside our axes, by matplotlib's location `place`, or beside or inside the caller's axes, `ax`."""
    if ax is None:
        axes.figure.legend(handles=handles, ncols=columns, loc=f"outside {place}", **style)
    else:
        axes.legend(handles=handles, **{"ncols": columns} | ANCHORS[place], **style)


def variant_legend(
    ax: Axes | None, axes: Axes, entries: Mapping[str, Artist], explanations: Sequence[Artist] = ()
) -> None:
    """Draw a legend of variants (label to artist), followed by explanations such as those of `explained`."""
    labels = [*brief(entries), *(handle.get_label() for handle in explanations)]
    handles = [*entries.values(), *explanations]
    legend(ax, axes, handles, "right upper", legend_columns(entries), labels=labels)


def labelled_artists(panels: Iterable[Axes]) -> dict[str, Artist]:
    """Return the labelled artists of all panels, by label."""
    return {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}


def legend_columns(variants: Collection[str]) -> int:
    return -(-(len(variants) + EXPLAINED) // MOST_ENTRIES)


def entry(label: str, **style) -> Line2D:
    """Make a legend entry that shows a marker style without data."""
    return Line2D([], [], **({"color": "0.3", "linestyle": "none"} | style), label=label)


def explained(alphas: Iterable[float | None] = (), bars: str = "", grey: str = "") -> list[Line2D]:
    """Make legend entries for hollow markers (decomposition thresholds), error bars and grey markers, if they occur."""
    decomposed = ", ".join(f"{alpha:g}" for alpha in sorted({alpha for alpha in alphas if alpha is not None}))
    entries = [
        (decomposed and HOLLOW.format(decomposed), {"marker": "o", "fillstyle": "none"}),
        (bars, {"marker": "|"}),
        (grey, {"marker": "o", "color": GREY}),
    ]
    return [entry(label, **style) for label, style in entries if label]


# Colour, marker and line of well-known schemes; any other scheme takes the next one of OTHERS.
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


def without_thresholds(variants: Iterable[str]) -> dict[str, str]:
    """Return variants with their names without a threshold α of outliers; two that then have one name keep theirs."""
    names = {variant: THRESHOLD.sub("", variant) for variant in variants}
    return {variant: variant if name in names else name for variant, name in names.items()}


def in_order(variants: Iterable[str]) -> list[str]:
    """Return each variant once: schemes of `SCHEMES` in its order, then others in the given order."""
    names, order = without_thresholds(variants), list(SCHEMES)
    return sorted(names, key=lambda variant: order.index(names[variant]) if names[variant] in order else len(order))


def variant_styles(rows: list[dict]) -> dict[str, dict]:
    """Return matplotlib styles of the variants of rows, in the order of tables; decomposition has hollow markers."""
    names = without_thresholds(row["variant"] for row in rows)
    decomposed = {row["variant"] for row in rows if row.get("alpha") is not None}
    others = itertools.cycle(OTHERS)
    styles = {}
    for variant in in_order(names):
        color, marker, line = STYLES.get(names[variant]) or next(others)
        fill = "none" if variant in decomposed else "full"
        style = {"color": color_of(color), "marker": marker, "linestyle": line, "fillstyle": fill}
        styles[variant] = style | {"label": variant}
    return styles
