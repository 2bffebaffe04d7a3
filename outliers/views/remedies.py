"""Remedies: perplexity by number format and remedy, against bits; an experiment beyond the paper."""

import itertools
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.text import Annotation
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox
from outlier_kernels.formats import FORMATS, OPERANDS

from outliers.errors import UserError
from outliers.models.names import distinct_names
from outliers.published.numbers import REMEDIES
from outliers.quantization.cache_formats import Formats
from outliers.quantization.schemes import Scheme, get_scheme
from outliers.show.axes import cost_axis, increase_axis, label_right, name_places, plot_costs
from outliers.show.claims import NEXT, Claim, say
from outliers.show.legends import SCATTER, entry, explained, labelled_artists, legend
from outliers.show.section import Context, Drawing, Finding, Section
from outliers.show.style import COLORS, GREY, MARKERS, Panels, chosen, color_of, figure_function, panels_of
from outliers.show.tables import MISSING, Table, cell, scatter_note, values_table
from outliers.show.value import RowsOrFrame, Value, comparable_rows, exact, grouped, scattered_by, value_of
from outliers.show.words import listed, percent
from outliers.variants.quantized import EXACT
from outliers.variants.written import variant_of
from outliers.views.perplexity import costs, point_row

NONE = "none"
FEATURES = "features={:g}"  # the paper's decomposition, named as a remedy
# Panels by granularity of the weights' scales; groups count as blocks, and weights alone have a panel of their own.
PANELS = {
    "tensor": "a scale a tensor",
    "column": "a scale a row and a column",
    "block": "scales of groups and blocks",
    "weights": "weights alone",
}
# Panels by the quantized values.
KINDS = {"weights": "weights alone", "both": "weights and activations", "cache": "keys and values"}
WIDTH = 24  # characters of a line of a legend
LINE = "0.6"  # colour of the frontier
# Places of a name beside a mark: offset in points, and the corner of the name that is there. To the lower left
# of the frontier only excluded marks lie; to the upper right of a mark there is room between two lines.
BESIDE = (
    ((-3, -3), "right", "top"),
    ((3, 2), "left", "bottom"),
    ((-6, 0), "right", "center"),
    ((0, -6), "left", "top"),
    ((-8, 3), "right", "bottom"),
    ((-8, 10), "right", "bottom"),
)
GRID = "hollow: weights on the\ngrid of few bits of their file"
HELD = 0.05  # a format holds a model if it costs less than this share of perplexity


class RemedyPoint(NamedTuple):
    """A measurement of one number format with one remedy: a change beside the format, such as a rotation.

    format: the first of `SCHEMES` that quantizes the same operands; for keys and values their number formats. cost:
    relative increase over the unquantized model, with the same prefix if that was measured. weight_bits,
    activation_bits, cache_bits: mean bits per value, None if not quantized. on_grid: whether the stored weights already
    have few enough different values for the format, which then looks better than it is.
    """

    model: str
    format: str
    remedy: str
    panel: str
    weight_bits: float | None
    activation_bits: float | None
    perplexity: Value
    cost: Value
    cache_bits: float | None = None
    on_grid: bool = False

    @property
    def kind(self) -> str:
        if self.cache_bits is not None:
            return "cache"
        return "weights" if self.activation_bits is None else "both"

    @property
    def bits(self) -> float:
        """Bits per value: of keys and values, or else the mean over the quantized operands."""
        if self.cache_bits is not None:
            return self.cache_bits
        quantized = [bits for bits in (self.weight_bits, self.activation_bits) if bits is not None]
        return sum(quantized) / len(quantized)

    @property
    def increase(self) -> Value:
        """The increase of log-perplexity, in nats."""
        return self.cost.log_of_ratio()


