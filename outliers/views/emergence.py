"""Emergence of outlier features along a family of models, as in Table 4 and Figures 3 and 4 of the paper."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from scipy.optimize import curve_fit

from outliers.criterion import ALPHA, CROSS
from outliers.models.names import distinct_names, short_name
from outliers.published.numbers import TABLE4_COLUMNS, published_models
from outliers.show.axes import count_label, parameters_axis, perplexity_axis, threshold
from outliers.show.claims import Claim, say, say_each
from outliers.show.legends import entry, legend
from outliers.show.section import Finding
from outliers.show.style import COLORS, GREY, MARKERS, Panels, brief, chosen, color_of, figure_function, panels_of
from outliers.show.tables import MISSING, Table, scattered, with_interval
from outliers.show.value import BITS, RowsOrFrame, comparable_rows, reach, value_of
from outliers.show.words import amount, count

# Share affected by the most common outlier feature: label, colour, line, fill of markers.
AFFECTED = {"layers": ("layers", "blue", "-", "full"), "positions": ("sequence positions", "vermilion", "--", "none")}
ABOUT = ("parameters", "architecture", "checkpoint", "alpha", "same_weights_as", "tokens_hash")  # fields of rows
SCATTERED = {"perplexity": "value", BITS: BITS}  # column with an error over the text, if rows know it: its field
WHOLE = "whole_model"  # a column shared by a model's stacks
NONE = "hollow: no outlier feature,\nthe one that comes nearest"
ROUNDING = 1e-9  # growth of a logarithm over all models that may be rounding alone, whose sign depends on the processor


def by_model(rows: RowsOrFrame) -> pd.DataFrame:
    """Return one row per model and checkpoint, in the order of the rows.

    Columns are the metrics of `table4_row`, the fields `ABOUT` and `BITS`, and NAME_error with errors of `SCATTERED`.
    An encoder-decoder has one row per stack; all have the same value of `WHOLE`. The index is the model's short name,
    or its full name where two models share the short one, followed by the stack, if there are several.
    """
    rows = comparable_rows(rows)
    wide: dict[tuple, dict] = {}
    names = distinct_names((row["model"], row.get("checkpoint")) for row in rows)
    views = {name: [row["stack"] for row in rows if row["model"] == name[0] and "stack" in row] for name in names}
    for row in rows:
        place = row["model"], row.get("checkpoint")
        for view in [row["stack"]] if "stack" in row else dict.fromkeys(views[place]) or [""]:
            if row.get("ablated", view) == view:
                name = f"{names[place]} ({view})" if view else names[place]
                about = {"model": name, WHOLE: None if view == CROSS else names[place], **dict.fromkeys(ABOUT)}
                model = wide.setdefault((*place, view), about)
                model |= {name: row[name] for name in (*ABOUT, BITS) if name in row} | {column_of(row): row["value"]}
                model |= _errors(row)
    table = pd.DataFrame(wide.values()).set_index("model")
    return table.reindex(columns=list(dict.fromkeys([*table, *TABLE4_COLUMNS])))  # always with the columns of Table 4


def _errors(row: dict) -> dict:
    """Return the known standard errors over the text of a perplexity and bits per byte, or of a top-1 probability."""
    fields = SCATTERED if row["metric"] == "perplexity" else {column_of(row): "value"}
    known = row["metric"] in ("perplexity", "top1_softmax")
    errors = {name: value_of(row, field).error for name, field in fields.items() if known}
    return {f"{name}_error": error for name, error in errors.items() if error is not None}


def column_of(row: dict) -> str:
    """Return the column of Table 4 that a row's metric fills."""
    without = row["metric"] == "top1_softmax" and row.get("features")
    return "top1_softmax_without" if without else row["metric"]


def distinct_models(rows: RowsOrFrame) -> pd.DataFrame:
    """Return one row per model: the first of revisions with the same weights, and one stack of an encoder-decoder.

    It is the stack in which the most common feature affects most positions.
    """
    models = by_model(rows)
    most = models.reset_index().sort_values("positions", ascending=False, kind="stable").drop_duplicates(WHOLE)
    models = models.iloc[sorted(most.index[most[WHOLE].notna()])]
    return models[models["same_weights_as"].isna()]


