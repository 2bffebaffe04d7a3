"""What footprints say."""

import pandas as pd

from outliers.report.findings.words import count, part
from outliers.report.section import Finding


def memory_findings(largest: pd.DataFrame, footprints: pd.DataFrame) -> list[Finding]:
    """On how much hardware 8 bits hold another model than 16, an example, and what a model's total shrinks to.

    largest, footprints: as the functions of these names of Table 3 make them.
    """
    findings = []
    if len(largest):
        other = largest[largest["8-bit"] != largest["16-bit"]]
        findings.append(Finding(_held(other, len(largest)), "table3"))
    shares = (footprints["total 8"] / footprints["total 16"]).dropna()
    if len(shares):
        findings.append(Finding(_shrinks(shares), "footprints"))
    return findings


def _held(other: pd.DataFrame, every: int) -> str:
    if other.empty:
        return "On no hardware do 8 bits hold a larger model than 16."
    one = other.iloc[0]
    where = f"{one['hardware']} of {one['gigabytes']:g} GB"
    of = f"on {count(len(other))} of {count(every)} kinds of hardware" if every > 1 else "there"
    return f"8 bits hold a larger model than 16 {of}: {one['8-bit']} rather than {one['16-bit']} on {where}."


def _shrinks(shares: pd.Series) -> str:
    low, high = part(shares.min()), part(shares.max())
    if len(shares) == 1:
        return f"In 8 bits {shares.index[0]} needs {low} of the memory of 16 bits."
    return f"In 8 bits models need {low} ({shares.idxmin()}) to {high} ({shares.idxmax()}) of the memory of 16 bits."
