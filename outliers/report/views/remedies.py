"""What saves a model: perplexity by number format and remedy, against bits; an experiment beyond the paper."""

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from outliers.plot.remedies import NONE, Point, points, remedy_costs
from outliers.report.analysis import Value, exact, scattered_by, unrounded
from outliers.report.section import Drawing, Finding, Section, printed
from outliers.report.tables import MISSING, Table, cell, scatter_note
from outliers.report.words import listed, percent

CAPTION = (
    "What number formats add to the perplexity of {}, with remedies and without; behind a format stand the bits of a "
    "value, scales included, on average of inputs and weights. Bars: one standard deviation by {}. Published, of "
    "other texts: LLaMA-2-7B (QuaRot), 13 billion parameters (absmax), OPT-175B (SmoothQuant, LLM.int8())."
)


def remedies_section(rows: list[dict]) -> Section:
    """What a sweep of formats with remedies shows."""
    note, measured = scatter_note(rows), points(rows)
    models = list(dict.fromkeys(point.model for point in measured))
    tables = [remedies_table(model, [point for point in measured if point.model == model]) for model in models]
    files = ["remedies"] if len(models) == 1 else [table.name for table in tables]
    drawings = [
        Drawing.of(file, CAPTION.format(model, scattered_by(rows)), remedy_costs(rows, model=model))
        for file, model in zip(files, models, strict=True)
    ]
    findings = remedies_findings(measured)
    return Section("What saves a model", rows, printed(tables, [note]), tables, drawings, [note], findings=findings)


def remedies_table(model: str, points: list[Point]) -> Table:
    """Formats down, remedies across; in the cells perplexity with its scatter."""
    remedies = list(dict.fromkeys(point.remedy for point in points))
    cells = []
    for format in dict.fromkeys(point.format for point in points):
        of_format = {point.remedy: point for point in points if point.format == format}
        bits = next(iter(of_format.values()))
        least = min(point.perplexity.mean for point in of_format.values())
        columns = {remedy: _cell(point.perplexity, least) for remedy, point in of_format.items()}
        cells.append(
            [
                format,
                f"{bits.weight_bits:.2f}, {bits.activation_bits:.2f}",
                *(columns.get(remedy, MISSING) for remedy in remedies),
            ]
        )
    caption = (
        f"Perplexity of {model} by number format, with the bits of its weights and inputs, and by remedy; the least of "
        "each format is marked."
    )
    data = pd.DataFrame(map(unrounded, points))
    return Table(f"remedies_{model}", caption, ["format", "bits", *remedies], cells, data)


def _cell(perplexity: Value, least: float) -> str:
    form = ".2f" if perplexity.mean < 1e3 else ".0f" if perplexity.mean < 1e5 else ".1e"
    return cell(form, *perplexity) + ("*" if perplexity.mean == least else "")


HELD = 0.05  # a format holds a model where it costs less of its perplexity


def remedies_findings(points: Sequence[Point]) -> list[Finding]:
    """Of each model: the format that a remedy saves most; the fewest bits that hold it; the formats that nothing saves.
    Nothing of a single draw."""
    models = dict.fromkeys(point.model for point in points if point.cost.deviation is not None)
    return [finding for model in models for finding in _of_model(model, points)]


def _of_model(model: str, points: Sequence[Point]) -> list[Finding]:
    own = [point for point in points if point.model == model]
    formats = {name: [point for point in own if point.format == name] for name in dict.fromkeys(p.format for p in own)}
    sentences = [*_saved(formats.values()), *_fewest(own, model), *_lost(formats, model)]
    return [Finding(sentence, f"remedies_{model}") for sentence in sentences]


def _saved(formats: Iterable[Sequence[Point]]) -> list[str]:
    """The format whose log-perplexity a remedy brings down most, if that is more than of the next."""
    pairs = [
        (next(point for point in of_format if point.remedy == NONE), min(of_format, key=lambda one: one.cost.mean))
        for of_format in formats
        if any(point.remedy == NONE for point in of_format)
    ]
    if not pairs:
        return []
    if not any(plain.perplexity.is_above(best.perplexity) for plain, best in pairs):
        return ["That any remedy saves anything could not be shown."]
    (plain, best), *others = sorted(pairs, key=lambda pair: _saving(*pair).mean, reverse=True)
    if others and not _saving(plain, best).is_above(_saving(*others[0])):
        return []
    return [
        f"{plain.format} is saved most: it costs {percent(*plain.cost)} plain, {percent(*best.cost)} with "
        f"{best.remedy}."
    ]


def _saving(plain: Point, best: Point) -> Value:
    """The log-perplexity between a format plain and with its best remedy."""
    scatter = (point.perplexity.spread / point.perplexity.mean for point in (plain, best))
    return Value(math.log(plain.perplexity.mean / best.perplexity.mean), math.hypot(*scatter))


def _fewest(points: Sequence[Point], model: str) -> list[str]:
    """The format of fewest bits that holds the model with certainty."""
    held = [point for point in points if exact(HELD).is_above(point.cost)]
    if not held:
        return [f"No format holds {model} within {100 * HELD:.0f} % of its perplexity."]
    fewest = min(point.bits for point in held)
    which = listed(
        f"{point.format} with {point.remedy} ({percent(*point.cost)})" for point in held if point.bits == fewest
    )
    return [
        f"The fewest bits a value within {100 * HELD:.0f} % of the perplexity of {model} are {fewest:.4g}: {which}."
    ]


def _lost(formats: dict[str, list[Point]], model: str) -> list[str]:
    """The formats that cost more than that with every remedy."""
    lost = [name for name, points in formats.items() if all(point.cost.is_above(exact(HELD)) for point in points)]
    if not lost:
        return []
    verb = "costs" if len(lost) == 1 else "cost"
    return [f"Whatever the remedy, {listed(lost)} {verb} {model} more than {100 * HELD:.0f} % of its perplexity."]
