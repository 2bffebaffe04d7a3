"""What a sweep of schemes says."""

from collections.abc import Sequence

from outliers.report.analysis import exact
from outliers.report.findings.words import count, listed, percent
from outliers.report.section import Finding

TABLE = "table1_increase"
# Scheme to the same with outlier features in 16 bits.
DECOMPOSED = {
    "absmax-vector": "llm.int8",
    "zeropoint-vector": "llm.int8-zeropoint",
    "absmax-row": "absmax-row-decomp",
}


def sweep_findings(rows: Sequence[dict], names: dict[str, str]) -> list[Finding]:
    """What costs most, what outlier features in 16 bits save, what costs least, of the model that it costs most.

    Nothing of a single draw.

    rows: of schemes, with their costs as `outliers.report.analysis.costs` has them. names: what models are called.
    """
    if not rows or any(row["cost"].deviation is None for row in rows):
        return []
    most, *_ = rows = sorted(rows, key=lambda row: -row["cost"].mean)
    if not _costs(most):
        models = f"any of {count(len(names))} models" if len(names) > 1 else next(iter(names.values()))
        return [Finding(f"No scheme costs {models} perplexity beyond the scatter of rounding.", TABLE)]
    schemes = {row["scheme"]: row for row in rows if row["model"] == most["model"]}
    name = names[most["model"]]
    sentences = [f"{most['scheme']} costs {name} {percent(*most['cost'])} of its perplexity."]
    sentences += [*_saved(schemes), *_least(schemes, name), *_others(rows, names)]
    return [Finding(sentence, TABLE) for sentence in sentences]


def _costs(row: dict) -> bool:
    return row["cost"].is_above(exact(0))


def _saved(schemes: dict[str, dict]) -> list[str]:
    """What outlier features in 16 bits save, of the first schemes of `DECOMPOSED`; or that nothing could be shown."""
    pairs = [(schemes[one], schemes[other]) for one, other in DECOMPOSED.items() if {one, other} <= schemes.keys()]
    if not pairs:
        return []
    both = ", ".join(f"{percent(*row['cost'])} under {row['scheme']}" for row in pairs[0])
    before, after = (row["cost"] for row in pairs[0])
    if not before.is_above(after):
        return [f"That outlier features in 16 bits save anything could not be shown: {both}."]
    return [f"Outlier features in 16 bits bring the cost down: {both}."]


def _least(schemes: dict[str, dict], name: str) -> list[str]:
    """What costs nothing that could be shown, or else least."""
    free = [scheme for scheme, row in schemes.items() if not _costs(row)]
    if free:
        return [f"That {listed(free)} cost{'s' if len(free) == 1 else ''} {name} anything could not be shown."]
    *_, second, least = [None, *schemes.values()]
    if second is None or not second["cost"].is_above(least["cost"]):
        return []
    return [f"{least['scheme']} costs {name} least: {percent(*least['cost'])}."]


def _others(rows: list[dict], names: dict[str, str]) -> list[str]:
    """How many models lose at least one per cent under some scheme, where there are several."""
    broken = {row["model"] for row in rows if row["cost"].is_above(exact(0.01))}
    if len(names) < 2:
        return []
    if len(broken) == len(names):
        return ["Each of the models loses more than one per cent under some scheme."]
    verb = "loses" if len(broken) == 1 else "lose"
    return [f"{count(len(broken)).capitalize()} of {count(len(names))} models {verb} more than one per cent."]