def remedy_points(rows: list[dict]) -> list[RemedyPoint]:
    """Return the measurements of each format with each remedy, for models whose unquantized perplexity is known.

    Rows of caches that do not record their bits are left out.
    """
    short = distinct_names((row["model"], None) for row in rows)
    formats: dict[Scheme, str] = {}
    variants = [variant_of(row) for row in rows]
    behind = {
        (row["model"], under): value_of(row) for row, under in zip(rows, variants, strict=True) if under.is_prefix
    }
    known_bits = {
        (row["model"], operand, getattr(quantized.scheme, operand)): row[field]
        for row, under in zip(rows, variants, strict=True)
        for quantized in under.schemes
        for operand in OPERANDS
        if (field := f"{operand[:-1]}_bits") in row
    }
    measured = []
    for row in costs(rows):
        under = variant_of(row)
        under, cache = under.without_cache, under.cache
        prefix = next((part for part in under.parts if part.is_prefix), None)
        scheme = next((quantized.scheme for quantized in under.schemes), EXACT.scheme)
        if cache and "cache_bits" in row:
            about = *_of_cache(cache, scheme, under.change_terms), "", None, None
        elif scheme.quantizes_projections and not cache:
            format = formats.setdefault(_without_name(scheme.base), scheme.base)
            features = [] if row.get("alpha") is None else [FEATURES.format(row["alpha"])]
            bits = [_bits(row, scheme, operand, known_bits) for operand in reversed(OPERANDS)]
            about = format, "+".join([*features, *under.change_terms]) or NONE, _panel(scheme), *bits
        else:
            continue
        baseline = behind.get((row["model"], prefix))
        cost = row["cost"] if baseline is None else value_of(row).increase_over(baseline)
        cache_bits = row["cache_bits"] if cache else None
        measured.append(
            RemedyPoint(short[row["model"], None], *about, value_of(row), cost, cache_bits, _is_on_grid(row, scheme))
        )
    return measured


def _of_cache(cache: Formats, scheme: Scheme, others: list[str]) -> tuple[str, str]:
    """Return the number formats of keys and values, and their remedies, including a scheme or prefix beside the cache.

    A remedy of only keys or only values is marked: `channels=32@keys`.
    """
    formats = {name: format for name, format in cache._asdict().items() if format}
    numbers = {name: format.format for name, format in formats.items()}
    alike = len(set(numbers.values())) == 1 and all(cache)
    format = next(iter(numbers.values())) if alike else ", ".join(f"{name} {kind}" for name, kind in numbers.items())
    options = {name: str(format).split("/")[1:] for name, format in formats.items()}
    both = [part for part in options.get("keys", []) if part in options.get("values", [])]
    remedies = [*both, *(f"{part}@{name}" for name, parts in options.items() for part in parts if part not in both)]
    schemes = [scheme.base] if scheme.quantizes else []
    beside_it = f"beside {'+'.join(schemes + others)}" if schemes + others else ""
    return format, " ".join(filter(None, ["+".join(remedies), beside_it])) or NONE


def _without_name(base: str) -> Scheme:
    """Return a scheme without its name and decomposition, in which schemes of one format may differ."""
    return replace(get_scheme(base), name=NONE, outlier_threshold=None)


def _bits(row: dict, scheme: Scheme, operand: str, known_bits: dict[tuple, float]) -> float | None:
    """Return the bits per value of an operand as the row records them.

    Rows of the paper's schemes record none; they get the bits of another scheme with the same quantizer, or those of
    the format.
    """
    quantizer = getattr(scheme, operand)
    other = quantizer and known_bits.get((row["model"], operand, quantizer), FORMATS[quantizer.format].bits)
    return row.get(f"{operand[:-1]}_bits", other)


def _is_on_grid(row: dict, scheme: Scheme) -> bool:
    """Return whether weights are stored on a grid of few bits (Q4_1, mxfp4) that the scheme's format reproduces.

    A rotation mixes features and moves weights off the grid; scaling or reordering features need not.
    """
    stored = re.search(r"(?:q|fp)(\d)", row.get("quantized_from", ""), re.IGNORECASE)
    if stored is None or scheme.weights is None or FORMATS[scheme.weights.format].bits > int(stored[1]):
        return False
    return all(remedy.kind.by_feature or remedy.roles for remedy in scheme.transforms)


def _panel(scheme: Scheme) -> str:
    """Return the panel of a scheme: of weights alone, or else by granularity."""
    if scheme.activations is None:
        return "weights"
    granularity = (scheme.weights or scheme.activations).granularity
    return granularity if granularity in PANELS else "block"


def frontier_of(points: Iterable[RemedyPoint]) -> list[RemedyPoint]:
    """Return the points, few bits first, that cost less beyond scatter than every point of at most as many bits.

    Points on the grid of their file are excluded. If there is a single draw, values are compared without scatter.
    """
    reached: list[RemedyPoint] = []
    for point in sorted(points, key=lambda point: (point.bits, point.cost.mean)):
        if not point.on_grid and (not reached or _is_less(point, reached[-1])):
            reached.append(point)
    return reached


