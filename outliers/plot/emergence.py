"""Figures 3 and 4 of the paper, and the exponential of Figure 3b."""

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from scipy.optimize import curve_fit
from scipy.stats import t

from outliers.plot.style import BLUE, GREY, MARKERS, VERMILION, bare, parameters_axis, perplexity_axis

AFFECTED = {"layers": ("layers", BLUE, "-"), "positions": ("sequence positions", VERMILION, "--")}
FILLS = {"layers": "full", "positions": "none"}


class Fit(NamedTuple):
    """fraction = exp((full − perplexity) / scale), by least squares over points.

    full: the perplexity at which the fraction reaches 1. scale: by how much perplexity falls while the fraction grows
    e-fold. Each with its 95 % interval (Student's t on the standard error).
    """

    full: float
    full_interval: tuple[float, float]
    scale: float
    scale_interval: tuple[float, float]
    points: int

    def at(self, perplexity):
        """The fraction at a perplexity, not above 1."""
        return np.minimum(1, np.exp((self.full - np.asarray(perplexity)) / self.scale))


def exponential_fit(perplexity: Iterable[float], fraction: Iterable[float]) -> Fit | None:
    """Fit how a fraction of layers or positions affected grows with falling perplexity (LLM.int8(), section 4.2).

    Models of which either is not known are left out.

    Returns:
        None where there is nothing to fit: fewer than three points, fewer than two of them above 0, a fraction that
        does not grow, or an interval without end.
    """
    x, y = np.asarray(list(perplexity), float), np.asarray(list(fraction), float)
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    positive = y > 0
    if len(x) < 3 or len(np.unique(x[positive])) < 2:
        return None
    try:
        slope, intercept = np.polyfit(x[positive], np.log(y[positive]), 1)
        if slope >= 0:
            return None
        found, covariance = curve_fit(
            lambda x, full, scale: np.exp((full - x) / scale), x, y, (-intercept / slope, -1 / slope), maxfev=10_000
        )
    except (RuntimeError, np.linalg.LinAlgError):  # it found no minimum
        return None
    reach = t.ppf(0.975, len(x) - 2) * np.sqrt(np.diag(covariance))
    if not np.isfinite(reach).all() or found[1] <= 0:
        return None
    (full, scale), (of_full, of_scale) = found.tolist(), reach.tolist()
    return Fit(full, (full - of_full, full + of_full), scale, (scale - of_scale, scale + of_scale), len(x))


def fits_of(models: pd.DataFrame) -> dict[str, Fit | None]:
    """The exponential for layers and for positions; models: as `by_model` of Table 4 makes them.

    Of models that read other tokens than most, because they have another vocabulary, perplexities do not compare: they
    are left out.
    """
    if "tokens_hash" in models and models["tokens_hash"].notna().any():
        models = models[models["tokens_hash"] == models["tokens_hash"].mode()[0]]
    return {name: exponential_fit(models["perplexity"], models[name]) for name in ("layers", "positions")}


def figure3(models: pd.DataFrame, fits: dict[str, Fit | None]) -> Figure:
    """Layers and positions that the most common outlier feature affects, (a) by size, (b) by perplexity with the fits.

    models: one row a model, as `by_model` of Table 4 makes it. fits: of "layers" and "positions". Where all models are
    one in several checkpoints, (a) is by training step.
    """
    figure, panels = _panels(2, sharey=True)
    _affected_by_size(panels[0], models)
    _affected_by_perplexity(panels[1], models, fits)
    panels[1].set_ylabel("")
    return _finish(figure, panels, models, "ab")


