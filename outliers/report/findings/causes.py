"""What training runs that differ in one thing each say."""

import math
from collections.abc import Iterable

import pandas as pd

from outliers.report.findings.words import NAMED, amount, are_apart, count, listed, percent
from outliers.report.section import Finding
from outliers.report.seeds import Ratio, of_runs, ratio

COMPARED = {  # by the scatter of seeds, the most telling first
    "max.residual": "largest |x| of the residual stream",
    "max.inputs": "largest input of a projection",
    "perplexity": "perplexity",
}
COST = "cost.absmax"


def causes_findings(ends: pd.DataFrame, at: str) -> list[Finding]:
    """In which runs outlier features grow, what differs from the first run beyond the scatter of seeds, what it costs.

    ends: a row a run and seed, as `ends` of the artefact makes it. at: the table that shows it.
    """
    first, *others = ends["run"].unique()
    said = [_having(ends)]
    if others:
        several = ends["seed"].nunique() > 1
        said += _apart(ends, first, others) if several else [_range(ends)]
    said += _cost(ends)
    return [Finding(sentence, at) for sentence in said]


def _having(ends: pd.DataFrame) -> str:
    """In which runs outlier features are there at the end, in some seed."""
    most = ends.groupby("run", sort=False)["count"].max()
    ever, never = most.index[most > 0].tolist(), most.index[most == 0].tolist()
    if not ever:
        which = f"any of {count(len(most))} runs" if len(most) > 1 else _quoted(never[0])
        return f"No outlier feature by the criterion grew in {which}."
    if not never:
        return f"Outlier features by the criterion grew in {'all runs' if len(most) > 1 else _quoted(ever[0])}."
    if len(ever) < len(never):
        which = f"{_named(ever)}, and in none of {count(len(never))} others"
    else:
        which = f"{count(len(ever))} of {count(len(most))} runs, and none in {_named(never)}"
    return f"Outlier features by the criterion grew in {which}."


def _named(runs: list[str]) -> str:
    """Runs by name, or, where they are many, how many they are."""
    return f"{count(len(runs))} runs" if len(runs) > NAMED else listed(map(_quoted, runs))


def _quoted(run: str) -> str:
    return f"'{run}'"


def _range(ends: pd.DataFrame) -> str:
    """Between which runs the largest values are; of single runs, which nothing more can be said of."""
    column = "max.residual"
    least, most = ends.loc[ends[column].idxmin()], ends.loc[ends[column].idxmax()]
    return (
        f"The {COMPARED[column]} ends between {amount(least[column])} in {_quoted(least['run'])} and "
        f"{amount(most[column])} in {_quoted(most['run'])}."
    )


def _apart(ends: pd.DataFrame, first: str, others: list[str]) -> list[str]:
    """What is more or less than in the first run, by ratios whose intervals over seeds do not include 1."""
    said = []
    for column, name in COMPARED.items():
        values = of_runs(ends, column)
        ratios = {run: ratio(values[run], values[first]) for run in others}
        shown = {run: one for run, one in ratios.items() if one and one.is_shown}
        if not shown:
            said.append(f"That the {name} of any run is another than that of {_quoted(first)} could not be shown.")
            continue
        told = sorted(shown, key=lambda run: -abs(math.log(shown[run].value)))[:NAMED]
        told.sort(key=lambda run: shown[run].value)
        more = f", and differs in {count(len(shown) - len(told))} more" if len(shown) > len(told) else ""
        said.append(f"Beside {_quoted(first)} the {name} is {listed(_multiplied(told, shown))}{more}.")
    return said


def _multiplied(runs: Iterable[str], ratios: dict[str, Ratio]) -> list[str]:
    """By how much something of runs is multiplied, with the interval of that."""
    numbers = ((run, ratios[run].value, *ratios[run].interval) for run in runs)
    return [
        f"×\N{NO-BREAK SPACE}{value:.3g} [{low:.3g}, {high:.3g}] in {_quoted(run)}" for run, value, low, high in numbers
    ]


def _cost(ends: pd.DataFrame) -> list[str]:
    """What absmax costs at most beyond the scatter of rounding, and which run, if it is apart from the next."""
    if COST not in ends or f"{COST}_deviation" not in ends:
        return []
    worst, *others = sorted(zip(ends[COST] / 100, ends[f"{COST}_deviation"] / 100, ends["run"], strict=True))[::-1]
    share, scatter, run = worst
    if not (share > 0 and are_apart(share, 0, scatter)):
        return ["That absmax costs any of the models perplexity could not be shown."]
    is_told = all(are_apart(share, other, scatter, of_other) for other, of_other, _ in others[:1])
    where = f", in {_quoted(run)}" if is_told else ""
    return [f"absmax costs at most {percent(share, scatter)} of the perplexity{where}."]