class Fit(NamedTuple):
    """A least-squares fit of fraction = exp((full − perplexity) / scale).

    full: perplexity at which the fraction reaches 1. scale: decrease of perplexity over which the fraction grows
    e-fold. Each has a 95 % interval (Student's t on the standard error). points: number of models.
    """

    full: float
    full_interval: tuple[float, float]
    scale: float
    scale_interval: tuple[float, float]
    points: int

    @property
    def is_significant(self) -> bool:
        """Whether the data show growth: the interval of the scale excludes 0."""
        return self.scale_interval[0] > 0

    def at(self, perplexity):
        """Return the fraction at a perplexity, at most 1."""
        return np.minimum(1, np.exp((self.full - np.asarray(perplexity)) / self.scale))


def exponential_fit(perplexity: Iterable[float], fraction: Iterable[float]) -> Fit | None:
    """Fit how the fraction of affected layers or positions grows as perplexity falls (LLM.int8(), section 4.2).

    Return None if there is nothing to fit: fewer than three points with both values known, fewer than two different
    perplexities with a fraction above 0, a fraction that does not grow, or an infinite interval.
    """
    x, y = np.asarray(list(perplexity), float), np.asarray(list(fraction), float)
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    positive = y > 0
    if len(x) < 3 or len(np.unique(x[positive])) < 2:
        return None
    try:
        slope, intercept = np.polyfit(x[positive], np.log(y[positive]), 1)
        if slope * np.ptp(x[positive]) > -ROUNDING:
            return None
        estimates, covariance = curve_fit(
            lambda x, full, scale: np.exp((full - x) / scale), x, y, (-intercept / slope, -1 / slope), maxfev=10_000
        )
    except (RuntimeError, np.linalg.LinAlgError):  # the optimizer found no minimum
        return None
    half = reach(np.sqrt(np.diag(covariance)), len(x) - 2)
    if not np.isfinite(half).all() or estimates[1] <= 0:
        return None
    (full, scale), intervals = estimates.tolist(), np.transpose([estimates - half, estimates + half]).tolist()
    return Fit(full, tuple(intervals[0]), scale, tuple(intervals[1]), len(x))


def fits_of(models: pd.DataFrame) -> dict[str, Fit | None]:
    """Return the exponential fits for layers and for positions.

    models: as `by_model` returns them. Models that read other tokens than most do, because of another vocabulary, are
    left out, because their perplexities are not comparable.
    """
    if "tokens_hash" in models and models["tokens_hash"].notna().any():
        models = models[models["tokens_hash"] == models["tokens_hash"].mode()[0]]
    return {name: exponential_fit(models["perplexity"], models[name]) for name in ("layers", "positions")}


@figure_function
def figure3(rows: RowsOrFrame, *, panel: str | None = None, paper: bool = True, ax: Axes | None = None) -> Panels:
    """Draw the layers and positions that the most common outlier feature affects, (a) by size and (b) by perplexity.

    (b) includes the exponentials of `fits_of` whose intervals show growth. If all rows are checkpoints of one model,
    (a) is by training step, without the published models.

    Example:
        >>> panels = outliers.plot.figure3(outliers.frame("results/kept/emergence"))

    Args:
        rows: of an emergence experiment, as for Table 4.
        panel: the one to draw, "a" or "b"; by default both.
        paper: whether to draw the models of the paper (Table 4), in grey.
    """
    return _draw_panels({"a": _affected_by_size, "b": _affected_by_perplexity}, rows, panel, paper, ax)


@figure_function
def figure4(rows: RowsOrFrame, *, panel: str | None = None, paper: bool = True, ax: Axes | None = None) -> Panels:
    """Draw (a) the median magnitude of the most common outlier feature and (b) their number, by perplexity.

    Hollow markers in (a) are models without an outlier feature by the criterion, but with an outlier value.

    Example:
        >>> panels = outliers.plot.figure4(outliers.frame("results/kept/emergence"))

    Args:
        rows, panel, paper: as for `figure3`.
    """
    return _draw_panels({"a": _magnitude, "b": _number}, rows, panel, paper, ax)


