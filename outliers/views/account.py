"""The account of features, part by part: their writers, their readers, and the weights that matter."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pandas as pd

from outliers.presets.readers import readings
from outliers.show.section import FINDINGS, Failures, Finding, Section, failures, together
from outliers.show.tables import values_table
from outliers.show.value import is_beyond
from outliers.views.keys import features_of, is_of_keys, keys_section
from outliers.views.massive import massive_section
from outliers.views.massive import sentences as massive
from outliers.views.origins import account_of, is_of_writers, origins_section
from outliers.views.readers import read_by, readers_section
from outliers.views.super_weights import carried_by, super_weights_section

Sentence = tuple[int, str, str]  # feature, text, and the name of the table that it is from


class Part(NamedTuple):
    """A part of the account.

    has: whether a row is of it. section: of all rows. sentences: what they say of each feature, most telling first.
    compares: whether they compare each cell with all others, so that none may be missing.
    """

    has: Callable[[dict], bool]
    section: Callable[[list[dict]], Section]
    sentences: Callable[[list[dict]], Iterator[Sentence]]
    compares: bool = True


def _of_writers(rows: list[dict]) -> Iterator[Sentence]:
    frame = pd.DataFrame(filter(is_of_writers, rows))
    for feature in frame["feature"].dropna().unique():
        terms = frame[(frame["feature"] == feature) | frame["feature"].isna()]
        yield from ((int(feature), text, at) for text, at in account_of(terms))


PARTS = (
    Part(is_of_writers, origins_section, _of_writers, compares=False),
    Part(lambda row: "subject" in row, readers_section, lambda rows: read_by(readings(rows))),
    Part(lambda row: row["metric"] == "damage.kl", super_weights_section, carried_by),
    Part(lambda row: "unattended" in row, massive_section, massive),
    Part(is_of_keys, keys_section, features_of, compares=False),
)


@failures(Failures.SHOWN)
def account_section(rows: list[dict]) -> Section:
    """The parts of the account of one model that were measured, with the sentences on a feature side by side; where a
    cell has no number, values stand in the place of parts that compare."""
    finished = [row for row in rows if not is_beyond(row)]
    whole = len(finished) == len(rows)
    parts = [part for part in PARTS if any(map(part.has, finished)) and (whole or not part.compares)]
    sections = [part.section(finished) for part in parts]
    if not whole:
        others = [row for row in rows if not any(part.has(row) for part in parts)]
        table = values_table(others, ["stack"])
        sections.append(Section("Measurements", rows, table.printed, [table]))
    findings = _findings(part.sentences(finished) for part in parts)
    return together(sections[0].title, sections)._replace(rows=rows, findings=findings)


def _findings(parts: Iterable[Iterator[Sentence]]) -> list[Finding]:
    """As many as a section has: of each feature the first sentences of all parts before further ones."""
    ranked = []
    for sentences in parts:
        told: Counter[int] = Counter()
        for feature, text, at in sentences:
            ranked.append((told[feature], feature, Finding(text, at)))
            told[feature] += 1
    features = list(dict.fromkeys(feature for _, feature, _ in ranked))
    chosen = sorted(ranked, key=lambda ranking: ranking[0])[:FINDINGS]
    return [finding for _, _, finding in sorted(chosen, key=lambda ranking: features.index(ranking[1]))]
