"""Figures of a trace."""

import functools
from collections.abc import Iterable
from itertools import pairwise
from typing import TYPE_CHECKING

import matplotlib
import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, LogNorm, Normalize
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import MaxNLocator

from outliers.metrics.keys import AFTER, BEFORE
from outliers.show.axes import log_axis, threshold
from outliers.show.legends import legend
from outliers.show.style import GREY, SEQUENTIAL, chosen, color_of, figure_function, panels_of
from outliers.show.value import Rows, records

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
SIDES = {BEFORE: "as projections put them out", AFTER: "as attention multiplies them"}
KEYS = {  # panels of a map of channels
    "keys before": ("keys", BEFORE),
    "keys": ("keys", AFTER),
    "values before": ("values", BEFORE),
    "values": ("values", AFTER),
}
HEADS_NUMBERED = 16  # at most
TINY = 1e-30  # in the place of a median of 0
STANDS_OUT, OFTEN = 3, 0.1  # times the median channel of its head: a channel; of the layers: one that is numbered
LEAST = 0.5  # of a map of channels: times the median, below which all have the darkest colour
BESIDE = 2  # positions before the patches in a line of a title


@figure_function
def heat_map(trace: "Trace", *, role: str | None = None, ax: Axes | None = None) -> Axes | np.ndarray:
    """Layer × feature: the largest |x|, on one logarithmic scale with a step at α, so that hits stand out.

    Outlier features are numbered above the roles of the residual stream. The hundredth part of the values that is
    smallest, such as zeros, has the darkest colour; where there are more than 1,024 features, neighbours share a column
    that shows their largest.

    Example:
        >>> panels = outliers.plot.heat_map(outliers.trace(model, blocks, alpha=3))

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
            _number(axes, dict(zip(outliers, outliers, strict=True)), values.shape[1])
    style = {"aspect": 10 * len(roles), "extend": "min", "extendfrac": 0.1 / len(roles)}
    bar = axes.figure.colorbar(image, ax=list(panels.flat), **style)
    bar.set_label(f"largest |x|, logarithmic;\nbelow {norm.vmin:.2g} darkest")
    log_axis(bar.ax.yaxis, norm.vmin, norm.vmax)
    style = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center", "fontsize": "small"}
    bar.ax.annotate(f"α = {trace.alpha:g}", (-0.2, trace.alpha), **style)
    return panels[:, 0]


def _bounds(trace: "Trace", largest: Iterable[np.ndarray]) -> tuple[float, float]:
    """Between which a logarithmic scale shows values and the threshold: without the faintest ones, such as zeros."""
    values = np.concatenate([values.ravel() for values in largest])
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


def _number(axes: Axes, features: dict[int, int], width: int) -> None:
    """Write numbers above a panel at places, the first ones where they are close to each other."""
    points = 72 * axes.bbox.width / axes.figure.dpi
    digit = DIGIT * FontProperties(size="small").get_size_in_points() / points
    numbered: list[int] = []
    for place in features:
        if all(abs(place - other) > digit * len(str(width)) * width for other in numbered):
            numbered.append(place)
    above = axes.secondary_xaxis("top")
    above.set_xticks(numbered, [str(features[at]) for at in numbered], fontsize="small", color=color_of("vermilion"))
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
    by_role = [trace.statistics[f"{role}.magnitude"] for role in stream_roles(trace)]
    sequences = trace.statistics["text.sequences"][:, None]  # that reach each position
    return functools.reduce(lambda first, second: first.maximum(second), by_role) / sequences


@figure_function
def magnitude_by_position(trace: "Trace", *, ax: Axes | None = None) -> Axes:
    """Largest |x| over the layers at each position, averaged over sequences, of the most common outlier features
    (without one, of the feature that comes nearest) beside the median feature.

    Example:
        >>> axes = outliers.plot.magnitude_by_position(outliers.trace(model, blocks, alpha=3))

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
        means_of_patches = means[len(means) - rows * columns :, feature].reshape(rows, columns)
        image = axes.imshow(means_of_patches, cmap=SEQUENTIAL, vmin=0, vmax=high)
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

    Example:
        >>> panels = outliers.plot.sorted_profile(outliers.trace(model, blocks, alpha=3))

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


