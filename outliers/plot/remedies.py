"""What number formats and remedies cost of perplexity, drawn."""

from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from outlier_kernels.formats import FORMATS, OPERANDS

from outliers.models.names import distinct_names
from outliers.plot.style import COLORS, GREY, LINEAR, MARKERS, bare, cost_axis
from outliers.quantization.schemes import BASELINE, Scheme, get_scheme

NONE = "none"
FEATURES = "features={:g}"  # the paper's decomposition, as a remedy
# Panels by the granularity of the weights' scales; groups have that of blocks.
PANELS = {"tensor": "a scale a tensor", "column": "a scale a row and a column", "block": "scales of groups and blocks"}


class Other(NamedTuple):
    """A perplexity that others published, and that without quantization beside it; bits: of both operands."""

    what: str
    bits: int
    perplexity: float
    unquantized: float

    @property
    def increase(self) -> float:
        """In per cent."""
        return 100 * (self.perplexity / self.unquantized - 1)


# LLaMA-2-7B on WikiText-2, weights by GPTQ, keys and values in 4 bits too: QuaRot (2024), Table 1. OPT-175B on
# WikiText-2: SmoothQuant (2023), Table 3. 13 B parameters on C4: LLM.int8(), Table 1.
PUBLISHED = (
    Other("QuaRot", 4, 6.10, 5.47),
    Other("absmax", 8, 19.08, 12.45),
    Other("SmoothQuant", 8, 11.11, 10.99),
    Other("LLM.int8()", 8, 11.10, 10.99),
)


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
        if row["scheme"] == BASELINE or row["model"] not in baseline:
            continue
        scheme, remedy = get_scheme(row["scheme"]), row["scheme"].partition("+")[2]
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


def remedy_costs(found: list[Point]) -> Figure:
    """A panel a granularity, in it the formats from few bits to many, and a line a remedy; then those published."""
    panels = [panel for panel in PANELS if any(point.panel == panel for point in found)]
    formats = {panel: _formats(found, panel) for panel in panels}
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    widths = [*(max(2, len(some)) for some in formats.values()), len(PUBLISHED)]
    *ours, theirs = figure.subplots(1, len(widths), sharey=True, squeeze=False, width_ratios=widths)[0]
    remedies = list(dict.fromkeys(point.remedy for point in found))
    for axes, panel in zip(ours, panels, strict=True):
        _plot_panel(axes, formats[panel], [point for point in found if point.panel == panel], remedies)
        axes.set_title(PANELS[panel], fontsize=9)
    _plot_published(theirs)
    cost_axis(ours[0], [*(point.increase for point in found), *(other.increase for other in PUBLISHED)])
    ours[0].set_ylabel(f"increase of perplexity (%), linear within ±{LINEAR:g}")
    bare(*ours, theirs)
    handles = {label: one for axes in ours for one, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    shown = [remedy for remedy in remedies if remedy in handles]
    figure.legend([handles[one] for one in shown], shown, loc="outside right upper", frameon=False, fontsize=8)
    return figure


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
            look = {"color": COLORS[number % 7], "marker": MARKERS[number % len(MARKERS)], "markersize": 5}
            axes.errorbar(
                [place + offset for place, _ in line],
                [point.increase for _, point in line],
                [100 * (point.deviation or 0) / point.perplexity * point.ratio for _, point in line],
                linewidth=0.7,
                label=remedy,
                **look,
            )
    _name_places(axes, [f"{name}, {bits:.1f}" for name, bits in formats.items()])


def _plot_published(axes: Axes) -> None:
    axes.plot(range(len(PUBLISHED)), [other.increase for other in PUBLISHED], "o", color=GREY, markersize=5)
    _name_places(axes, [f"{other.what}, {other.bits}" for other in PUBLISHED])
    axes.set_title("published", fontsize=9)


def _name_places(axes: Axes, names: list[str]) -> None:
    axes.axhline(0, color="black", linewidth=0.6)
    axes.grid(axis="y", color="0.93", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
    axes.set_xlim(-0.5, len(names) - 0.5)
