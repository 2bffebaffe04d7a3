"""What a family of models says."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import pandas as pd

from outliers.plot.axes import count_label
from outliers.report.findings.words import amount, count, part
from outliers.report.section import Finding
from outliers.report.tables import with_interval

if TYPE_CHECKING:
    from outliers.plot.emergence import Fit


APART = 1.5  # sizes of models are told apart from this factor on


def emergence_findings(models: pd.DataFrame, fits: Mapping[str, "Fit | None"], at: str) -> list[Finding]:
    """How many models have outlier features, the most common one of all, and how they grow as perplexity falls.

    models: one row a model, as `distinct_models` of Table 4 makes it. at: the table or figure that shows it.
    """
    having = models[models["count"] > 0]
    sentences = [_having(len(having), len(models))]
    if not having.empty:
        sentences += [_most_common(having), *_onset(models, having)]
    sentences += [_growth(name, fit) for name, fit in fits.items() if fit and fit.shown]
    return [Finding(sentence, at) for sentence in sentences]


def _having(number: int, every: int) -> str:
    if every == 1:
        return f"The model has {'an outlier feature' if number else 'no outlier feature'} by the criterion."
    verb = "has an outlier feature" if number < 2 else "have outlier features"
    return f"{count(number).capitalize()} of {count(every)} models {verb} by the criterion."


def _most_common(having: pd.DataFrame) -> str:
    most = having.loc[having["positions"].idxmax()]
    of = f"of the {count(int(most['count']))} " if most["count"] > 1 else ""
    return (
        f"The most common {of}of {most.name} affects {part(most['layers'])} of layers and {part(most['positions'])} of "
        f"positions, with a median of {amount(most['median'])}."
    )


def _onset(models: pd.DataFrame, having: pd.DataFrame) -> list[str]:
    """From which size on all models have outlier features and below which none has, if there is such a size."""
    without = models[models["count"] == 0]
    if without.empty or having["parameters"].min() < APART * without["parameters"].max():
        return []
    smallest, largest = having["parameters"].min(), without["parameters"].max()
    return [f"All models from {count_label(smallest)} parameters on have some, and none up to {count_label(largest)}."]


def _growth(name: str, fit: "Fit") -> str:
    scale = with_interval(amount, fit.scale, *fit.scale_interval)
    return (
        f"The fraction of {name} affected grows e-fold while the perplexity falls by {scale} (95 % interval, "
        f"{fit.points} models)."
    )
