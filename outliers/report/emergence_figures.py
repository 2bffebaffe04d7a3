"""Figures 3 and 4 of the paper, and the emergence along the training of the pocket models."""

from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from outliers.criterion import ALPHA
from outliers.models.names import short_name
from outliers.report.emergence import Fit, fits_of
from outliers.report.style import BLUE, COLORS, GREY, MARKERS, VERMILION, bare, parameters_axis, perplexity_axis

AFFECTED = {"layers": ("layers", BLUE, "-"), "positions": ("sequence positions", VERMILION, "--")}
FILLS = {"layers": "full", "positions": "none"}


def figure3(models: pd.DataFrame, fits: dict[str, Fit | None]) -> Figure:
    """Layers and positions that the most common outlier feature affects, (a) by size, (b) by perplexity with the fits.

    models: one row a model, as `outliers.report.table4.by_model` makes it. fits: of "layers" and "positions". Where
    all models are one in several checkpoints, (a) is by training step.
    """
    figure, panels = _panels(2, sharey=True)
    _affected_by_size(panels[0], models)
    _affected_by_perplexity(panels[1], models, fits)
    panels[1].set_ylabel("")
    return _finish(figure, panels, models, "ab")


def figure3a(models: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Panel (a) of Figure 3 alone, beside published models (`outliers.report.paper.published_models`)."""
    figure, (axes,) = _panels(1)
    _publish(axes, published, "parameters", 100 * published[list(AFFECTED)])
    _affected_by_size(axes, models)
    return _finish(figure, [axes], models)


def figure3b(models: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Panel (b) of Figure 3 alone, beside published models."""
    figure, (axes,) = _panels(1)
    _publish(axes, published, "perplexity", 100 * published[list(AFFECTED)])
    _affected_by_perplexity(axes, models, fits_of(models))
    return _finish(figure, [axes], models)


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
    figure, (axes,) = _panels(1)
    _publish(axes, published, "perplexity", published[["median"]].abs())
    _magnitude(axes, models)
    _whole_perplexity_axis(axes, pd.concat([models["perplexity"], published["perplexity"]]))
    return _finish(figure, [axes], models)


def figure4b(models: pd.DataFrame, published: pd.DataFrame) -> Figure:
    """Panel (b) of Figure 4 alone, beside published models."""
    figure, (axes,) = _panels(1)
    _publish(axes, published, "perplexity", published[["count"]])
    _number(axes, models)
    _whole_perplexity_axis(axes, pd.concat([models["perplexity"], published["perplexity"]]))
    return _finish(figure, [axes], models)


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


def _publish(axes: Axes, published: pd.DataFrame, column: str, values: pd.DataFrame) -> None:
    """Published models in grey, under all else."""
    for name, fill in zip(values, ("full", "none"), strict=False):
        style = {"color": GREY, "marker": "o", "fillstyle": fill, "markersize": 4, "linestyle": "none", "zorder": 1}
        label = f"published{f' {name}' if len(values.columns) > 1 else ''}"
        axes.plot(published[column], values[name], label=label, **style)


def emergence_along_training(checkpoints: pd.DataFrame) -> Figure:
    """Largest hidden state and perplexity of models along their training (columns as in `pocket/emergence.csv`)."""
    figure, (by_step, by_perplexity) = _panels(2, sharey=True)
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
    return dict(zip(models["architecture"].unique(), MARKERS, strict=False))


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