def _is_less(point: RemedyPoint, other: RemedyPoint) -> bool:
    if point.cost.deviation is None or other.cost.deviation is None:
        return point.cost.mean < other.cost.mean
    return other.cost.is_above(point.cost)


def _styles(points: Sequence[RemedyPoint]) -> dict[str, dict]:
    """Return matplotlib styles of the remedies, the same in all figures of these points: a colour and a marker each."""
    remedies = dict.fromkeys(point.remedy for point in points)
    looks = zip(remedies, itertools.cycle(list(COLORS)[:7]), itertools.cycle(MARKERS), strict=False)
    return {
        name: {"color": color_of(color), "marker": marker, "label": _in_lines(name)} for name, color, marker in looks
    }


def _height(points: Sequence[RemedyPoint], styles: dict[str, dict]) -> float:
    """Return the height in inches that a legend of all remedies and five lines of explanations needs."""
    lines = sum(1 + styles[remedy]["label"].count("\n") for remedy in {point.remedy for point in points})
    return max(4.6, 0.18 * (lines + 5))


def _in_lines(remedy: str) -> str:
    return textwrap.fill(remedy.replace("+", "+ "), WIDTH, break_on_hyphens=False).replace("+ ", "+")


@figure_function
def remedy_costs(
    rows: RowsOrFrame, *, model: str | None = None, panel: str | None = None, paper: bool = True, ax: Axes | None = None
) -> Panels:
    """Draw the increase of a model's perplexity by number format, in per cent, with and without remedies.

    One panel per granularity of the weights' scales, then the values that others published. A panel shows formats from
    few bits to many, with their bits per value, and a line per remedy. Error bars are one standard deviation by
    rounding.

    Example:
        >>> panels = outliers.plot.remedy_costs(outliers.frame("results/kept/remedies"))

    Args:
        rows: of a sweep of schemes with remedies.
        model: the one to draw, by its short name; required if there are several.
        panel: the one to draw, "tensor", "column", "block", "weights" or "published"; by default all that have a point.
        paper: whether to draw the published values.
    """
    measured = _points_of(rows, model)
    styles = _styles(measured)
    measured = [point for point in measured if point.kind != "cache"]
    ours = {panel: _formats(measured, panel) for panel in PANELS if any(point.panel == panel for point in measured)}
    chosen_panels = chosen("panel", panel, [*ours, *(["published"] if paper else [])], ax)
    widths = [max(2, len(ours.get(panel, REMEDIES))) for panel in chosen_panels]
    size = 2.8 + 0.48 * sum(widths), _height(measured, styles)
    panels = panels_of(ax, 1, len(chosen_panels), size, sharey=True, width_ratios=widths)[0]
    for axes, panel, width in zip(panels, chosen_panels, widths, strict=True):
        if panel in ours:
            _plot_panel(axes, ours[panel], [point for point in measured if point.panel == panel], styles)
        else:
            axes.plot(REMEDIES["increase"], "o", color=GREY)
            name_places(axes, list(map("{}, {}".format, REMEDIES["what"], REMEDIES["bits"])))
        axes.set_title(textwrap.fill(PANELS.get(panel, panel), 8 * width), loc="center")
    for axes in panels[1:]:
        axes.grid(axis="y")
    cost_axis(panels[0], [*(100 * point.cost.mean for point in measured), *REMEDIES["increase"]])
    handles = labelled_artists(panels)
    entries = [handles[style["label"]] for style in styles.values() if style["label"] in handles]
    legend(ax, axes, [*entries, *explained(bars=_meaning_of_bars(measured))], "right upper")
    return panels


