"""What a trace shows, drawn."""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from outliers.plot.style import BLACK, BLUE, GREEN, GREY, HEAT, MARKERS, ORANGE, SEQUENTIAL, VERMILION, bare, log_axis

if TYPE_CHECKING:
    from outliers.tracing.result import Trace


READERS = {
    "attn_in": "q, k, v",
    "attn_out": "the attention output",
    "ffn_in": "the feed-forward layer",
    "ffn_out": "the feed-forward output",
}
FEATURE_AXIS = {"attn_out": "feature of the concatenated heads", "ffn_out": "feed-forward unit"}  # others: "feature"
COLUMNS = 1024  # of a heat map; more features share columns, each of which shows its largest
FAINTEST = 0.01  # share of the values that have the darkest colour, or lie below a logarithmic axis
COLORS = 1024
STEP = (0.4, 0.65)  # shades of the largest value below the threshold and of the threshold
DIGIT = 0.014  # of a panel's width takes one of a feature's number
LINES = 4


def heat_map(trace: "Trace") -> Figure:
    """Layer × feature: the largest |x|, on one logarithmic scale; one panel a role; outlier features are numbered."""
    figure = Figure(figsize=(7.2, 0.6 + 1.15 * len(trace.roles) + 0.04 * trace.layers), layout="constrained")
    panels = figure.subplots(len(trace.roles), 1, squeeze=False)[:, 0]
    largest = {role: trace.largest(role).numpy() for role in trace.roles}
    norm = LogNorm(*_bounds(trace, largest.values()), clip=True)
    colors = _lighter_from(norm(trace.alpha))
    outliers, stream = _outliers(trace), _stream(trace)
    places = trace.largest_values().to_dict("records")
    for axes, (role, values), place in zip(panels, largest.items(), places, strict=True):
        extent = (-0.5, values.shape[1] - 0.5, trace.layers - 0.5, -0.5)
        style = {"aspect": "auto", "interpolation": "nearest", "cmap": colors, "norm": norm, "extent": extent}
        image = axes.imshow(_pooled(values), **style)
        axes.set_title(f"{role}: into {READERS[role]}", loc="left", fontsize=9)
        said = "at most {max:,.1f}: layer {layer}, feature {feature}".format(**place)
        axes.set_title(said, loc="right", fontsize=8)
        axes.set_xlabel(FEATURE_AXIS.get(role, "feature"), fontsize=8, labelpad=1)
        axes.tick_params(labelsize=8)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        if role in stream and outliers:
            _number(axes, outliers, values.shape[1])
    figure.supylabel("layer", fontsize=9)
    style = {"aspect": 10 * len(panels), "extend": "min", "extendfrac": 0.1 / len(panels)}
    bar = figure.colorbar(image, ax=list(panels), label="largest |x|, log scale", **style)
    log_axis(bar.ax.yaxis, norm.vmin, norm.vmax)
    style = {"xycoords": ("axes fraction", "data"), "fontsize": 9, "ha": "right", "va": "center"}
    bar.ax.annotate("α", (-0.2, trace.alpha), **style)
    return figure


def _bounds(trace: "Trace", largest: Iterable[np.ndarray]) -> tuple[float, float]:
    """Between which a logarithmic scale shows values and the threshold: without the faintest ones, such as zeros."""
    values = np.concatenate([of_role.ravel() for of_role in largest])
    high = max(trace.alpha, values.max())
    low = np.quantile(values[values > 0], FAINTEST) if values.any() else high
    return min(low, trace.alpha / 2), high


def _lighter_from(share: float) -> ListedColormap:
    """Colours with a step where this share of a scale is passed: hits stand out, whatever the scale spans."""
    count = round(share * COLORS)
    shades = np.concatenate([np.linspace(0, STEP[0], count), np.linspace(STEP[1], 1, COLORS - count)])
    return ListedColormap(colormaps[HEAT](shades))


def _pooled(values: np.ndarray) -> np.ndarray:
    """At most `COLUMNS` columns of (layers, features), each the largest of neighbours."""
    share = -(-values.shape[1] // COLUMNS)
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % share)))
    return padded.reshape(len(values), -1, share).max(2)