def _draw_panels(by_panel: dict[str, Callable], rows: RowsOrFrame, panel: str | None, paper: bool, ax: Axes | None):
    """Draw panels by their functions, which return the handles of their legend."""
    models, drawn = distinct_models(rows), chosen("panel", panel, by_panel, ax)
    markers = _markers(models)
    published = published_models() if paper else published_models().iloc[:0]
    size = (6.4, 3.3) if len(drawn) == 1 else (3.8 * len(drawn), 4.4)  # a single panel has its legend at its side
    panels = panels_of(ax, 1, len(drawn), size)[0]
    for axes, name in zip(panels, drawn, strict=True):
        handles = by_panel[name](axes, models, published)
        if len(markers) > 1:
            handles += [entry(architecture, marker=marker) for architecture, marker in markers.items()]
        if len(drawn) == 1:
            legend(ax, axes, handles, "right upper")
        else:
            axes.set_title(f"({name})", loc="left")
            axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.17))
    return panels


def _affected_by_size(axes: Axes, models: pd.DataFrame, published: pd.DataFrame) -> list:
    models, field, size_axis = _with_size(models)
    handles = _plot_published(axes, published, field, 100, *AFFECTED)
    for name, (label, color, line, fill) in AFFECTED.items():
        style = {"linestyle": line, "fillstyle": fill, "color": color_of(color)}
        for marker, group in _by_marker(models):
            _plot(axes, group, "size", 100 * group[name], {"marker": marker, **style})
        handles.append(entry(label, marker=MARKERS[0], **style))
    axes.set(ylim=(-3, 103), ylabel="affected (%)")
    size_axis(axes)
    return handles


def _affected_by_perplexity(axes: Axes, models: pd.DataFrame, published: pd.DataFrame) -> list:
    handles, fits = _plot_published(axes, published, "perplexity", 100, *AFFECTED), fits_of(models)
    x = np.geomspace(models["perplexity"].min(), models["perplexity"].max(), 200)
    for name, (label, color, line, fill) in AFFECTED.items():
        style, fit = {"color": color_of(color), "fillstyle": fill}, fits[name]
        for marker, group in _by_marker(models):
            _plot(axes, group, "perplexity", 100 * group[name], {"marker": marker, **style, "linestyle": "none"})
        if fit and fit.is_significant:
            axes.plot(x, 100 * fit.at(x), color=color_of(color), linestyle=line)
            style["linestyle"] = line
        handles.append(entry(f"{label}: {_fit_words(fit)}", marker=MARKERS[0], **style))
    axes.set(ylim=(-3, 103), ylabel="affected (%)")
    perplexity_axis(axes)
    return handles


def _fit_words(fit: Fit | None) -> str:
    if fit is None:
        return "no exponential fits"
    if not fit.is_significant:
        return "no fit drawn,\nits interval includes 0"
    return f"exp(({fit.full:.0f} − ppl) / {fit.scale:.0f})".replace("-", "−")


def _magnitude(axes: Axes, models: pd.DataFrame, published: pd.DataFrame) -> list:
    handles = _plot_published(axes, published.abs(), "perplexity", 1, "median")
    style = {"color": color_of("blue"), "linestyle": "none"}
    for marker, group in _by_marker(models):
        for fill, points in (("full", group[group["count"] > 0]), ("none", group[group["count"] == 0])):
            _plot(axes, points, "perplexity", points["median"].abs(), {**style, "marker": marker, "fillstyle": fill})
    for alpha in models["alpha"].dropna().unique():
        threshold(axes, alpha)
    axes.set_ylabel("median |x|, most common outlier")
    _whole_perplexity_axis(axes, models, published)
    hollow = models.loc[models["count"] == 0, "median"].notna().any()
    return [*handles, entry(NONE, marker="o", fillstyle="none", color=color_of("blue"))] if hollow else handles


def _number(axes: Axes, models: pd.DataFrame, published: pd.DataFrame) -> list:
    handles = _plot_published(axes, published, "perplexity", 1, "count")
    for marker, group in _by_marker(models):
        style = {"color": color_of("blue"), "linestyle": "none", "marker": marker}
        _plot(axes, group, "perplexity", group["count"], style)
    axes.set(ylabel="outlier features", ylim=(-0.2, None))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _whole_perplexity_axis(axes, models, published)
    return handles


def _whole_perplexity_axis(axes: Axes, models: pd.DataFrame, published: pd.DataFrame) -> None:
    """Make an axis of perplexity that covers all models, even those without a point."""
    perplexity = pd.concat([models["perplexity"], published["perplexity"]])
    perplexity = perplexity[np.isfinite(perplexity)]
    if len(perplexity):
        axes.set_xlim(perplexity.min() * 0.93, perplexity.max() * 1.07)
    perplexity_axis(axes)