@figure_function
def frontier(
    rows: RowsOrFrame, *, model: str | None = None, panel: str | None = None, ax: Axes | None = None
) -> Panels:
    """Draw the increase of a model's log-perplexity, in nats, against bits per value, with and without remedies.

    One panel for weights alone, one for weights and activations, and one for keys and values; each mark is a format
    with a remedy. The line is the frontier (see `frontier_of`), labelled with its formats; the dashed line is 5 % of
    perplexity. Hollow marks are weights that lie on the grid of their file. Error bars are one standard deviation by
    rounding.

    Example:
        >>> panels = outliers.plot.frontier(outliers.frame("results/kept/remedies"))

    Args:
        rows: of a measurement of schemes and caches with remedies.
        model: the one to draw, by its short name; required if there are several.
        panel: the one to draw, "weights", "both" or "cache"; by default all that have a point.
    """
    measured = _points_of(rows, model)
    if not measured:
        raise UserError("no rows of a format and of its model without quantization; expected both")
    kinds = [kind for kind in KINDS if any(point.kind == kind for point in measured)]
    chosen_kinds = chosen("panel", panel, kinds, ax)
    widths = [4 + len({point.bits for point in measured if point.kind == kind}) for kind in chosen_kinds]
    styles, drawn = _styles(measured), [point for point in measured if point.kind in chosen_kinds]
    size = 2.6 + 0.25 * sum(widths), _height(drawn, styles)
    panels = panels_of(ax, 1, len(chosen_kinds), size, sharey=True, width_ratios=widths)[0]
    for axes, kind in zip(panels, chosen_kinds, strict=True):
        _plot_kind(axes, [point for point in drawn if point.kind == kind], styles)
        axes.set(title=KINDS[kind], xlabel="bits of a value")
    increase_axis(panels[0], [point.increase.mean for point in drawn])
    label_right(panels[-1], f"{100 * HELD:g} %", math.log1p(HELD))
    entries = [entry(**styles[remedy]) for remedy in dict.fromkeys(point.remedy for point in drawn)]
    grid = [entry(GRID, marker="o", fillstyle="none")] if any(point.on_grid for point in drawn) else []
    line = [entry("frontier", linestyle="-", color=LINE)]
    legend(ax, panels[-1], [*entries, *line, *grid, *explained(bars=_meaning_of_bars(drawn))], "right upper")
    panels[0].figure.draw_without_rendering()  # computes the layout, which labels need
    for axes, kind in zip(panels, chosen_kinds, strict=True):
        _name_formats(axes, [point for point in drawn if point.kind == kind])
    return panels


def _points_of(rows: RowsOrFrame, model: str | None) -> list[RemedyPoint]:
    measured = remedy_points(comparable_rows(rows))
    names = [model] if model else list(dict.fromkeys(point.model for point in measured))
    if len(names) > 1:
        raise UserError(f"the rows are of {len(names)} models; choose one by model=: {', '.join(names)}")
    return [point for point in measured if point.model in names]


def _meaning_of_bars(points: Sequence[RemedyPoint]) -> str:
    return SCATTER if any(point.cost.deviation is not None for point in points) else ""


def _formats(points: list[RemedyPoint], panel: str) -> dict[str, float]:
    """Return the formats of a panel from few bits to many, with their bits."""
    bits = {point.format: point.bits for point in reversed(points) if point.panel == panel}  # bits as in the first row
    return dict(sorted(bits.items(), key=lambda pair: pair[1]))


def _plot_panel(axes: Axes, formats: dict[str, float], points: list[RemedyPoint], styles: dict[str, dict]) -> None:
    places = list(formats)
    ours = sorted(points, key=lambda point: places.index(point.format))
    plot_costs(axes, ((point.remedy, places.index(point.format), point.cost) for point in ours), styles)
    name_places(axes, [f"{name}, {bits:.1f}" for name, bits in formats.items()])


def _plot_kind(axes: Axes, points: list[RemedyPoint], styles: dict[str, dict]) -> None:
    for point in points:
        look = styles[point.remedy] | {"fillstyle": "none" if point.on_grid else "full"}
        axes.errorbar(point.bits, point.increase.mean, point.increase.bar or 0, **look)
    line = np.reshape([_place(point) for point in frontier_of(points)], (-1, 2)).T
    axes.plot(*line, color=LINE, drawstyle="steps-post", zorder=1)
    axes.axhline(math.log1p(HELD), color="0.4", linewidth=0.6, linestyle="--", zorder=0)
    axes.axhline(0, color="black", linewidth=0.6)
    low, high = (limit(point.bits for point in points) for limit in (min, max))
    axes.set_xlim(low - 0.35 * max(high - low, 1), high + 0.12 * max(high - low, 1))  # room for names at the left
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.grid(axis="y")


def _name_formats(axes: Axes, points: list[RemedyPoint]) -> None:
    """Label each format where the frontier reaches it first, at the place that covers the fewest labels, then marks."""
    radius = (matplotlib.rcParams["lines.markersize"] / 2 + 1) * axes.figure.dpi / 72
    centres = axes.transData.transform(list(map(_place, points)))
    marks, names = [Bbox([centre - radius, centre + radius]) for centre in centres], []
    for format, point in {point.format: point for point in reversed(frontier_of(points))}.items():
        name = axes.annotate(format, _place(point), (0, 0), textcoords="offset points", fontsize="small")
        best = min(BESIDE, key=lambda place: [sum(map(_moved(name, place).overlaps, part)) for part in (names, marks)])
        names.append(_moved(name, best))