@figure_function
def key_map(rows: Rows, *, role: str | None = None, ax: Axes | None = None) -> Axes | np.ndarray:
    """Layer × channel of the concatenated heads: the largest |key| and |value| beside the median channel of the head.

    Channels that exceed three times the median in a tenth of the layers are numbered above, within their head. All
    panels are on one logarithmic scale, which begins at half the median; what is below has the darkest colour. Lines
    are between up to 16 heads. Where there are more than 1,024 channels, neighbours share a column that shows their
    largest.

    Example:
        >>> panels = outliers.plot.key_map(outliers.frame("results/kept/keys"))

    Args:
        rows: of the metric `keys`, of one model under one variant.
        role: the one panel to draw, "keys before", "keys", "values before" or "values"; by default one for each that
            was measured: before is there where attention multiplies something else than projections put out.
    """
    maps = {name: ratios for name, place in KEYS.items() if len(ratios := key_ratios(rows, *place))}
    roles = chosen("role", role, maps, ax)
    layers = len(next(iter(maps.values())))
    panels = panels_of(ax, len(roles), 1, (7.2, max(2, 0.6 + (0.9 + 0.025 * layers) * len(roles))), sharex=True)
    norm = LogNorm(LEAST, max(2, *(maps[name].to_numpy().max() for name in roles)), clip=True)
    for axes, name in zip(panels.flat, roles, strict=True):
        values, heads = maps[name].to_numpy(), maps[name].columns.get_level_values("head")
        extent = (-0.5, values.shape[1] - 0.5, layers - 0.5, -0.5)
        style = {"aspect": "auto", "interpolation": "nearest", "norm": norm, "extent": extent}
        image = axes.imshow(pooled(values, -(-values.shape[1] // COLUMNS)), **style)
        axes.spines[:].set_visible(True)
        axes.grid(False)
        axes.set_title(f"{KEYS[name][0]}, {SIDES[KEYS[name][1]]}", loc="left")
        axes.set_ylabel("layer")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
        _number_heads(axes, heads)
        often = ((values > STANDS_OUT).mean(0) >= OFTEN).nonzero()[0]
        ranked = often[np.argsort(-values.sum(0)[often], kind="stable")].tolist()
        _number(axes, {place: maps[name].columns[place][1] for place in ranked}, values.shape[1])
    axes.set_xlabel("head, channel by channel", labelpad=1)
    bar = axes.figure.colorbar(image, ax=list(panels.flat), aspect=10 * len(roles), extend="min")
    bar.set_label("largest |x| over the median\nchannel's of the head, logarithmic")
    log_axis(bar.ax.yaxis, norm.vmin, norm.vmax)
    return panels[:, 0]


def key_ratios(rows: Rows, role: str, side: str) -> pd.DataFrame:
    """The largest |x| of each channel over the median channel's of its head, layers down, (head, channel) across."""
    by_layer: dict[int, dict] = {}
    for row in records(rows):
        if row["metric"] == "keys.head" and (row["role"], row["side"]) == (role, side):
            ratios = enumerate(np.array(row["magnitudes"]) / max(row["median"], TINY))
            by_layer.setdefault(row["layer"], {}).update({(row["head"], number): ratio for number, ratio in ratios})
    table = pd.DataFrame.from_dict(by_layer, orient="index").sort_index()
    return table.rename_axis(columns=["head", "channel"]) if len(table) else table


def _number_heads(axes: Axes, heads: pd.Index) -> None:
    """The numbers of heads along x, and lines between them where they are few."""
    starts = [place for place in range(len(heads)) if place == 0 or heads[place] != heads[place - 1]]
    for start in starts[1:] if len(starts) <= HEADS_NUMBERED else ():
        axes.axvline(start - 0.5, color="white", linewidth=0.4)
    step = -(-len(starts) // HEADS_NUMBERED)
    middles = [(start + end - 1) / 2 for start, end in pairwise([*starts, len(heads)])]
    axes.set_xticks(middles[::step], [heads[start] for start in starts[::step]])
