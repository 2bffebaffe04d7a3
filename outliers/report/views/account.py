"""The account of features, part by part: their writers, their readers, and the weights that matter."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import pandas as pd

from outliers.metrics.keys.view import features_of, is_of_keys, keys_section
from outliers.metrics.origins.view import account_of, origins_section
from outliers.presets.readers import readings
from outliers.report.section import FINDINGS, Finding, Section, together
from outliers.report.views.massive import massive_section
from outliers.report.views.massive import sentences as massive
from outliers.report.views.readers import read_by, readers_section
from outliers.report.views.super_weights import carried_by, super_weights_section

Sentence = tuple[int, str, str]  # feature, text, and the name of the table that it is from


class Part(NamedTuple):
    """A part of the account.

    has: whether a row is of it. section: of all rows. sentences: what they say of each feature, most telling first.
    """

    has: Callable[[dict], bool]
    section: Callable[[list[dict]], Section]
    sentences: Callable[[list[dict]], Iterator[Sentence]]


def _is_of_writers(row: dict) -> bool:
    return row["metric"].startswith("origins.")


def _of_writers(rows: list[dict]) -> Iterator[Sentence]:
    frame = pd.DataFrame(filter(_is_of_writers, rows))
    for feature in frame["feature"].dropna().unique():
        terms = frame[(frame["feature"] == feature) | frame["feature"].isna()]
        yield from ((int(feature), text, at) for text, at in account_of(terms))


PARTS = (
    Part(_is_of_writers, origins_section, _of_writers),
    Part(lambda row: "subject" in row, readers_section, lambda rows: read_by(readings(rows))),
    Part(lambda row: row["metric"] == "damage.kl", super_weights_section, carried_by),
    Part(lambda row: "unattended" in row, massive_section, massive),
    Part(is_of_keys, keys_section, features_of),
)


def account_section(rows: list[dict]) -> Section:
    """The parts of the account of one model that were measured, with the sentences on a feature side by side."""
    parts = [part for part in PARTS if any(map(part.has, rows))]
    sections = [part.section(rows) for part in parts]
    findings = _findings(part.sentences(rows) for part in parts)
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