def _moved(name: Annotation, place: tuple) -> Bbox:
    offset, horizontal, vertical = place
    name.set(position=offset, ha=horizontal, va=vertical)
    return name.get_window_extent()


def _place(point: RemedyPoint) -> tuple[float, float]:
    return point.bits, point.increase.mean


CAPTION = (
    "Increase of perplexity of {} by number format, with and without remedies; beside each format its bits per value, "
    "scales included, averaged over inputs and weights. Bars: one standard deviation by {}. Published, on other texts: "
    "LLaMA-2-7B (QuaRot), 13 billion parameters (absmax), OPT-175B (SmoothQuant, LLM.int8())."
)
FRONTIER = (
    "Increase of log-perplexity of {} by number format against bits per value, scales included; features, tokens and "
    "prefixes kept exact are not counted. The line joins the formats that no other format of as many bits or fewer "
    "improves on beyond scatter; dashed: 5 % of perplexity. Bars: one standard deviation by {}."
)
ON_GRID = (
    " The weights of this model were dequantized from {}: formats of as few bits look better than they are, because "
    "the weights already lie on such a grid, unless a rotation, which leaves the function unchanged, moves them off "
    "it. Formats on the grid are hollow and excluded from the frontier."
)


def remedies_section(rows: list[dict], _context: Context | None = None) -> Section:
    """Show a measurement of formats and caches with remedies."""
    note, measured = scatter_note(rows), remedy_points(rows)
    by_model = grouped(measured, attrgetter("model"))
    tables, drawings = [], []
    for model, ours in by_model.items():
        tables += [
            remedies_table(model, [point for point in ours if point.kind != "cache"]),
            frontier_table(model, ours),
        ]
        ending = f"_{model}" if len(by_model) > 1 else ""
        caption = FRONTIER.format(model, scattered_by(rows)) + _of_grid(ours, rows)
        drawings += [
            Drawing.of(f"frontier{ending}", caption, frontier(rows, model=model)),
            Drawing.of(f"remedies{ending}", CAPTION.format(model, scattered_by(rows)), remedy_costs(rows, model=model)),
        ]
    if others := [row for row in rows if not _has_format(row)]:
        tables.append(values_table(others))
    findings = remedies_findings(measured)
    return Section("Remedies", rows, tables, drawings, [note], findings=findings)


def _has_format(row: dict) -> bool:
    """Return whether a row is of a format, a cache or their baseline, not of another library or unreadable variant."""
    under = variant_of(row)
    return under.is_exact or any(part.schemes or part.cache or part.is_prefix for part in under.parts)


def _of_grid(points: Sequence[RemedyPoint], rows: list[dict]) -> str:
    stored = dict.fromkeys(row["quantized_from"] for row in rows if "quantized_from" in row)
    return ON_GRID.format(listed(stored)) if any(point.on_grid for point in points) else ""


COLUMN = 0.25  # a remedy measured with this share of the formats has a column of its own


def remedies_table(model: str, points: list[RemedyPoint]) -> Table:
    """Make a table of perplexities by format and remedy; remedies of few formats share the last column."""
    by_format = grouped(points, attrgetter("format"))
    counts = Counter(point.remedy for point in points)
    remedies = [remedy for remedy, count in counts.items() if count >= COLUMN * len(by_format)]
    headers = ["format", "bits", *remedies, *(["others"] if len(remedies) < len(counts) else [])]
    cells = [_row(format, ours, remedies)[: len(headers)] for format, ours in by_format.items()]
    caption = (
        f"Perplexity of {model} by number format, with the bits of its weights and inputs, and by remedy; * marks the "
        "lowest of each format."
    )
    names = ("format", "bits", "others")
    return Table(f"remedies_{model}", caption, headers, cells, pd.DataFrame(map(point_row, points)), texts=names)


def _row(format: str, points: Sequence[RemedyPoint], remedies: Sequence[str]) -> list[str]:
    least = min(point.perplexity.mean for point in points)
    values = {point.remedy: _cell(point.perplexity, least) for point in points}
    bits = (MISSING if bits is None else f"{bits:.2f}" for bits in (points[0].weight_bits, points[0].activation_bits))
    others = ", ".join(f"{remedy} {value}" for remedy, value in values.items() if remedy not in remedies)
    return [format, ", ".join(bits), *(values.get(remedy, MISSING) for remedy in remedies), others or MISSING]


