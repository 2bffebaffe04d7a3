"""Analysis of numbers: scatter, intervals, and whether two values are apart."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from outliers.criterion import LOG_PERPLEXITY

Rows = list[dict] | pd.DataFrame  # as `outliers.sweep` and the others return them, or read from rows.parquet
CONFIDENCE = 0.95
DEVIATIONS = 2  # values are apart from so many standard deviations of their difference on


def records(rows: Rows) -> list[dict]:
    """Rows as they are kept, those that can be drawn; of a data frame without its empty cells, which are fields that a
    row does not have."""
    if isinstance(rows, pd.DataFrame):
        rows = [
            {name: value for name, value in row.items() if not (pd.api.types.is_scalar(value) and pd.isna(value))}
            for row in rows.to_dict("records")
        ]
    return [row for row in rows if not is_beyond(row)]


def is_beyond(row: Mapping) -> bool:
    """Whether a row has no number that compares with others: it failed, or its perplexity is larger than any number."""
    return "failed" in row or LOG_PERPLEXITY in row.get("metric", "")


def grouped(things: Iterable, key: Callable[[Any], Hashable]) -> dict[Any, list]:
    """Things by what a key says of each, both in the order in which they come."""
    groups = defaultdict(list)
    for thing in things:
        groups[key(thing)].append(thing)
    return groups


class Value(NamedTuple):
    """A measured number; deviation: its standard deviation by what scatters it, None of a single draw."""

    mean: float
    deviation: float | None = None

    @property
    def spread(self) -> float:
        """The deviation; infinite of a single draw, from which nothing is apart."""
        return math.inf if self.deviation is None else self.deviation

    def beside(self, baseline: float) -> "Value":
        """Its increase over a baseline, as a share of that."""
        return Value(self.mean / baseline - 1, None if self.deviation is None else self.deviation / baseline)

    def is_apart(self, other: "Value") -> bool:
        """Whether the two differ beyond their scatter."""
        return abs(self.mean - other.mean) > DEVIATIONS * math.hypot(self.spread, other.spread)

    def is_above(self, other: "Value") -> bool:
        """Whether it is larger than another beyond their scatter."""
        return self.mean > other.mean and self.is_apart(other)


def scattered_by(rows: list[dict]) -> str:
    """The source of scatter in the values of rows: other choices of masks, or rounding alone."""
    return "masks" if any(row.get("mask_seeds", 1) > 1 for row in rows) else "rounding"


def exact(number: float) -> Value:
    """A number that nothing scatters."""
    return Value(number, 0.0)


def value_of(row: Mapping, name: str = "value") -> Value:
    """A value of a row, or of a table with columns NAME and NAME_deviation."""
    deviation = row.get("standard_deviation" if name == "value" else f"{name}_deviation")
    return Value(row.get(name), None if pd.isna(deviation) else deviation)


class Numbers(Formatter):
    """Formats in which a number without a form that is a whole one stands as one: 507, not 507.0."""

    def format_field(self, value: Any, form: str) -> str:
        if not form and isinstance(value, float) and value.is_integer():
            value = int(value)
        return super().format_field(value, form)


class Mean(NamedTuple):
    """Over seeds, with its interval (Student's t), None of one seed."""

    value: float
    interval: tuple[float, float] | None
    seeds: int

    @property
    def reach(self) -> float | None:
        """Half of the interval."""
        return self.interval and (self.interval[1] - self.interval[0]) / 2

    @property
    def is_shown(self) -> bool:
        """Whether a ratio is another one than 1 beyond the scatter of seeds."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]


def reach(standard_error: float | np.ndarray, freedom: int) -> float | np.ndarray:
    """From an estimate to either end of its 95 % interval (Student's t with these degrees of freedom)."""
    from scipy.stats import t  # late: it takes a second

    return t.ppf((1 + CONFIDENCE) / 2, freedom) * standard_error


def mean(values: Sequence[float]) -> Mean:
    """The mean of values of several seeds."""
    count = len(values)
    value = float(np.mean(values))
    half = float(reach(np.std(values, ddof=1) / math.sqrt(count), count - 1)) if count > 1 else None
    return Mean(value, None if half is None else (value - half, value + half), count)


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Mean | None:
    """Ratio of two values of runs, by their seeds: the geometric mean, with the interval of the mean logarithm.

    Runs of the same seed have the same start and the same text in the same order, so that what these do to both cancels
    out. None where no seed has both, or one of the values is 0.
    """
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    if not pairs or min(map(min, pairs)) <= 0:
        return None
    value, interval, seeds = mean([math.log(first / second) for first, second in pairs])
    return Mean(math.exp(value), interval and tuple(map(math.exp, interval)), seeds)
