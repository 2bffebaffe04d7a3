"""What a sweep of formats with remedies says."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from outliers.report.findings.words import are_apart, listed, percent, scatter
from outliers.report.section import Finding

if TYPE_CHECKING:
    from outliers.report.artefacts.remedies import Point

HELD = 0.05  # a format holds a model where it costs less of its perplexity


def remedies_findings(points: Sequence["Point"], without: str) -> list[Finding]:
    """Of each model: the format that a remedy saves most; the fewest bits that hold it; the formats that nothing saves.
    Nothing of a single draw.

    without: the name that points without a remedy have.
    """
    models = dict.fromkeys(point.model for point in points if point.deviation is not None)
    return [finding for model in models for finding in _of_model(model, points, without)]


def _of_model(model: str, points: Sequence["Point"], without: str) -> list[Finding]:
    own = [point for point in points if point.model == model]
    formats = {name: [point for point in own if point.format == name] for name in dict.fromkeys(p.format for p in own)}
    said = [*_saved(formats.values(), without), *_fewest(own, model), *_lost(formats, model)]
    return [Finding(sentence, f"remedies_{model}") for sentence in said]


def _deviation(point: "Point") -> float:
    return scatter(point.deviation)


def _relative(point: "Point") -> float:
    return _deviation(point) / point.perplexity


def _cost(point: "Point") -> str:
    return percent(point.ratio - 1, _relative(point) * point.ratio)


def _are_apart(one: "Point", other: "Point") -> bool:
    return are_apart(one.perplexity, other.perplexity, _deviation(one), _deviation(other))


def _saved(formats: Iterable[Sequence["Point"]], without: str) -> list[str]:
    """The format whose log-perplexity a remedy brings down most, if that is more than of the next."""
    pairs = [
        (next(point for point in of_format if point.remedy == without), min(of_format, key=lambda one: one.perplexity))
        for of_format in formats
        if any(point.remedy == without for point in of_format)
    ]
    if not pairs:
        return []
    first, *others = sorted(pairs, key=_saving, reverse=True)
    if not any(_are_apart(*pair) for pair in pairs):
        return ["That any remedy saves anything could not be shown."]
    if others and not are_apart(_saving(first), _saving(others[0]), *map(_relative, first + others[0])):
        return []
    plain, best = first
    return [f"{plain.format} is saved most: it costs {_cost(plain)} plain, {_cost(best)} with {best.remedy}."]


def _saving(pair: tuple["Point", "Point"]) -> float:
    """The log-perplexity between a format plain and with its best remedy."""
    plain, best = pair
    return math.log(plain.ratio / best.ratio)


def _fewest(points: Sequence["Point"], model: str) -> list[str]:
    """The format of fewest bits that holds the model with certainty."""
    held = [point for point in points if point.ratio * (1 + 2 * _relative(point)) < 1 + HELD]
    if not held:
        return [f"No format holds {model} within {100 * HELD:.0f} % of its perplexity."]
    fewest = min(point.bits for point in held)
    which = listed(f"{point.format} with {point.remedy} ({_cost(point)})" for point in held if point.bits == fewest)
    return [
        f"The fewest bits a value within {100 * HELD:.0f} % of the perplexity of {model} are {fewest:.4g}: {which}."
    ]


def _lost(formats: dict[str, list["Point"]], model: str) -> list[str]:
    """The formats that cost more than that with every remedy."""
    lost = [
        name
        for name, of_format in formats.items()
        if all(point.ratio * (1 - 2 * _relative(point)) > 1 + HELD for point in of_format)
    ]
    if not lost:
        return []
    verb = "costs" if len(lost) == 1 else "cost"
    return [f"Whatever the remedy, {listed(lost)} {verb} {model} more than {100 * HELD:.0f} % of its perplexity."]