def _plot_published(axes: Axes, published: pd.DataFrame, x: str | None, unit: float, *columns: str) -> list:
    """Plot columns of the published models, times `unit`, in grey below everything else, unless x is None.

    Return the handles of the legend.
    """
    handles = []
    for name, fill in zip(columns, ("full", "none"), strict=False):
        style = {"color": GREY, "marker": "o", "fillstyle": fill, "linestyle": "none"}
        label = f"the paper, {name}" if len(columns) > 1 else "the paper"
        if len(published) and x:
            handles += axes.plot(published[x], unit * published[name], label=label, zorder=1, **style)
    return handles


def _with_size(models: pd.DataFrame) -> tuple[pd.DataFrame, str | None, Callable[[Axes], None]]:
    """Return the models with a column `size`, the column of published models that it is plotted with, and its axis.

    The size is the number of parameters; if all models have the same number, it is the training step, which published
    models do not have (None).
    """
    if models["parameters"].nunique() > 1 or models["checkpoint"].isna().any():
        return models.assign(size=models["parameters"]), "parameters", parameters_axis
    steps = models["checkpoint"].str.extract(r"(\d+)$", expand=False).astype(float)
    if steps.isna().any():
        return models.assign(size=range(1, len(models) + 1)), None, lambda axes: axes.set_xlabel("checkpoint")
    return models.assign(size=steps), None, _step_axis


def _step_axis(axes: Axes) -> None:
    axes.set_xlabel("training step")


def _plot(axes: Axes, group: pd.DataFrame, column: str, values: pd.Series, style: dict) -> None:
    order = group[column].argsort()
    axes.plot(group[column].iloc[order], values.iloc[order], **style)


def _markers(models: pd.DataFrame) -> dict[str, str]:
    return dict(zip(models["architecture"].unique(), itertools.cycle(MARKERS), strict=False))


