"""Claims: sentences as records of what they compare and whom they pick, and the one engine that says them of rows."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from outliers.show import words
from outliers.show.section import Finding
from outliers.show.value import Numbers, Value, exact

OPTIONAL = re.compile(r"\[\[(.*?)\]\]")  # a part of a sentence that is left out where a field of it has no value
NEXT = "next"  # the row behind the one that is picked


class Claim(NamedTuple):
    """A sentence about rows.

    at: the table or figure that shows it. yes: the sentence where it holds, filled with the fields of the row that is
    picked, of the next one as {next[field]}, and of all; no: where it does not, nothing by default. by: the field by
    which the row is picked, the largest or the smallest; the first row by default. against: what that must be beyond,
    by more than the scatter of both: numbers, fields of the row, and `NEXT`, so that no tie is told.
    """

    at: str
    yes: str
    no: str = ""
    by: str = ""
    pick: Callable = max
    against: Sequence[float | str] = ()


def say(claim: Claim, rows: Iterable[Mapping], holds: bool | None = None, **of_all: Any) -> list[Finding]:
    """The claim as rows bear it out: a finding, or none; holds: whether it does, by default as `against` says."""
    rows = sorted(rows, key=lambda row: _value(row[claim.by]).mean, reverse=claim.pick is max) if claim.by else [*rows]
    if not rows:
        return []
    fields = {**of_all, **rows[0], NEXT: rows[1] if len(rows) > 1 else {}}
    text = _filled(claim.yes if (_holds(claim, fields) if holds is None else holds) else claim.no, fields)
    return [Finding(text, claim.at.format_map(fields), fields.get("feature"))] if text else []


def say_each(claim: Claim, rows: Iterable[Mapping], **of_all: Any) -> list[Finding]:
    """The claim of each row alone."""
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
        _WORDS.vformat(part, (), fields) for place, part in parts if place % 2 == 0 or not _WORDS.misses(part, fields)
    )


class _Words(Numbers):
    """Fills fields by functions of `words`, {cost:percent}, and by how many they are, layer{layers:|s}."""

    def misses(self, part: str, fields: Mapping) -> bool:
        """Whether a field of a part is not there, or has no value."""
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
