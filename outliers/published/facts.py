"""Published facts about public models, with their sources, and whether measured values agree with them.

The facts are data, `facts.csv` and `sources.csv` beside this file: one line per number, with the cell, the metric and
the column that measure it, if any do (docs/published.md). Nothing here imports torch.
"""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from outliers.errors import UserError, reason_of
from outliers.files import start_of
from outliers.published.numbers import model_key
from outliers.show.tables import Table
from outliers.show.words import amount, listed

FACTS, SOURCES = (Path(__file__).with_name(name) for name in ("facts.csv", "sources.csv"))
MOST_BYTES = 1_000_000  # largest file of facts
CELLS = ("", "trace", "candidates", "perplexity")  # metrics that measure facts; "" for facts that none measures
COLUMNS = (
    *("source", "model", "block", "bos", "text", "fact", "under", "note"),
    *("cell", "metric", "where", "column", "published", "tolerance"),
)
Compared = tuple[str, bool]  # the measured values in words, and whether they agree


class Publication(NamedTuple):
    """A published source.

    looked_up: "yes" if the numbers were read there; otherwise another source cites them.
    """

    name: str
    source: str
    where: str = ""
    licence: str = ""
    protocol: str = ""
    looked_up: str = "yes"

    @property
    def short(self) -> str:
        return self.source.partition(", arXiv:")[0]


class PublishedNumber(NamedTuple):
    """A published number of a fact, and the column of our values, filtered by metric and `where`, that measures it.

    where: fields of our values, and what they must be, as `published`. published: numbers or ranges (LOW..HIGH or
    LOW..), separated by blanks, one of which ours must equal. tolerance: of each of them, such as 0.05 or 1%.
    """

    metric: str
    where: dict[str, str]
    column: str
    published: str
    tolerance: str

    def compared(self, values: Iterable[dict]) -> Compared:
        """Describe our values in words, and say whether all of them match published ones.

        A list in a row matches if it contains all published numbers.
        """
        rows = [value for value in values if value["metric"] == self.metric]
        for name, expected in self.where.items():
            rows = [value for value in rows if _is_in(value[name], expected)]
        measured = [value[self.column] for value in rows]
        if measured and isinstance(measured[0], list):
            same = {*map(int, self.published.split())} <= set(measured[0])
            return f"{self.column} {listed(measured[0]) if measured[0] else 'none'}", same
        same = bool(measured) and all(_is_in(value, self.published, self.tolerance) for value in measured)
        if self.column == "value":
            what, sizes = self.metric.rpartition(".")[2], [min(measured), max(measured)] if measured else []
            forms = (f"{size:,g}" if size == int(size) else amount(size) for size in sizes)  # such as a mean count of 1
            numbers = " to ".join(dict.fromkeys(forms))
        else:
            what, numbers = self.column, listed(sorted(set(measured))) if measured else ""
        place = next((f" at {name} {expected.replace('..', ' to ')}" for name, expected in self.where.items()), "")
        return f"{what} {numbers or 'none'}{place}", same


def _is_in(value: float, expected: str, tolerance: str = "") -> bool:
    """Return whether the magnitude of a value equals one of the numbers, or is in one of the ranges, within tolerance.

    Raise ValueError if `expected` or the tolerance is no number.
    """
    margin = float(tolerance.rstrip("%") or 0)
    for low, dots, high in (part.partition("..") for part in expected.split()):
        ends = float(low), float(high or "inf" if dots else low)
        below, above = (end * margin / 100 if "%" in tolerance else margin for end in ends)
        if ends[0] - below <= abs(value) <= ends[1] + above:
            return True
    return False


class Fact(NamedTuple):
    """A published fact about a model, measured on blocks of `block` tokens, or on pictures if `block` is None.

    claim: the fact in words. bos: whether blocks begin with the model's first token. under: a change made to the model,
    if any, which is not reproduced here. published: its first number, as in the file. cell: our metric that measures
    the fact; "" if none does.
    """

    source: Publication
    model: str
    block: int | None
    bos: bool
    text: str
    claim: str
    under: str
    note: str
    published: str
    cell: str
    numbers: list[PublishedNumber]

    @property
    def words(self) -> str:
        """The claim with its conditions."""
        return f"{self.claim}{self.under and f', {self.under}'}"

    @property
    def cell_key(self) -> tuple:
        """The fields that facts measured by one cell share."""
        return self.cell, self.text, self.block, self.bos

    def compared(self, values: Sequence[dict]) -> Compared:
        """Describe our values of the model in words, and say whether all numbers of the fact agree."""
        words, same = zip(*(number.compared(values) for number in self.numbers), strict=True)
        return ", ".join(words), all(same)


def read_facts(file: str | Path = FACTS) -> list[Fact]:
    """Read the facts of a file, by default of the project's own.

    Raises:
        UserError: there is no such file, or a line of it is damaged.
    """
    sources = {line["name"]: Publication(**line) for line in _lines(SOURCES)}
    facts: dict[tuple, Fact] = {}
    for number, line in enumerate(_lines(Path(file)), 2):
        try:
            *about, note, cell, metric, where, column, published, tolerance = (line[name] for name in COLUMNS)
            source, model, block, bos, *words = about
            if cell not in CELLS:
                raise ValueError(f"cell {cell!r}; expected {', '.join(CELLS[1:])} or nothing")
            read = sources.get(source, Publication(source, source)), model, int(block) if block else None, bos == "yes"
            fact = facts.setdefault(tuple(about), Fact(*read, *words, note, published, cell, []))
            if cell:
                places = dict(place.split("=") for place in where.split())
                for expected in (published, *places.values()):
                    _is_in(math.nan, expected, tolerance)  # raises ValueError if the text is no number
                fact.numbers.append(PublishedNumber(metric, places, column, published, tolerance))
        except (KeyError, ValueError, AttributeError) as error:
            raise UserError(f"line {number} of '{file}' is no fact: {error}; expected {', '.join(COLUMNS)}") from None
    if not facts:
        raise UserError(f"'{file}' has no facts; expected a line each number, with columns {', '.join(COLUMNS)}")
    return list(facts.values())


def _lines(file: Path) -> list[dict]:
    try:
        content = start_of(file, MOST_BYTES)
        return list(csv.DictReader((content or b"").decode().splitlines(keepends=True)))
    except (OSError, ValueError, csv.Error) as error:
        raise UserError(f"file of facts '{file}' cannot be read: {reason_of(error, 300)}") from None


def facts_of(facts: Iterable[Fact], models: Sequence[str]) -> list[Fact]:
    """Return the facts of some models, matched by `model_key`."""
    keys = set(map(model_key, models))
    return [fact for fact in facts if model_key(fact.model) in keys]


def published_elsewhere(models: list[str]) -> Table | None:
    """Return a table of values that others published for these models; None if none are known."""
    known = [
        [model_key(fact.model), fact.words, fact.note, fact.source.short] for fact in facts_of(read_facts(), models)
    ]
    caption = "Published elsewhere, each under the protocol of its source."
    return Table.of_words("elsewhere", caption, ["model", "published", "note", "source"], known) if known else None