def _by_marker(models: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [(marker, models[models["architecture"] == name]) for name, marker in _markers(models).items()]


TRAINING = {"step": _step_axis, "perplexity": perplexity_axis}  # panel (also a column): function that draws its axis


@figure_function
def along_training(
    checkpoints: pd.DataFrame, *, panel: str | None = None, alpha: float = ALPHA, ax: Axes | None = None
) -> Panels:
    """Draw the largest hidden state of models during training, by step and by perplexity.

    Example:
        >>> import pandas
        >>> steps = pandas.DataFrame({"model": "mine", "step": [1, 2], "perplexity": [90.0, 60.0], "max": [3.0, 9.0]})
        >>> panels = outliers.plot.along_training(steps)

    Args:
        checkpoints: one row per checkpoint: `model`, `step`, `perplexity` and `max`.
        panel: the one to draw, "step" or "perplexity"; by default both.
        alpha: magnitude of the line from which on values are outliers.
    """
    drawn = chosen("panel", panel, TRAINING, ax)
    panels = panels_of(ax, 1, len(drawn), (1.8 + 2.9 * len(drawn), 3.3), sharey=True)[0]
    models = checkpoints["model"].unique()
    names = dict(zip(models, brief(map(short_name, models)), strict=True))
    for axes, name in zip(panels, drawn, strict=True):
        for number, (model, points) in enumerate(checkpoints.groupby("model", sort=False)):
            style = {"color": color_of(list(COLORS)[number % 8]), "marker": MARKERS[number % 8], "markersize": 4}
            axes.plot(points[name], points["max"], label=names[model], **style)
        TRAINING[name](axes)
    panels[0].set_ylabel("largest |hidden state|")
    for axes in panels[:-1]:
        axes.axhline(alpha, color="black", linewidth=0.6, linestyle=":")
    threshold(panels[-1], alpha)
    legend(ax, axes, axes.get_legend_handles_labels()[0], "right upper")
    return panels


def _probability(row: dict, name: str) -> str:
    text = scattered(name, ".1f", 100)(row)
    return text if text == MISSING else f"{text}%"


OF_THE_MOST_COMMON = ["layers", "positions", "q1", "median", "q3"]
COLUMNS = (
    ("Model", "{model}"),
    ("PPL", scattered("perplexity", ".1f")),
    ("Params", lambda row: count_label(row["parameters"])),
    ("Count", "{count:.0f}"),
    ("1-sided", "{one_sided:.0f}"),
    ("Layers", "{layers:.0%}"),
    ("SDims", "{positions:.1%}"),
    ("Quartiles", "({q1:.1f}, {median:.1f}, {q3:.1f})"),
    ("Top-1 p", lambda row: _probability(row, "top1_softmax")),
    ("w/o outliers", lambda row: _probability(row, "top1_softmax_without")),
)
OF_BITS = ("Bits/byte", scattered(BITS, ".3f"))  # follows perplexity, which is not comparable across vocabularies


def table4(rows: list[dict]) -> pd.DataFrame:
    """Return one row per model with the columns of the paper's Table 4; fractions and probabilities are shares.

    The columns of the most common outlier feature are empty (NaN) for a model without outlier features.
    """
    table = by_model(rows)[TABLE4_COLUMNS]
    table.loc[table["count"] == 0, OF_THE_MOST_COMMON] = float("nan")
    return table


def emergence_table(rows: list[dict]) -> Table:
    """Make Table 4 with the paper's headers and rounding."""
    caption = (
        "Number of outlier features (all; of one sign), layers and sequence positions (SDims) affected by the most "
        "common one, quartiles of its values, and mean top-1 softmax probability of the attention with and without "
        "outlier features."
    )
    data = by_model(rows).drop(columns=["alpha", WHOLE])
    bits = [BITS] if BITS in data else []
    columns = [*COLUMNS[:2], *((OF_BITS,) if bits else ()), *COLUMNS[2:]]
    errors = [name for name in data if name.endswith("_error")]
    caption += " ±: standard error over the text." if errors else ""
    return Table.of(
        "table4", caption, columns, data.reset_index(), table4(rows).join(data[[*bits, *errors]]).reset_index()
    )


def fit_line(name: str, fit: Fit | None) -> str:
    if fit is None:
        return (
            f"{name}: no exponential fit (it requires three models, two with hits at different perplexities, and "
            "growth)"
        )
    pairs = ((fit.full, *fit.full_interval), (fit.scale, *fit.scale_interval))
    full, scale = (with_interval(amount, *pair) for pair in pairs)
    return f"{name} = exp((a − perplexity) / b): a = {full}, b = {scale} (95 % intervals, {fit.points} models)"


APART = 1.5  # smallest factor between model sizes at which an onset is stated


HAVING = Claim(
    "{at}",
    "{having:Count} of {every:count} models {some:has an outlier feature|have outlier features} by the criterion.",
)
ALONE = Claim("{at}", "The model has {having:an|no} outlier feature by the criterion.")
MOST_COMMON = Claim(
    "{at}",
    by="positions",
    yes="The most common outlier feature, {of} {model}, affects {layers:part} of layers and {positions:part} of "
    "positions, with a median of {median:amount}.",
)
ONSET = Claim(
    "{at}",
    "All models of at least {smallest} parameters have outlier features, and none of at most {largest}.",
    of_every=True,
)
GROWTH = Claim(
    "{at}",
    "The fraction of affected {name} grows e-fold as the perplexity falls by {scale:amount} "
    "[{scale_interval[0]:amount}, {scale_interval[1]:amount}] (95 % interval, {points} models).",
)


def emergence_findings(models: pd.DataFrame, fits: Mapping[str, Fit | None], at: str) -> list[Finding]:
    """State how many models have outlier features, the most common feature, and how features grow with size.

    If there is one, state the size from which on all models and below which no model has them; and their growth as
    perplexity falls.

    models: one row per model, as `distinct_models` returns them. at: name of the table or figure that shows them.
    """
    having, without = (models[mask].rename_axis("model") for mask in (models["count"] > 0, models["count"] == 0))
    numbers = {"having": len(having), "some": max(1, len(having)), "every": len(models)}
    of = having["count"].map(lambda number: f"one of {count(int(number))} in" if number > 1 else "that of")
    smallest, largest = having["parameters"].min(), without["parameters"].max()
    sizes = {"smallest": count_label(smallest), "largest": count_label(largest)}
    grown = (fit._asdict() | {"name": name} for name, fit in fits.items() if fit and fit.is_significant)
    return [
        *say(HAVING if len(models) > 1 else ALONE, [numbers], at=at),
        *say(MOST_COMMON, having.assign(of=of).reset_index().to_dict("records"), at=at),
        *say(ONSET, [sizes] if smallest >= APART * largest else [], at=at),
        *say_each(GROWTH, grown, at=at),
    ]
