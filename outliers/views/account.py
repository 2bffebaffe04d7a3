"""The account of features: their writers, their readers, and the weights that matter."""

from collections import Counter
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import NamedTuple

from outliers.runs.stages.readers import readings
from outliers.show.section import FINDINGS, NO_CONTEXT, Context, Finding, Section, together, values_section
from outliers.views.keys import is_of_keys, keys_section, writing_findings
from outliers.views.massive import massive_findings, massive_section
from outliers.views.origins import is_of_writers, origins_findings, origins_section
from outliers.views.readers import readers_findings, readers_section
from outliers.views.super_weights import super_weights_findings, super_weights_section


class AccountView(NamedTuple):
    """How one question of the account of features is shown, such as which weights write them.

    selects: whether a row answers the question. section: makes its section of all rows. findings: makes its findings,
    for each feature the most telling first. needs_all_cells: whether section and findings compare all cells with each
    other, so that none may be missing.
    """

    selects: Callable[[dict], bool]
    section: Callable[[list[dict]], Section]
    findings: Callable[[list[dict]], Iterable[Finding]]
    needs_all_cells: bool = True


ACCOUNT_VIEWS = (
    AccountView(is_of_writers, origins_section, origins_findings, needs_all_cells=False),
    AccountView(lambda row: "subject" in row, readers_section, lambda rows: readers_findings(readings(rows))),
    AccountView(lambda row: row["metric"] == "damage.kl", super_weights_section, super_weights_findings),
    AccountView(lambda row: "unattended" in row, massive_section, massive_findings),
    AccountView(is_of_keys, keys_section, writing_findings, needs_all_cells=False),
)


def account_section(rows: list[dict], context: Context = NO_CONTEXT) -> Section:
    """Show the parts of a model's account that were measured, with all findings on a feature together.

    If a cell has no number, parts that compare cells are replaced by a list of values.
    """
    whole = len(rows) >= len(context.rows)
    parts = [part for part in ACCOUNT_VIEWS if any(map(part.selects, rows)) and (whole or not part.needs_all_cells)]
    sections = [part.section(rows) for part in parts]
    if not whole:
        sections.append(values_section([row for row in context.rows if not any(part.selects(row) for part in parts)]))
    findings = _findings(part.findings(rows) for part in parts)
    return together(sections[0].title, sections)._replace(rows=rows, findings=findings)


def _findings(parts: Iterable[Iterable[Finding]]) -> list[Finding]:
    """Choose at most `FINDINGS` findings: the first of every part on each feature, before further ones."""
    ranked = []
    for findings in parts:
        counts: Counter[int] = Counter()
        for finding in findings:
            ranked.append((counts[finding.feature], finding))
            counts[finding.feature] += 1
    features = list(dict.fromkeys(finding.feature for _, finding in ranked))
    chosen = sorted(ranked, key=itemgetter(0))[:FINDINGS]
    return sorted((finding for _, finding in chosen), key=lambda finding: features.index(finding.feature))
