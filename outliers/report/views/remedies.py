"""Remedies: perplexity by number format and remedy, against bits; an experiment beyond the paper."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import pandas as pd

from outliers.plot.remedies import HELD, KINDS, NONE, Point, frontier, frontier_of, points, remedy_costs
from outliers.show.section import Drawing, Finding, Section, printed
from outliers.show.tables import MISSING, Table, cell, scatter_note
from outliers.show.value import Value, exact, scattered_by
from outliers.show.words import listed, percent
from outliers.views.perplexity import unrounded

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


def remedies_section(rows: list[dict]) -> Section:
    """The section of a measurement of formats and caches with remedies."""
    note, measured = scatter_note(rows), points(rows)
    models = list(dict.fromkeys(point.model for point in measured))
    tables, drawings = [], []
    for model in models:
        ours = [point for point in measured if point.model == model]
        tables += [
            remedies_table(model, [point for point in ours if point.kind != "cache"]),
            frontier_table(model, ours),
        ]
        ending = f"_{model}" if len(models) > 1 else ""
        caption = FRONTIER.format(model, scattered_by(rows)) + _of_grid(ours, rows)
        drawings += [
            Drawing.of(f"frontier{ending}", caption, frontier(rows, model=model)),
            Drawing.of(f"remedies{ending}", CAPTION.format(model, scattered_by(rows)), remedy_costs(rows, model=model)),
        ]
    findings = remedies_findings(measured)
    return Section("Remedies", rows, printed(tables, [note]), tables, drawings, [note], findings=findings)


def _of_grid(points: Sequence[Point], rows: list[dict]) -> str:
    """The part of a caption on a model whose weights lie on the grid of few bits."""
    stored = dict.fromkeys(row["quantized_from"] for row in rows if "quantized_from" in row)
    return ON_GRID.format(listed(stored)) if any(point.on_grid for point in points) else ""


COLUMN = 0.25  # a remedy of this share of the formats has a column of its own


def remedies_table(model: str, points: list[Point]) -> Table:
    """Formats down, remedies across, those of few formats in the last column; in the cells perplexity with its
    scatter."""
    by_format: dict[str, dict[str, Point]] = {}
    for point in points:
        by_format.setdefault(point.format, {})[point.remedy] = point
    counts = Counter(point.remedy for point in points)
    remedies = [remedy for remedy, count in counts.items() if count >= COLUMN * len(by_format)]
    headers = ["format", "bits", *remedies, *(["others"] if len(remedies) < len(counts) else [])]
    cells = [_row(format, by_remedy, remedies)[: len(headers)] for format, by_remedy in by_format.items()]
    caption = (
        f"Perplexity of {model} by number format, with the bits of its weights and inputs, and by remedy; * marks the "
        "lowest of each format."
    )
    names = ("format", "bits", "others")
    return Table(f"remedies_{model}", caption, headers, cells, pd.DataFrame(map(unrounded, points)), names=names)


def _row(format: str, by_remedy: dict[str, Point], remedies: Sequence[str]) -> list[str]:
    least = min(point.perplexity.mean for point in by_remedy.values())
    values = {remedy: _cell(point.perplexity, least) for remedy, point in by_remedy.items()}
    first = next(iter(by_remedy.values()))
    bits = ("-" if count is None else f"{count:.2f}" for count in (first.weight_bits, first.activation_bits))
    others = ", ".join(f"{remedy} {value}" for remedy, value in values.items() if remedy not in remedies)
    return [format, ", ".join(bits), *(values.get(remedy, MISSING) for remedy in remedies), others or MISSING]


def frontier_table(model: str, points: list[Point]) -> Table:
    """The frontier, from few bits to many; unrounded all points, with whether they are on it."""
    reached = {kind: frontier_of(point for point in points if point.kind == kind) for kind in KINDS}
    cells = [
        [KINDS[kind], f"{point.bits:.2f}", point.format, point.remedy, percent(*point.cost)]
        for kind, on_line in reached.items()
        for point in on_line
    ]
    caption = f"Frontier of {model}: the smallest increase of perplexity with at most so many bits per value."
    on_line = [point for line in reached.values() for point in line]
    data = [
        {"kind": point.kind, "bits": point.bits, **unrounded(point), "frontier": point in on_line} for point in points
    ]
    headers = ["quantized", "bits", "format", "remedy", "increase"]
    return Table(
        f"frontier_{model}", caption, headers, cells, pd.DataFrame(data), names=("quantized", "format", "remedy")
    )


def _cell(perplexity: Value, least: float) -> str:
    form = ".2f" if perplexity.mean < 1e3 else ".0f" if perplexity.mean < 1e5 else ".1e"
    return cell(form, *perplexity) + ("*" if perplexity.mean == least else "")


def remedies_findings(points: Sequence[Point]) -> list[Finding]:
    """Of each model: the fewest bits that hold it, for each of `KINDS`; the format that a remedy saves most; the
    formats that nothing saves. Nothing of a single draw."""
    models = dict.fromkeys(point.model for point in points if point.cost.deviation is not None)
    return [finding for model in models for finding in _of_model(model, points)]


def _of_model(model: str, points: Sequence[Point]) -> list[Finding]:
    ours = [point for point in points if point.model == model]
    uncached = [point for point in ours if point.kind != "cache"]
    formats = {
        name: [point for point in uncached if point.format == name]
        for name in dict.fromkeys(point.format for point in uncached)
    }
    sentences = [(sentence, "frontier") for kind in KINDS for sentence in _fewest(ours, kind, model)]
    sentences += [(sentence, "remedies") for sentence in (*_saved(formats.values()), *_lost(formats, model))]
    return [Finding(sentence, f"{table}_{model}") for sentence, table in sentences]


def _saved(formats: Iterable[Sequence[Point]]) -> list[str]:
    """The format whose log-perplexity a remedy brings down most, if that is more than of the next."""
    pairs = [
        (next(point for point in group if point.remedy == NONE), min(group, key=lambda point: point.cost.mean))
        for group in formats
        if any(point.remedy == NONE for point in group)
    ]
    if not pairs:
        return []
    if not any(plain.perplexity.is_above(best.perplexity) for plain, best in pairs):
        return ["No remedy has a measurable benefit."]
    (plain, best), *others = sorted(pairs, key=lambda pair: _saving(*pair).mean, reverse=True)
    if others and not _saving(plain, best).is_above(_saving(*others[0])):
        return []
    return [
        f"{plain.format} gains most from a remedy: {best.remedy} reduces its increase of perplexity from "
        f"{percent(*plain.cost)} to {percent(*best.cost)}."
    ]


def _saving(plain: Point, best: Point) -> Value:
    """The log-perplexity between a format plain and with its best remedy."""
    scatter = (point.perplexity.spread / point.perplexity.mean for point in (plain, best))
    return Value(math.log(plain.perplexity.mean / best.perplexity.mean), math.hypot(*scatter))


def _fewest(points: Sequence[Point], kind: str, model: str) -> list[str]:
    """The format of fewest bits that holds the model with certainty; weights on the grid of their file say nothing."""
    points = [point for point in points if point.kind == kind and not point.on_grid]
    if not points:
        return []
    held = [point for point in points if exact(HELD).is_above(point.cost)]
    if not held:
        return [f"No format of {KINDS[kind]} keeps {model} within {100 * HELD:.0f} % of its perplexity."]
    fewest = min(point.bits for point in held)
    which = listed(
        f"{point.format} with {point.remedy} ({percent(*point.cost)})" for point in held if point.bits == fewest
    )
    return [
        f"The fewest bits of {KINDS[kind]} that keep {model} within {100 * HELD:.0f} % of its perplexity are "
        f"{fewest:.4g}: {which}."
    ]


def _lost(formats: dict[str, list[Point]], model: str) -> list[str]:
    """The formats that cost more than that with every remedy."""
    lost = [name for name, points in formats.items() if all(point.cost.is_above(exact(HELD)) for point in points)]
    if not lost:
        return []
    verb = "raises" if len(lost) == 1 else "raise"
    limit = f"{100 * HELD:.0f} %"
    return [f"With every remedy tried, {listed(lost)} {verb} the perplexity of {model} by more than {limit}."]
