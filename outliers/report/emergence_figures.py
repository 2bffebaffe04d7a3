"""Figures 3 and 4 of the paper, and the emergence along the training of the pocket models."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from outliers.criterion import ALPHA
from outliers.experiment.spec import short_name
from outliers.report.emergence import Fit
from outliers.report.style import BLUE, COLORS, MARKERS, VERMILION, bare, parameters_axis, perplexity_axis

AFFECTED = {"layers": ("layers", BLUE, "-"), "positions": ("sequence positions", VERMILION, "--")}
FILLS = {"layers": "full", "positions": "none"}


def figure3(models: pd.DataFrame, fits: dict[str, Fit | None]) -> Figure:
    """Layers and positions that the most common outlier feature affects, (a) by size, (b) by perplexity with the fits.

    models: one row a model, as `outliers.report.table4.by_model` makes it. fits: of "layers" and "positions". Where
    all models are one in several checkpoints, (a) is by training step.
    """
    figure, (by_size, by_perplexity) = _two_panels()
    markers = _markers(models)
    models, size_axis = _with_size(models)
    for name, (label, color, line) in AFFECTED.items():
        for architecture, group in models.groupby("architecture", sort=False):
            style = {"color": color, "marker": markers[architecture], "fillstyle": FILLS[name], "markersize": 5}
            _plot(by_size, group, "size", 100 * group[name], {**style, "linestyle": line, "linewidth": 1})
            _plot(by_perplexity, group, "perplexity", 100 * group[name], {**style, "linestyle": "none"})
        by_size.plot([], [], color=color, linestyle=line, label=label)
        if fits[name]:
            x = np.geomspace(models["perplexity"].min(), models["perplexity"].max(), 200)
            label = f"exp(({fits[name].full:.0f} − ppl) / {fits[name].scale:.0f})"
            by_perplexity.plot(x, 100 * fits[name].at(x), color=color, linestyle=line, linewidth=1, label=label)
    by_size.set(ylim=(-3, 103), ylabel="affected (%)")
    size_axis(by_size)
    perplexity_axis(by_perplexity)
    by_size.legend(frameon=False, fontsize=8, loc="upper left")
    if by_perplexity.get_legend_handles_labels()[0]:
        by_perplexity.legend(frameon=False, fontsize=8, loc="upper left")
    return _finish(figure, (by_size, by_perplexity), markers)


def figure4(models: pd.DataFrame) -> Figure:
    """(a) Median magnitude of the most common outlier feature and (b) number of outlier features, by perplexity.

    In (a), hollow markers are of models in which no feature is an outlier by the criterion, but some value is.
    """
    figure, (magnitude, number) = _two_panels(sharey=False)
    markers = _markers(models)
    for architecture, group in models.groupby("architecture", sort=False):
        style = {"color": BLUE, "marker": markers[architecture], "markersize": 5}
        _plot(number, group, "perplexity", group["count"], {**style, "linestyle": "none"})
        for fill, part in (("full", group[group["count"] > 0]), ("none", group[group["count"] == 0])):
            _plot(
                magnitude, part, "perplexity", part["median"].abs(), {**style, "linestyle": "none", "fillstyle": fill}
            )
    magnitude.axhline(ALPHA, color="black", linewidth=0.6, linestyle=":")
    magnitude.set_ylabel("median |x| of the most common outlier")
    number.set(ylabel="outlier features", ylim=(-0.2, None))
    number.yaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (magnitude, number):
        axes.set_xlim(models["perplexity"].min() * 0.93, models["perplexity"].max() * 1.07)
        perplexity_axis(axes)
    return _finish(figure, (magnitude, number), markers)


def emergence_along_training(checkpoints: pd.DataFrame) -> Figure:
    """Largest hidden state and perplexity of models along their training (columns as in `pocket/emergence.csv`)."""
    figure, (by_step, by_perplexity) = _two_panels()
    for number, (model, points) in enumerate(checkpoints.groupby("model", sort=False)):
        style = {"color": COLORS[number % 8], "marker": MARKERS[number % 8], "markersize": 4, "linewidth": 1}
        by_step.plot(points["step"], points["max"], label=short_name(model), **style)
        by_perplexity.plot(points["perplexity"], points["max"], **style)
    for axes in (by_step, by_perplexity):
        axes.axhline(ALPHA, color="black", linewidth=0.6, linestyle=":")
    by_step.set(xlabel="training step", ylabel="largest |hidden state|")
    perplexity_axis(by_perplexity)
    bare(by_step, by_perplexity)
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _two_panels(sharey: bool = True) -> tuple[Figure, tuple[Axes, Axes]]:
    figure = Figure(figsize=(7.6, 3.3), layout="constrained")
    return figure, figure.subplots(1, 2, sharey=sharey)


def _with_size(models: pd.DataFrame) -> tuple[pd.DataFrame, Callable[[Axes], None]]:
    """The models with a column `size`, and what draws its axis: parameters, or steps where all have as many."""
    if models["parameters"].nunique() > 1 or models["checkpoint"].isna().any():
        return models.assign(size=models["parameters"]), parameters_axis
    steps = models["checkpoint"].str.extract(r"(\d+)$", expand=False).astype(float)
    if steps.isna().any():
        return models.assign(size=range(1, len(models) + 1)), lambda axes: axes.set_xlabel("checkpoint")
    return models.assign(size=steps), lambda axes: axes.set_xlabel("training step")


def _plot(axes: Axes, group: pd.DataFrame, column: str, values: pd.Series, style: dict) -> None:
    order = group[column].argsort()
    axes.plot(group[column].iloc[order], values.iloc[order], **style)


def _markers(models: pd.DataFrame) -> dict[str, str]:
    return dict(zip(models["architecture"].unique(), MARKERS, strict=False))


def _finish(figure: Figure, panels: tuple[Axes, Axes], markers: dict[str, str]) -> Figure:
    """Letters on the panels, and a legend of the architectures where there are several."""
    for letter, axes in zip("ab", panels, strict=True):
        axes.set_title(f"({letter})", loc="left", fontsize=9)
    bare(*panels)
    if len(markers) > 1:
        handles = [Line2D([], [], color="black", marker=m, linestyle="none", markersize=5) for m in markers.values()]
        figure.legend(handles, list(markers), loc="outside lower center", ncols=len(markers), frameon=False, fontsize=8)
    return figure
