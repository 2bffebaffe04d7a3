"""What number formats and remedies cost of perplexity, drawn."""

import textwrap
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from outlier_kernels.formats import FORMATS, OPERANDS

from outliers.errors import UserError
from outliers.models.names import distinct_names
from outliers.plot.published import REMEDIES
from outliers.plot.records import Rows, records
from outliers.plot.style import (
    COLORS,
    GREY,
    LINEAR,
    MARKERS,
    SCATTER,
    SLANTED,
    brief,
    chosen,
    color_of,
    cost_axis,
    figure_function,
    legend,
    panels_of,
    returned,
    said,
)
from outliers.quantization.schemes import BASELINE, Scheme, get_scheme

NONE = "none"
FEATURES = "features={:g}"  # the paper's decomposition, as a remedy
# Panels by the granularity of the weights' scales; groups have that of blocks.
PANELS = {"tensor": "a scale a tensor", "column": "a scale a row and a column", "block": "scales of groups and blocks"}


class Point(NamedTuple):
    """A row of the table and a column: what a format with a remedy was measured at.

    format: the scheme of these operands that was named first. ratio: to the perplexity without quantization.
    """

    model: str
    format: str
    remedy: str
    panel: str
    weight_bits: float
    activation_bits: float
    perplexity: float
    deviation: float | None
    ratio: float

    @property
    def increase(self) -> float:
        """Of perplexity, in per cent."""
        return 100 * (self.ratio - 1)

    @property
    def bits(self) -> float:
        """A value's, of both operands on average."""
        return (self.weight_bits + self.activation_bits) / 2


def points(rows: list[dict]) -> list[Point]:
    """What each format with a remedy was measured at, of models whose perplexity without quantization is there."""
    baseline = {row["model"]: row["value"] for row in rows if row["scheme"] == BASELINE}
    short = distinct_names((row["model"], None) for row in rows)
    formats: dict[tuple, str] = {}
    found = []
    for row in rows:
        scheme, remedy = get_scheme(row["scheme"]), row["scheme"].partition("+")[2]
        if not scheme.quantizes_projections or row["model"] not in baseline:
            continue
        if row.get("alpha") is not None:
            remedy = "+".join(filter(None, [FEATURES.format(row["alpha"]), remedy]))
        format = formats.setdefault((scheme.activations, scheme.weights), row["scheme"].partition("+")[0])
        bits = [_bits(row, scheme, operand) for operand in reversed(OPERANDS)]
        deviation, ratio = row.get("standard_deviation"), row["value"] / baseline[row["model"]]
        model = short[row["model"], None]
        found.append(Point(model, format, remedy or NONE, _panel(scheme), *bits, row["value"], deviation, ratio))
    return found


def _bits(row: dict, scheme: Scheme, operand: str) -> float:
    """A value's, as the row says it; of the paper's schemes, whose scales count next to nothing, the format's."""
    quantizer = getattr(scheme, operand)
    plain = 32 if quantizer is None else FORMATS[quantizer.format].bits
    return row.get(f"{operand[:-1]}_bits", plain)


def _panel(scheme: Scheme) -> str:
    granularity = (scheme.weights or scheme.activations).granularity
    return granularity if granularity in PANELS else "block"


@figure_function
def remedy_costs(
    rows: Rows, *, model: str | None = None, panel: str | None = None, paper: bool = True, ax: Axes | None = None
) -> Axes | np.ndarray:
    """What number formats add to the perplexity of a model, in per cent, with remedies and without.

    A panel a granularity of the weights' scales, in it the formats from few bits to many, with the bits of a value, and
    a line a remedy; then what others published. Bars are one standard deviation by rounding.

    Args:
        rows: of a sweep of schemes with remedies.
        model: the one to draw, by its short name; where the rows are of one, that.
        panel: the one to draw, "tensor", "column", "block" or "published"; by default all that have a point.
        paper: whether the published values stand beside.
        ax: where to draw that panel, in the caller's style; by default a new figure.

    Returns:
        The axes, or an array of them; `.figure` of one is their figure.

    Raises:
        UserError: no such model or panel was measured, or there are several for `ax`; several models and none chosen.
    """
    found = points(records(rows))
    model = model or _only([point.model for point in found])
    found = [point for point in found if point.model == model]
    ours = {panel: _formats(found, panel) for panel in PANELS if any(point.panel == panel for point in found)}
    shown = chosen("panel", panel, [*ours, *["published"] * paper], ax)
    widths = [max(2, len(ours.get(panel, REMEDIES))) for panel in shown]
    panels = panels_of(ax, 1, len(shown), (2.8 + 0.48 * sum(widths), 4.6), sharey=True, width_ratios=widths)[0]
    remedies = list(dict.fromkeys(point.remedy for point in found))
    for axes, panel, width in zip(panels, shown, widths, strict=True):
        if panel in ours:
            _plot_panel(axes, ours[panel], [point for point in found if point.panel == panel], remedies)
        else:
            _plot_published(axes)
        axes.set_title(textwrap.fill(PANELS.get(panel, panel), 8 * width), loc="center")
    cost_axis(panels[0], [*(point.increase for point in found), *(other.increase for other in REMEDIES)])
    panels[0].set_ylabel(f"increase of perplexity (%), linear within ±{LINEAR:g}")
    handles = {label: one for axes in panels for one, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    bars = [said(SCATTER, marker="|")] if any(point.deviation is not None for point in found) else []
    legend(ax, axes, [*(handles[one] for one in remedies if one in handles), *bars], "right upper")
    return returned(panels)


def _only(models: list[str]) -> str | None:
    names = list(dict.fromkeys(models))
    if len(names) > 1:
        raise UserError(f"the rows are of {len(names)} models; choose one by model=: {', '.join(names)}")
    return names[0] if names else None


def _formats(found: list[Point], panel: str) -> dict[str, float]:
    """The formats of a panel from few bits to many, with their bits."""
    bits = {point.format: point.bits for point in reversed(found) if point.panel == panel}  # as its first row has them
    return dict(sorted(bits.items(), key=lambda pair: pair[1]))


def _plot_panel(axes: Axes, formats: dict[str, float], found: list[Point], remedies: list[str]) -> None:
    places = list(formats)
    for number, remedy in enumerate(remedies):
        line = sorted((places.index(point.format), point) for point in found if point.remedy == remedy)
        if line:
            offset = 0.5 * ((number + 0.5) / len(remedies) - 0.5)
            look = {"color": color_of(COLORS[number % 7]), "marker": MARKERS[number % len(MARKERS)]}
            axes.errorbar(
                [place + offset for place, _ in line],
                [point.increase for _, point in line],
                [100 * (point.deviation or 0) / point.perplexity * point.ratio for _, point in line],
                label=remedy,
                **look,
            )
    _name_places(axes, [f"{name}, {bits:.1f}" for name, bits in formats.items()])


def _plot_published(axes: Axes) -> None:
    axes.plot(range(len(REMEDIES)), [other.increase for other in REMEDIES], "o", color=GREY)
    _name_places(axes, [f"{other.what}, {other.bits}" for other in REMEDIES])


def _name_places(axes: Axes, names: list[str]) -> None:
    axes.axhline(0, color="black", linewidth=0.6)
    axes.grid(axis="y")
    axes.set_xticks(range(len(names)), brief(names), **SLANTED)
    axes.set_xlim(-0.5, len(names) - 0.5)
