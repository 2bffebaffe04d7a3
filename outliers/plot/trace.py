"""What a trace shows, drawn."""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from outliers.plot.axes import log_axis, threshold
from outliers.plot.legends import legend
from outliers.plot.style import GREY, SEQUENTIAL, chosen, color_of, figure_function, panels_of

if TYPE_CHECKING:
    import torch

    from outliers.tracing.result import Trace

READERS = {
    "attn_in": "q, k, v",
    "attn_out": "the attention output",
    "ffn_in": "the feed-forward layer",
    "ffn_out": "the feed-forward output",
    "cross_in": "the queries of cross-attention",
    "cross_kv": "keys and values of cross-attention",
    "cross_out": "the output of cross-attention",
}
HEADS = "feature of the concatenated heads"
FEATURE_AXIS = {"attn_out": HEADS, "cross_out": HEADS, "ffn_out": "feed-forward unit"}  # others: "feature"
COLUMNS = 1024  # of a heat map; more features share columns, each of which shows its largest
FAINTEST = 0.01  # share of the values that have the darkest colour, or lie below a logarithmic axis
COLORS = 1024
STEP = (0.5, 0.75)  # shades of the largest value below the threshold and of the threshold
DIGIT = 0.85  # of the size of its font takes one of a feature's number in width, and some room
LINES = 4
BESIDE = 2  # positions before the patches in a line of a title


