"""What number formats and remedies cost of perplexity, drawn."""

import itertools
import textwrap
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from outlier_kernels.formats import FORMATS, OPERANDS

from outliers.errors import UserError
from outliers.models.names import distinct_names
from outliers.plot.axes import cost_axis, name_places, plot_costs
from outliers.plot.legends import SCATTER, explained, legend
from outliers.plot.published import REMEDIES
from outliers.plot.style import COLORS, GREY, MARKERS, chosen, color_of, figure_function, panels_of
from outliers.quantization.schemes import Scheme, get_scheme
from outliers.report.analysis import Rows, Value, costs, records, value_of

NONE = "none"
FEATURES = "features={:g}"  # the paper's decomposition, as a remedy
# Panels by the granularity of the weights' scales; groups have that of blocks.
PANELS = {"tensor": "a scale a tensor", "column": "a scale a row and a column", "block": "scales of groups and blocks"}


class Point(NamedTuple):
    """A row of the table and a column: what a format with a remedy was measured at.

    format: the scheme of these operands that was named first. cost: beside no quantization.
    """

    model: str
    format: str
    remedy: str
    panel: str
    weight_bits: float
    activation_bits: float
    perplexity: Value
    cost: Value

    @property
    def bits(self) -> float:
        """A value's, of both operands on average."""
        return (self.weight_bits + self.activation_bits) / 2


def points(rows: list[dict]) -> list[Point]:
    """What each format with a remedy was measured at, of models whose perplexity without quantization is there."""
    short = distinct_names((row["model"], None) for row in rows)
    formats: dict[tuple, str] = {}
    measured = []
    for row in costs(rows):
        scheme, (plain, _, remedy) = get_scheme(row["scheme"]), row["scheme"].partition("+")
        if not scheme.quantizes_projections:
            continue
        if row.get("alpha") is not None:
            remedy = "+".join(filter(None, [FEATURES.format(row["alpha"]), remedy]))
        format = formats.setdefault((scheme.activations, scheme.weights), plain)
        bits = [_bits(row, scheme, operand) for operand in reversed(OPERANDS)]
        about = short[row["model"], None], format, remedy or NONE, _panel(scheme)
        measured.append(Point(*about, *bits, value_of(row), row["cost"]))
    return measured


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
        model: the one to draw, by its short name, which has to be chosen where there are several.
        panel: the one to draw, "tensor", "column", "block" or "published"; by default all that have a point.
        paper: whether the published values stand beside.
    """
    measured = points(records(rows))
    model = model or _only([point.model for point in measured])
    measured = [point for point in measured if point.model == model]
    ours = {panel: _formats(measured, panel) for panel in PANELS if any(point.panel == panel for point in measured)}
    shown = chosen("panel", panel, [*ours, *(["published"] if paper else [])], ax)
    widths = [max(2, len(ours.get(panel, REMEDIES))) for panel in shown]
    panels = panels_of(ax, 1, len(shown), (2.8 + 0.48 * sum(widths), 4.6), sharey=True, width_ratios=widths)[0]
    remedies = list(dict.fromkeys(point.remedy for point in measured))
    for axes, panel, width in zip(panels, shown, widths, strict=True):
        if panel in ours:
            _plot_panel(axes, ours[panel], [point for point in measured if point.panel == panel], remedies)
        else:
            axes.plot(range(len(REMEDIES)), [other.increase for other in REMEDIES], "o", color=GREY)
            name_places(axes, [f"{other.what}, {other.bits}" for other in REMEDIES])
        axes.set_title(textwrap.fill(PANELS.get(panel, panel), 8 * width), loc="center")
    for axes in panels[1:]:
        axes.grid(axis="y")
    cost_axis(panels[0], [*(100 * point.cost.mean for point in measured), *(other.increase for other in REMEDIES)])
    handles = {label: one for axes in panels for one, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    bars = SCATTER if any(point.cost.deviation is not None for point in measured) else ""
    entries = [*(handles[one] for one in remedies if one in handles), *explained(bars=bars)]
    legend(ax, axes, entries, "right upper")
    return panels


def _only(models: list[str]) -> str | None:
    names = list(dict.fromkeys(models))
    if len(names) > 1:
        raise UserError(f"the rows are of {len(names)} models; choose one by model=: {', '.join(names)}")
    return names[0] if names else None


def _formats(points: list[Point], panel: str) -> dict[str, float]:
    """The formats of a panel from few bits to many, with their bits."""
    bits = {point.format: point.bits for point in reversed(points) if point.panel == panel}  # as its first row has them
    return dict(sorted(bits.items(), key=lambda pair: pair[1]))


def _plot_panel(axes: Axes, formats: dict[str, float], points: list[Point], remedies: list[str]) -> None:
    places, lines = list(formats), {}
    for point in sorted(points, key=lambda point: places.index(point.format)):
        lines.setdefault(point.remedy, []).append((places.index(point.format), point.cost))
    looks = zip(remedies, itertools.cycle(list(COLORS)[:7]), itertools.cycle(MARKERS), strict=False)
    styles = {name: {"color": color_of(color), "marker": marker, "label": name} for name, color, marker in looks}
    plot_costs(axes, lines, styles)
    name_places(axes, [f"{name}, {bits:.1f}" for name, bits in formats.items()])