def _number(axes: Axes, features: list[int], width: int) -> None:
    """Write the numbers of features above a panel, the first ones where they are close to each other."""
    numbered: list[int] = []
    for feature in features:
        if all(abs(feature - other) > DIGIT * len(str(width)) * width for other in numbered):
            numbered.append(feature)
    above = axes.secondary_xaxis("top")
    above.set_xticks(numbered, map(str, numbered), fontsize=7, color=VERMILION)
    above.tick_params(color=VERMILION, length=3, pad=1)


def _stream(trace: "Trace") -> list[str]:
    """Of the roles that were traced those on the features of the residual stream."""
    from outliers.tracing.result import STREAM

    return [role for role in STREAM if role in trace.roles]


def _outliers(trace: "Trace") -> list[int]:
    """The outlier features, the most common first."""
    return trace.outlier_features()["feature"].tolist() if _stream(trace) else []


def magnitude_by_position(trace: "Trace") -> Figure:
    """Largest |x| over the layers at each position, averaged over sequences, of the most common outlier features
    (without one, of the feature that comes nearest) beside the median feature."""
    of_roles = [trace.statistics[f"{role}.magnitude"] for role in _stream(trace)]
    means = functools.reduce(lambda one, other: one.maximum(other), of_roles) / trace.sequences
    features = _outliers(trace)[:LINES] or trace.features()["feature"].tolist()[:1]
    figure = Figure(figsize=(5.2, 3.0), layout="constrained")
    axes = figure.subplots()
    styles = zip(features, (BLACK, BLUE, ORANGE, GREEN), ("-", "--", "-.", ":"), strict=False)
    for feature, color, line in styles:
        axes.plot(means[:, feature], color=color, linestyle=line, linewidth=1, label=f"feature {feature}")
    axes.plot(means.median(1).values, color=GREY, linewidth=1, label="median feature")
    _threshold(axes, trace)
    axes.set(xlabel="position in the sequence (tokens)", ylabel="largest |x| over the layers", ylim=(0, None))
    figure.legend(loc="outside upper center", frameon=False, fontsize=8, ncols=LINES + 1, columnspacing=1)
    bare(axes)
    return figure


def sorted_profile(trace: "Trace") -> Figure:
    """Largest |x| of each feature, sorted, one line a layer: outliers stand above the rest at the left."""
    largest = {role: trace.largest(role).sort(1, descending=True).values.numpy() for role in trace.roles}
    low, high = _bounds(trace, largest.values())
    columns = min(2, len(largest))
    figure = Figure(figsize=(7.2, 0.4 + 2.2 * -(-len(largest) // columns)), layout="constrained")
    panels = figure.subplots(-(-len(largest) // columns), columns, sharey=True, squeeze=False).ravel()
    for axes in panels[len(largest) :]:
        axes.remove()
    shades = ScalarMappable(Normalize(0, max(trace.layers - 1, 1)), SEQUENTIAL)
    for axes, (role, profiles) in zip(panels, largest.items(), strict=False):
        ranks = range(1, profiles.shape[1] + 1)
        for layer, profile in enumerate(profiles):
            marker = {"marker": MARKERS[layer % len(MARKERS)], "markevery": [0], "markersize": 3}
            axes.plot(ranks, profile, color=shades.to_rgba(layer), linewidth=1, **marker)
        _threshold(axes, trace)
        axes.set(xscale="log", yscale="log", ylim=(low, 1.5 * high))
        axes.set_title(f"{role}: into {READERS[role]}", loc="left", fontsize=9)
        axes.tick_params(labelsize=8)
        log_axis(axes.xaxis, 1, profiles.shape[1])
        log_axis(axes.yaxis, low, high)
    figure.supxlabel("rank of the feature", fontsize=9)
    figure.supylabel("largest |x| of the feature", fontsize=9)
    figure.colorbar(shades, ax=list(panels[: len(largest)]), label="layer", ticks=MaxNLocator(integer=True), aspect=40)
    bare(*panels)
    return figure


def _threshold(axes: Axes, trace: "Trace") -> None:
    axes.axhline(trace.alpha, color="black", linewidth=0.6, linestyle=":")
    axes.annotate(
        f"α = {trace.alpha:g}",
        (1, trace.alpha),
        (0, 1.5),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        fontsize=7,
        ha="right",
        va="bottom",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.7, "pad": 0},
    )
