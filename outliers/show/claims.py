"""Findings as data: a claim records a sentence and the comparison that it needs, and one engine fills it from rows."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from outliers.show import words
from outliers.show.section import Finding
from outliers.show.value import Numbers, Value, exact

OPTIONAL = re.compile(r"\[\[(.*?)\]\]")  # [[…]] is left out if a field in it has no value
NEXT = "next"  # the row ranked just behind the picked one


class Claim(NamedTuple):
    """A sentence about rows, with the condition under which it holds.

    at: the table or figure that shows the evidence. yes: the sentence if the condition holds, a format string over the
    fields of the picked row, of the next row as {next[field]}, and of all rows. no: the sentence otherwise; nothing by
    default. by: the field by which the row with the largest (or, with pick=min, smallest) value is picked; by default
    the first row is. against: numbers, names of fields, or `NEXT`, all of which the picked value must exceed (with
    pick=min: fall below) by more than the scatter of both, so that no tie is reported as a finding. of_every: whether
    the sentence is about every cell.
    """

    at: str
    yes: str
    no: str = ""
    by: str = ""
    pick: Callable = max
    against: Sequence[float | str] = ()
    of_every: bool = False


def say(claim: Claim, rows: Iterable[Mapping], holds: bool | None = None, **of_all: Any) -> list[Finding]:
    """Return the finding of a claim on rows; [] if it has none, or uses a number of too few blocks or documents.

    holds: whether the condition holds; by default it is evaluated from `Claim.against`. of_all: further fields that are
    the same for all rows.
    """
    rows = sorted(rows, key=lambda row: _value(row[claim.by]).mean, reverse=claim.pick is max) if claim.by else [*rows]
    if not rows:
        return []
    fields = {**of_all, **rows[0], NEXT: rows[1] if len(rows) > 1 else {}}
    if not all(number.bears_claims for number in fields.values() if isinstance(number, Value)):
        return []
    text = _filled(claim.yes if (_holds(claim, fields) if holds is None else holds) else claim.no, fields)
    return [Finding(text, claim.at.format_map(fields), fields.get("feature"), claim.of_every)] if text else []


def say_each(claim: Claim, rows: Iterable[Mapping], **of_all: Any) -> list[Finding]:
    return [finding for row in rows for finding in say(claim, [row], **of_all)]


def _value(number: float | Value) -> Value:
    return number if isinstance(number, Value) else exact(number)


def _holds(claim: Claim, fields: Mapping) -> bool:
    others = (fields[NEXT].get(claim.by) if name == NEXT else fields.get(name, name) for name in claim.against)
    pairs = [(_value(fields[claim.by]), _value(other)) for other in others if other is not None]
    return all(mine.is_above(other) if claim.pick is max else other.is_above(mine) for mine, other in pairs)


def _filled(sentence: str, fields: Mapping) -> str:
    parts = enumerate(OPTIONAL.split(sentence))
    return "".join(
        _WORDS.vformat(part, (), fields) for place, part in parts if place % 2 == 0 or not _WORDS.lacks(part, fields)
    )


class _Words(Numbers):
    """A formatter with functions of `words` as codes ({cost:percent}) and plurals by count (layer{layers:|s})."""

    def lacks(self, part: str, fields: Mapping) -> bool:
        """Return whether a field that a part of a sentence names is None or NaN."""
        values = [fields.get(name.partition("[")[0]) for _, name, _, _ in self.parse(part) if name]
        return any(value is None or value != value for value in values)

    def format_field(self, value: Any, form: str) -> str:
        if "|" in form:
            one, many = form.split("|")
            return one if (len(value) if isinstance(value, list | tuple) else value) == 1 else many
        if word := getattr(words, form.lower(), None):
            text = word(*value.shown if isinstance(value, Value) else [value])
            return text if form.islower() else text.capitalize()
        text = super().format_field(value, form)
        return text if isinstance(value, str) else text.replace("-", "−").replace("%", " %")


_WORDS = _Words()
