"""What runs that differ in their seed alone say: means, and ratios seed by seed, with their 95 % intervals."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import t

from outliers.report.findings.words import percent

CONFIDENCE = 0.95
SEVERAL = (
    "Means over {} seeds, with 95 % intervals (Student's t); ratios seed by seed, for runs of the same seed have the "
    "same start and the same text in the same order."
)
ONE = "Each run was trained once, so that nothing here says how far another seed would move it."


class Mean(NamedTuple):
    """Of values of several seeds; reach: from it to either end of its interval (Student's t), None of one value."""

    value: float
    reach: float | None
    seeds: int


class Ratio(NamedTuple):
    """By how much one thing is multiplied beside another: the geometric mean over seeds, and its interval.

    The interval is that of the mean logarithm (Student's t); None of one seed.
    """

    value: float
    interval: tuple[float, float] | None
    seeds: int

    @property
    def is_shown(self) -> bool:
        """Whether it is another one than 1 beyond the scatter of seeds."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]

    def in_percent(self) -> str:
        """By how many per cent it is more or less than 1: +0.4 % [−0.2, +1.0]."""
        ends = ", ".join(percent(end - 1).removesuffix(" %") for end in self.interval or ())
        return percent(self.value - 1) + (f" [{ends}]" if ends else "")


def mean(values: Sequence[float]) -> Mean:
    """The mean of values of several seeds."""
    reach = None if len(values) < 2 else float(t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * _standard_error(values))
    return Mean(float(np.mean(values)), reach, len(values))


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Ratio | None:
    """How two things of runs compare, by their seeds; None where no seed has both, or one of the values is 0.

    Runs of the same seed have the same start and the same text in the same order, so that what these do to both cancels
    out.
    """
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    if not pairs or min(map(min, pairs)) <= 0:
        return None
    value, reach, seeds = mean([math.log(one / other) for one, other in pairs])
    interval = None if reach is None else (math.exp(value - reach), math.exp(value + reach))
    return Ratio(math.exp(value), interval, seeds)


def of_runs(trained: pd.DataFrame, column: str) -> dict[str, dict[int, float]]:
    """A column of `outliers.plot.training.trained` by run and seed, where it is known."""
    known = trained[trained[column].notna()]
    return {
        run: dict(zip(of_run["seed"], of_run[column], strict=True)) for run, of_run in known.groupby("run", sort=False)
    }


def seeds_note(trained: pd.DataFrame) -> str:
    """What a table of trained models says of their seeds."""
    seeds = trained.groupby("run")["seed"].nunique()
    most = int(seeds.max())
    return SEVERAL.format(most if seeds.min() == most else f"up to {most}") if most > 1 else ONE


def _standard_error(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))