def figure3a(models: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Panel (a) of Figure 3 alone, beside published models (`published_models` of Table 4)."""
    return _panel(_affected_by_size, models, published, "parameters", 100 * published[list(AFFECTED)])


def figure3b(models: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Panel (b) of Figure 3 alone, beside published models."""
    draw = functools.partial(_affected_by_perplexity, fits=fits_of(models))
    return _panel(draw, models, published, "perplexity", 100 * published[list(AFFECTED)])


def _affected_by_size(axes: Axes, models: pd.DataFrame) -> None:
    models, size_axis = _with_size(models)
    for name, (label, color, line) in AFFECTED.items():
        _plot_affected(axes, models, "size", name, {"linestyle": line, "linewidth": 1})
        axes.plot([], [], color=color, linestyle=line, label=label)
    axes.set(ylim=(-3, 103), ylabel="affected (%)")
    size_axis(axes)


def _affected_by_perplexity(axes: Axes, models: pd.DataFrame, fits: dict[str, Fit | None]) -> None:
    for name, (label, color, line) in AFFECTED.items():
        _plot_affected(axes, models, "perplexity", name, {"linestyle": "none"})
        x = np.geomspace(models["perplexity"].min(), models["perplexity"].max(), 200)
        fit = fits[name]
        if fit:
            label = f"exp(({fit.full:.0f} − ppl) / {fit.scale:.0f})".replace("-", "−")
        axes.plot(x, 100 * fit.at(x) if fit else x * np.nan, color=color, linestyle=line, linewidth=1, label=label)
    axes.set(ylim=(-3, 103), ylabel="affected (%)")
    perplexity_axis(axes)


def _plot_affected(axes: Axes, models: pd.DataFrame, column: str, name: str, style: dict) -> None:
    markers = _markers(models)
    style = {"color": AFFECTED[name][1], "fillstyle": FILLS[name], "markersize": 5, **style}
    for architecture, group in models.groupby("architecture", sort=False):
        _plot(axes, group, column, 100 * group[name], {"marker": markers[architecture], **style})


def figure4(models: pd.DataFrame) -> Figure:
    """(a) Median magnitude of the most common outlier feature and (b) number of outlier features, by perplexity.

    In (a), hollow markers are of models in which no feature is an outlier by the criterion, but some value is.
    """
    figure, panels = _panels(2)
    _magnitude(panels[0], models)
    _number(panels[1], models)
    for axes in panels:
        _whole_perplexity_axis(axes, models["perplexity"])
    return _finish(figure, panels, models, "ab")


def figure4a(models: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Panel (a) of Figure 4 alone, beside published models."""
    return _panel(_magnitude, models, published, "perplexity", published[["median"]].abs(), whole=True)


def figure4b(models: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Panel (b) of Figure 4 alone, beside published models."""
    return _panel(_number, models, published, "perplexity", published[["count"]], whole=True)


def _magnitude(axes: Axes, models: pd.DataFrame) -> None:
    style = {"color": BLUE, "markersize": 5, "linestyle": "none"}
    for architecture, group in models.groupby("architecture", sort=False):
        for fill, part in (("full", group[group["count"] > 0]), ("none", group[group["count"] == 0])):
            marker = {"marker": _markers(models)[architecture], "fillstyle": fill}
            _plot(axes, part, "perplexity", part["median"].abs(), style | marker)
    for alpha in models["alpha"].dropna().unique():
        axes.axhline(alpha, color="black", linewidth=0.6, linestyle=":")
    axes.set_ylabel("median |x|, most common outlier")


def _number(axes: Axes, models: pd.DataFrame) -> None:
    style = {"color": BLUE, "markersize": 5, "linestyle": "none"}
    for architecture, group in models.groupby("architecture", sort=False):
        _plot(axes, group, "perplexity", group["count"], style | {"marker": _markers(models)[architecture]})
    axes.set(ylabel="outlier features", ylim=(-0.2, None))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _whole_perplexity_axis(axes: Axes, perplexity: pd.Series) -> None:
    """Over all models, also those that have no point."""
    axes.set_xlim(perplexity.min() * 0.93, perplexity.max() * 1.07)
    perplexity_axis(axes)


def _publish(axes: Axes, x: pd.Series, values: pd.DataFrame) -> None:
    """Published models in grey, under all else."""
    for name, fill in zip(values, ("full", "none"), strict=False):
        style = {"color": GREY, "marker": "o", "fillstyle": fill, "markersize": 4, "linestyle": "none", "zorder": 1}
        label = f"published{f' {name}' if len(values.columns) > 1 else ''}"
        axes.plot(x, values[name], label=label, **style)


def _panel(
    draw: Callable[..., None], models: pd.DataFrame, published: pd.DataFrame, x: str, y: pd.DataFrame, whole=False
) -> Figure:
    """One panel alone, over published models; whole: its axis of perplexities is over all models."""
    figure, (axes,) = _panels(1)
    _publish(axes, published[x], y)
    draw(axes, models)
    if whole:
        _whole_perplexity_axis(axes, pd.concat([models["perplexity"], published["perplexity"]]))
    return _finish(figure, [axes], models)


def _panels(count: int, sharey: bool = False) -> tuple[Figure, list[Axes]]:
    width = 5.6 if count == 1 else 3.8 * count  # a panel alone has its legend beside it
    figure = Figure(figsize=(width, 3.3), layout="constrained")
    return figure, list(figure.subplots(1, count, sharey=sharey, squeeze=False)[0])


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
    return dict(zip(models["architecture"].unique(), itertools.cycle(MARKERS), strict=False))


def _finish(figure: Figure, panels: list[Axes], models: pd.DataFrame, letters: str = "") -> Figure:
    """Letters on the panels, and legends: of what is drawn, and of the architectures where there are several."""
    bare(*panels)
    markers = _markers(models) if models["architecture"].nunique() > 1 else {}
    handles = [
        Line2D([], [], color="black", marker=marker, linestyle="none", markersize=5, label=name)
        for name, marker in markers.items()
    ]
    style = {"frameon": False, "fontsize": 8}
    if not letters:
        drawn, _ = panels[0].get_legend_handles_labels()
        figure.legend(handles=drawn + handles, loc="outside right upper", **style)
        return figure
    for letter, axes in zip(letters, panels, strict=True):
        axes.set_title(f"({letter})", loc="left", fontsize=9)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="upper left", **style)
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), **style)
    return figure
