"""What training runs that differ in one thing each say."""

import math

import pandas as pd

from outliers.report.analysis import Value, exact, of_runs, ratio, value_of
from outliers.report.findings.words import NAMED, amount, count, listed, percent
from outliers.report.section import Finding
from outliers.report.tables import with_interval

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
    sentences = [_having(ends)]
    if others:
        several = ends["seed"].nunique() > 1
        sentences += _apart(ends, first, others) if several else [_range(ends)]
    return [Finding(sentence, at) for sentence in (*sentences, *_cost(ends))]


def _having(ends: pd.DataFrame) -> str:
    """In which runs outlier features are there at the end, in some seed."""
    most = ends.groupby("run", sort=False)["count"].max()
    ever, never = most.index[most > 0].tolist(), most.index[most == 0].tolist()
    if not ever:
        which = f"any of {count(len(most))} runs" if len(most) > 1 else _quoted(never[0])
        return f"No outlier feature by the criterion grew in {which}."
    if not never:
        which = "all runs" if len(most) > 1 else _quoted(ever[0])
    elif len(ever) < len(never):
        which = f"{_quoted(*ever)}, and in none of {count(len(never))} others"
    else:
        which = f"{count(len(ever))} of {count(len(most))} runs, and none in {_quoted(*never)}"
    return f"Outlier features by the criterion grew in {which}."


def _quoted(*runs: str) -> str:
    """Runs by name, or, where they are many, how many they are."""
    return f"{count(len(runs))} runs" if len(runs) > NAMED else listed(f"'{run}'" for run in runs)


def _range(ends: pd.DataFrame) -> str:
    """Between which runs the largest values are; of single runs, which nothing more can be said of."""
    column = "max.residual"
    least, most = (
        f"{amount(row[column])} in {_quoted(row['run'])}"
        for row in (ends.loc[ends[column].idxmin()], ends.loc[ends[column].idxmax()])
    )
    return f"The {COMPARED[column]} ends between {least} and {most}."


def _apart(ends: pd.DataFrame, first: str, others: list[str]) -> list[str]:
    """What is more or less than in the first run, by ratios whose intervals over seeds do not include 1."""
    sentences = []
    for column, name in COMPARED.items():
        values = of_runs(ends, column)
        ratios = {run: ratio(values[run], values[first]) for run in others}
        shown = {run: one for run, one in ratios.items() if one and one.is_shown}
        if not shown:
            sentences.append(f"That the {name} of any run is another than that of {_quoted(first)} could not be shown.")
            continue
        named = sorted(shown, key=lambda run: -abs(math.log(shown[run].value)))[:NAMED]
        named.sort(key=lambda run: shown[run].value)
        factors = [with_interval("{:.3g}".format, shown[run].value, *shown[run].interval) for run in named]
        multiplied = listed(
            f"×\N{NO-BREAK SPACE}{factor} in {_quoted(run)}" for factor, run in zip(factors, named, strict=True)
        )
        more = f", and differs in {count(len(shown) - len(named))} more" if len(shown) > len(named) else ""
        sentences.append(f"Beside {_quoted(first)} the {name} is {multiplied}{more}.")
    return sentences


def _cost(ends: pd.DataFrame) -> list[str]:
    """What absmax costs at most beyond the scatter of rounding, and which run, if it is apart from the next."""
    if COST not in ends or f"{COST}_deviation" not in ends:
        return []
    costs = [(value_of(row, COST), row["run"]) for row in ends.to_dict("records")]
    (worst, run), *others = sorted(costs, key=lambda pair: -pair[0].mean)
    if not worst.is_above(exact(0)):
        return ["That absmax costs any of the models perplexity could not be shown."]
    is_told = all(worst.is_above(other) for other, _ in others[:1])
    where = f", in {_quoted(run)}" if is_told else ""
    share = Value(worst.mean / 100, worst.deviation / 100)
    return [f"absmax costs at most {percent(*share)} of the perplexity{where}."]
