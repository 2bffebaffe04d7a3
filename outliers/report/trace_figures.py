"""Figures of one trace."""

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from outliers.report.style import BLACK, BLUE, GREEN, GREY, MARKERS, ORANGE, SEQUENTIAL, VERMILION, bare
from outliers.tracing.result import STREAM, Trace

READERS = {"attn_in": "into q, k, v", "attn_out": "into the attention output", "ffn_in": "into the feed-forward layer"}
COLUMNS = 1024  # of a heat map; more features share columns, each of which shows its largest
LINES = 4


def heat_map(trace: Trace) -> Figure:
    """Layer × feature: the largest |x|, one panel a role; outlier features are named above."""
    figure = Figure(figsize=(7.2, 1.0 + 1.1 * len(trace.roles) + 0.04 * trace.layers), layout="constrained")
    panels = figure.subplots(len(trace.roles), 1, squeeze=False)[:, 0]
    largest = {role: trace.largest(role) for role in trace.roles}
    norm = Normalize(0, max(trace.alpha, *(values.max().item() for values in largest.values())))
    outliers = _outliers(trace)
    for axes, (role, values) in zip(panels, largest.items(), strict=True):
        extent = (-0.5, values.shape[1] - 0.5, trace.layers - 0.5, -0.5)
        style = {"aspect": "auto", "interpolation": "nearest", "cmap": SEQUENTIAL, "norm": norm, "extent": extent}
        image = axes.imshow(_pooled(values), **style)
        axes.set_ylabel("layer")
        axes.set_title(f"{role}: {READERS[role]}", loc="left", fontsize=9)
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        if role in STREAM and outliers:
            above = axes.secondary_xaxis("top")
            above.set_xticks(outliers, map(str, outliers), fontsize=7, color=VERMILION)
            above.tick_params(color=VERMILION, length=3)
    panels[-1].set_xlabel("feature")
    bar = figure.colorbar(image, ax=list(panels), label="largest |x|", aspect=30)
    bar.ax.axhline(trace.alpha, color=VERMILION, linewidth=1.5)
    return figure


def _pooled(values: torch.Tensor) -> np.ndarray:
    """At most `COLUMNS` columns of (layers, features), each the largest of neighbours."""
    share = -(-values.shape[1] // COLUMNS)
    missing = -values.shape[1] % share
    padded = torch.nn.functional.pad(values, (0, missing))
    return padded.view(len(values), -1, share).amax(2).numpy()


def _outliers(trace: Trace) -> list[int]:
    """The outlier features, the most common first."""
    return trace.outlier_features()["feature"].tolist() if set(STREAM) & set(trace.roles) else []


def magnitude_by_position(trace: Trace) -> Figure:
    """Largest |x| over the layers at each position, averaged over sequences, of the most common outlier features
    (without one, of the feature that comes nearest) beside the median feature."""
    means = torch.stack([trace.statistics[f"{role}.magnitude"] for role in STREAM]).amax(0) / trace.sequences
    features = _outliers(trace)[:LINES] or trace.features()["feature"].tolist()[:1]
    figure = Figure(figsize=(5.2, 3.0), layout="constrained")
    axes = figure.subplots()
    styles = zip(features, (BLACK, BLUE, ORANGE, GREEN), ("-", "--", "-.", ":"), strict=False)
    for feature, color, line in styles:
        axes.plot(means[:, feature], color=color, linestyle=line, linewidth=1, label=f"feature {feature}")
    axes.plot(means.median(1).values, color=GREY, linewidth=1, label="median feature")
    _threshold(axes, trace)
    axes.set(xlabel="position in the sequence (tokens)", ylabel="largest |x| over layers", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8, ncols=2)
    bare(axes)
    return figure


def sorted_profile(trace: Trace) -> Figure:
    """Largest |x| of each feature, sorted, one line a layer: outliers stand above the rest at the left."""
    roles = [role for role in STREAM if role in trace.roles]
    figure = Figure(figsize=(7.2, 3.0), layout="constrained")
    panels = figure.subplots(1, len(roles), sharey=True, squeeze=False)[0]
    shades = ScalarMappable(Normalize(0, max(trace.layers - 1, 1)), SEQUENTIAL)
    for axes, role in zip(panels, roles, strict=True):
        profiles = trace.largest(role).sort(1, descending=True).values
        ranks = range(1, profiles.shape[1] + 1)
        for layer, profile in enumerate(profiles):
            marker = {"marker": MARKERS[layer % len(MARKERS)], "markevery": [0], "markersize": 3}
            axes.plot(ranks, profile, color=shades.to_rgba(layer), linewidth=1, **marker)
        _threshold(axes, trace)
        axes.set(xscale="log", yscale="log", xlabel="rank of the feature")
        axes.set_title(f"{role}: {READERS[role]}", loc="left", fontsize=9)
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(ScalarFormatter())
        axes.xaxis.set_major_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=7)
    panels[0].set_ylabel("largest |x| of the feature")
    figure.colorbar(shades, ax=list(panels), label="layer", ticks=MaxNLocator(integer=True))
    bare(*panels)
    return figure


def _threshold(axes: Axes, trace: Trace) -> None:
    axes.axhline(trace.alpha, color="black", linewidth=0.6, linestyle=":")
    axes.annotate(
        f"α = {trace.alpha:g}",
        (1, trace.alpha),
        xycoords=("axes fraction", "data"),
        fontsize=7,
        ha="right",
        va="bottom",
    )