@figure_function
def heat_map(trace: "Trace", *, role: str | None = None, ax: Axes | None = None) -> Axes | np.ndarray:
    """Layer × feature: the largest |x|, on one logarithmic scale with a step at α, so that hits stand out.

    Outlier features are numbered above the roles of the residual stream. The hundredth part of the values that is
    smallest, such as zeros, has the darkest colour; where there are more than 1,024 features, neighbours share a column
    that shows their largest.

    Args:
        trace: as `outliers.trace` returns it.
        role: the one panel to draw, "attn_in", "attn_out", "ffn_in" or "ffn_out"; by default one for each that was
            traced.
    """
    roles = chosen("role", role, trace.roles, ax)
    panels = panels_of(ax, len(roles), 1, (7.2, max(2, 0.6 + (1.15 + 0.01 * trace.layers) * len(roles))))
    largest = {role: trace.largest(role).numpy() for role in roles}
    norm = LogNorm(*_bounds(trace, largest.values()), clip=True)
    colors = _lighter_from(norm(trace.alpha))
    outliers, stream = outliers_of(trace), stream_roles(trace)
    places = {place["role"]: place for place in trace.largest_values().to_dict("records")}
    for axes, (role, values) in zip(panels.flat, largest.items(), strict=True):
        extent = (-0.5, values.shape[1] - 0.5, trace.first_layer + trace.layers - 0.5, trace.first_layer - 0.5)
        style = {"aspect": "auto", "interpolation": "nearest", "cmap": colors, "norm": norm, "extent": extent}
        image = axes.imshow(pooled(values, -(-values.shape[1] // COLUMNS)), **style)
        axes.spines[:].set_visible(True)
        axes.grid(False)
        title = f"{role}: into {READERS[role]}"
        most = "at most {max:,.1f}: layer {layer}, feature {feature}".format(**places[role])
        if ax is None:
            axes.set_title(title, loc="left")
            axes.set_title(most, loc="right", fontsize="small")
        else:  # which may be narrow
            axes.set_title(f"{title}\n{most}", loc="left", fontsize="medium")
        axes.set_xlabel(FEATURE_AXIS.get(role, "feature"), labelpad=1)
        axes.set_ylabel("layer")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        if role in stream and outliers:
            _number(axes, outliers, values.shape[1])
    style = {"aspect": 10 * len(roles), "extend": "min", "extendfrac": 0.1 / len(roles)}
    bar = axes.figure.colorbar(image, ax=list(panels.flat), **style)
    bar.set_label(f"largest |x|, logarithmic;\nbelow {norm.vmin:.2g} darkest")
    log_axis(bar.ax.yaxis, norm.vmin, norm.vmax)
    style = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center", "fontsize": "small"}
    bar.ax.annotate(f"α = {trace.alpha:g}", (-0.2, trace.alpha), **style)
    return panels[:, 0]


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
    return ListedColormap(colormaps[matplotlib.rcParams["image.cmap"]](shades))


def pooled(values: np.ndarray, share: int) -> np.ndarray:
    """Columns of (layers, features), each the largest of so many neighbours."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % share)))
    return padded.reshape(len(values), -1, share).max(2)


def _number(axes: Axes, features: list[int], width: int) -> None:
    """Write the numbers of features above a panel, the first ones where they are close to each other."""
    points = 72 * axes.bbox.width / axes.figure.dpi
    digit = DIGIT * FontProperties(size="small").get_size_in_points() / points
    numbered: list[int] = []
    for feature in features:
        if all(abs(feature - other) > digit * len(str(width)) * width for other in numbered):
            numbered.append(feature)
    above = axes.secondary_xaxis("top")
    above.set_xticks(numbered, map(str, numbered), fontsize="small", color=color_of("vermilion"))
    above.tick_params(color=color_of("vermilion"), length=3, pad=1)


def stream_roles(trace: "Trace") -> list[str]:
    """Of the roles that were traced those on the features of the residual stream."""
    from outliers.tracing.statistics import ON_STREAM

    return [role for role in ON_STREAM if role in trace.roles]


def outliers_of(trace: "Trace") -> list[int]:
    """The outlier features, the most common first."""
    return trace.outlier_features()["feature"].tolist() if stream_roles(trace) else []


def magnitudes(trace: "Trace") -> "torch.Tensor":
    """Largest |x| over the layers (positions, features), averaged over sequences."""
    of_roles = [trace.statistics[f"{role}.magnitude"] for role in stream_roles(trace)]
    sequences = trace.statistics["text.sequences"][:, None]  # that reach each position
    return functools.reduce(lambda one, other: one.maximum(other), of_roles) / sequences


@figure_function
def magnitude_by_position(trace: "Trace", *, ax: Axes | None = None) -> Axes:
    """Largest |x| over the layers at each position, averaged over sequences, of the most common outlier features
    (without one, of the feature that comes nearest) beside the median feature.

    Args:
        trace: as `outliers.trace` returns it, with roles of the residual stream.
    """
    means = magnitudes(trace)
    features = outliers_of(trace)[:LINES] or trace.features()["feature"].tolist()[:1]
    axes = panels_of(ax, 1, 1, (5.2, 3.0)).item()
    styles = zip(features, ("black", "blue", "orange", "green"), ("-", "--", "-.", ":"), strict=False)
    for feature, color, line in styles:
        axes.plot(means[:, feature], color=color_of(color), linestyle=line, label=f"feature {feature}")
    axes.plot(means.median(1).values, color=GREY, label="median feature")
    threshold(axes, trace.alpha)
    axes.set(xlabel="position in the sequence (tokens)", ylabel="largest |x| over the layers", ylim=(0, None))
    legend(ax, axes, axes.get_legend_handles_labels()[0], "upper center", 3)
    return axes


@figure_function
def patch_map(trace: "Trace", *, ax: Axes | None = None) -> Axes | np.ndarray:
    """Largest |x| over the layers at each patch, averaged over pictures, as a map over the picture: of the most common
    outlier features (without one, of the feature that comes nearest), with what stands before the patches beside it.

    Args:
        trace: as `outliers.trace` returns it of a vision model with `tokens`, with roles of the residual stream.
    """
    from outliers.tracing.tokens import before_patches, patch_grid

    means, (rows, columns) = magnitudes(trace), patch_grid(trace.names)
    features = outliers_of(trace)[:LINES] or trace.features()["feature"].tolist()[:1]
    if ax is not None:
        features = features[:1]
    names = before_patches(trace.names)
    panels = panels_of(ax, 1, len(features), (2.6 * len(features), 2.9)).ravel()
    high = means[:, features].max().item()
    for axes, feature in zip(panels, features, strict=True):
        of_patches = means[len(means) - rows * columns :, feature].reshape(rows, columns)
        image = axes.imshow(of_patches, cmap=SEQUENTIAL, vmin=0, vmax=high)
        axes.set(xlabel="column of patches", ylabel="row of patches" if axes is panels[0] else "")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        beside = [f"{name} {value:.1f}" for name, value in zip(names, means[:, feature], strict=False)]
        lines = [", ".join(beside[start : start + BESIDE]) for start in range(0, len(beside), BESIDE)]
        axes.set_title("\n".join([f"feature {feature}", *lines]), loc="left", fontsize="small")
    panels[0].figure.colorbar(image, ax=list(panels), label="largest |x| over the layers", shrink=0.7)
    return panels if ax is None else panels.item()


@figure_function
def sorted_profile(trace: "Trace", *, role: str | None = None, ax: Axes | None = None) -> Axes | np.ndarray:
    """Largest |x| of each feature, sorted, one line a layer: outliers stand above the rest at the left.

    The axes are logarithmic; the hundredth part of the values that is smallest lies below them.

    Args:
        trace, role: as for `heat_map`.
    """
    roles = chosen("role", role, trace.roles, ax)
    largest = {role: trace.largest(role).sort(1, descending=True).values.numpy() for role in roles}
    low, high = _bounds(trace, largest.values())
    columns = min(2, len(roles))
    rows = -(-len(roles) // columns)
    panels = panels_of(ax, rows, columns, (3.6 * columns, 0.4 + 2.2 * rows)).ravel()
    for axes in panels[len(roles) :]:
        axes.remove()
    panels = panels[: len(roles)]
    first = trace.first_layer
    shades = ScalarMappable(Normalize(first, first + max(trace.layers - 1, 1)), SEQUENTIAL)
    for axes, (role, profiles) in zip(panels, largest.items(), strict=True):
        ranks = range(1, profiles.shape[1] + 1)
        for layer, profile in enumerate(profiles, first):
            axes.plot(ranks, profile, color=shades.to_rgba(layer))
        threshold(axes, trace.alpha)
        axes.set(xscale="log", yscale="log", ylim=(low, 1.5 * high))
        axes.set(xlabel="rank of the feature", ylabel="largest |x| of the feature")
        axes.set_title(f"{role}: into {READERS[role]}", loc="left")
        log_axis(axes.xaxis, 1, profiles.shape[1])
        log_axis(axes.yaxis, low, high)
    style = {"ticks": MaxNLocator(integer=True), "aspect": 20 * rows}
    axes.figure.colorbar(shades, ax=list(panels), label="layer", **style)
    return panels