def frontier_table(model: str, points: list[RemedyPoint]) -> Table:
    """Make a table of the frontier, few bits first; its data are all points, with whether they are on it."""
    reached = {kind: frontier_of(point for point in points if point.kind == kind) for kind in KINDS}
    cells = [
        [KINDS[kind], f"{point.bits:.2f}", point.format, point.remedy, percent(*point.cost.shown)]
        for kind, on_line in reached.items()
        for point in on_line
    ]
    caption = f"Frontier of {model}: the smallest increase of perplexity with at most so many bits per value."
    on_line = [point for line in reached.values() for point in line]
    data = [
        {"kind": point.kind, "bits": point.bits, **point_row(point), "frontier": point in on_line} for point in points
    ]
    headers = ["quantized", "bits", "format", "remedy", "increase"]
    return Table(
        f"frontier_{model}", caption, headers, cells, pd.DataFrame(data), texts=("quantized", "format", "remedy")
    )


def _cell(perplexity: Value, least: float) -> str:
    form = ".2f" if perplexity.mean < 1e3 else ".0f" if perplexity.mean < 1e5 else ".1e"
    return cell(form, *perplexity.shown) + ("*" if perplexity.mean == least else "")


FEWEST = Claim(
    "frontier_{model}",
    yes="The fewest bits of {what} that keep {model} within {held:.0%} of its perplexity are {bits:.4g}: "
    "{which:listed}.",
    no="No format of {what} keeps {model} within {held:.0%} of its perplexity.",
    of_every=True,
)
NO_BENEFIT = Claim("remedies_{model}", "No remedy has a measurable benefit.", of_every=True)
SAVED = Claim(
    "remedies_{model}",
    by="saving",
    against=[NEXT],
    yes="{format} gains most from a remedy: {remedy} reduces its increase of perplexity from {plain:percent} to "
    "{cost:percent}.",
    of_every=True,
)
LOST = Claim(
    "remedies_{model}",
    "With every remedy tried, {lost:listed} {lost:raises|raise} the perplexity of {model} by more than {held:.0%}.",
    of_every=True,
)


def remedies_findings(points: Sequence[RemedyPoint]) -> list[Finding]:
    """State for each model the fewest bits that hold it, the format that gains most from a remedy, and lost formats.

    A format that costs at most `HELD` holds a model; one that costs more under every remedy is lost. The fewest bits
    are stated for each of `KINDS`. A single draw gives no findings.
    """
    findings = []
    for model, ours in grouped(points, attrgetter("model")).items():
        if any(point.cost.deviation is not None for point in ours):
            formats = grouped((point for point in ours if point.kind != "cache"), attrgetter("format"))
            lost = [name for name, group in formats.items() if all(point.cost.is_above(exact(HELD)) for point in group)]
            findings += [finding for kind in KINDS for finding in _fewest(ours, kind)]
            about = {"lost": lost, "model": model, "held": HELD}
            findings += [*_saved(formats.values()), *say(LOST, [about] if lost else [])]
    return findings


def _fewest(points: Sequence[RemedyPoint], kind: str) -> list[Finding]:
    """State the formats of fewest bits that hold the model beyond scatter, without those on the grid of their file."""
    points = [point for point in points if point.kind == kind and not point.on_grid]
    held = [point for point in points if exact(HELD).is_above(point.cost)]
    bits = min((point.bits for point in held), default=None)
    fewest = (point for point in held if point.bits == bits)
    which = [f"{point.format} with {point.remedy} ({percent(*point.cost.shown)})" for point in fewest]
    about = {"what": KINDS[kind], "held": HELD, "bits": bits, "which": which}
    return say(FEWEST, [point._asdict() for point in points[:1]], bool(held), **about)


def _saved(formats: Iterable[Sequence[RemedyPoint]]) -> list[Finding]:
    """State the format whose log-perplexity a remedy reduces most, if that reduction exceeds the next one."""
    pairs = [
        (plain, min(group, key=lambda point: point.cost.mean))
        for group in formats
        for plain in [point for point in group if point.remedy == NONE][:1]
    ]
    rows = [
        best._asdict() | {"plain": plain.cost, "saving": plain.increase.minus(best.increase)} for plain, best in pairs
    ]
    saves = any(plain.perplexity.is_above(best.perplexity) for plain, best in pairs)
    return say(SAVED if saves else NO_BENEFIT, rows)
