"""What a sweep of formats with remedies says."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from outliers.report.analysis import Value, exact
from outliers.report.findings.words import listed, percent
from outliers.report.section import Finding

if TYPE_CHECKING:
    from outliers.plot.remedies import Point

HELD = 0.05  # a format holds a model where it costs less of its perplexity


def remedies_findings(points: Sequence["Point"], without: str) -> list[Finding]:
    """Of each model: the format that a remedy saves most; the fewest bits that hold it; the formats that nothing saves.
    Nothing of a single draw.

    without: the name that points without a remedy have.
    """
    models = dict.fromkeys(point.model for point in points if point.cost.deviation is not None)
    return [finding for model in models for finding in _of_model(model, points, without)]


def _of_model(model: str, points: Sequence["Point"], without: str) -> list[Finding]:
    own = [point for point in points if point.model == model]
    formats = {name: [point for point in own if point.format == name] for name in dict.fromkeys(p.format for p in own)}
    sentences = [*_saved(formats.values(), without), *_fewest(own, model), *_lost(formats, model)]
    return [Finding(sentence, f"remedies_{model}") for sentence in sentences]


def _saved(formats: Iterable[Sequence["Point"]], without: str) -> list[str]:
    """The format whose log-perplexity a remedy brings down most, if that is more than of the next."""
    pairs = [
        (next(point for point in of_format if point.remedy == without), min(of_format, key=lambda one: one.cost.mean))
        for of_format in formats
        if any(point.remedy == without for point in of_format)
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


def _saving(plain: "Point", best: "Point") -> Value:
    """The log-perplexity between a format plain and with its best remedy."""
    scatter = (point.perplexity.spread / point.perplexity.mean for point in (plain, best))
    return Value(math.log(plain.perplexity.mean / best.perplexity.mean), math.hypot(*scatter))


def _fewest(points: Sequence["Point"], model: str) -> list[str]:
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


def _lost(formats: dict[str, list["Point"]], model: str) -> list[str]:
    """The formats that cost more than that with every remedy."""
    lost = [name for name, points in formats.items() if all(point.cost.is_above(exact(HELD)) for point in points)]
    if not lost:
        return []
    verb = "costs" if len(lost) == 1 else "cost"
    return [f"Whatever the remedy, {listed(lost)} {verb} {model} more than {100 * HELD:.0f} % of its perplexity."]
