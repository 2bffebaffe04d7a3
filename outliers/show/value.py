"""Measured numbers with their scatter: standard errors, intervals, and tests of whether two values differ."""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from string import Formatter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from outliers.criterion import LOG_PERPLEXITY
from outliers.quantization.schemes import BASELINE
from outliers.show.units import FEWEST, residuals, standard_error

RowsOrFrame = list[dict] | pd.DataFrame  # as `outliers.sweep` and others return them, or as read from rows.parquet
CONFIDENCE = 0.95
DEVIATIONS = 2  # two values differ if so many standard deviations of their difference separate them


def comparable_rows(rows: RowsOrFrame) -> list[dict]:
    """Return rows as dictionaries, without those that have no comparable number.

    Empty cells of a data frame are fields that the row does not have, and are dropped.
    """
    if isinstance(rows, pd.DataFrame):
        rows = [
            {name: value for name, value in row.items() if not (pd.api.types.is_scalar(value) and pd.isna(value))}
            for row in rows.to_dict("records")
        ]
    return [row for row in rows if not has_no_number(row)]


def has_no_number(row: Mapping) -> bool:
    """Return whether a row has no comparable number: it failed, or its perplexity overflows."""
    return "failed" in row or LOG_PERPLEXITY in row.get("metric", "")


def grouped(things: Iterable, key: Callable[[Any], Hashable]) -> dict[Any, list]:
    """Group things by a key, keeping the order of groups and of things."""
    groups = defaultdict(list)
    for thing in things:
        groups[key(thing)].append(thing)
    return groups


class Pairs(NamedTuple):
    """The residuals of a number over the units of a text, to compare two numbers of one text in pairs.

    See `outliers.show.units`.
    """

    text: str
    residuals: tuple[float, ...]


class Value(NamedTuple):
    """A measured number with its scatter.

    deviation: standard deviation over draws, from causes other than the text, such as rounding; None for a single draw.
    error: standard error over the text, of a row's number, or of its difference from the unquantized model if the row
    compares the two; None if unknown. pairs: residuals that give the difference from another number an error of its
    own.
    """

    mean: float
    deviation: float | None = None
    error: float | None = None
    pairs: Pairs | None = None

    @property
    def bar(self) -> float | None:
        """The number behind ±: deviation and error over the text combined; None if both are unknown."""
        known = [part for part in (self.deviation, self.error) if part is not None]
        return math.hypot(*known) if known else None

    @property
    def shown(self) -> tuple[float, float | None]:
        """Mean and bar."""
        return self.mean, self.bar

    @property
    def bears_claims(self) -> bool:
        """Whether enough units of a text are behind the number to claim anything."""
        return self.pairs is None or len(self.pairs.residuals) >= FEWEST

    @property
    def spread(self) -> float:
        """The scatter that a claim must exceed; infinite for a single draw or few units, so that nothing is claimed."""
        known = self.deviation is not None and self.bears_claims
        return math.hypot(self.deviation, self.error or 0) if known else math.inf

    def increase_over(self, baseline: "Value") -> "Value":
        """Return the relative increase over a baseline. The baseline's scatter over draws is not counted."""
        deviation = None if self.deviation is None else self.deviation / baseline.mean
        ratio = self.mean / baseline.mean
        return _combined(ratio - 1, deviation, [(1 / baseline.mean, self), (-ratio / baseline.mean, baseline)])

    def minus(self, other: "Value") -> "Value":
        """Return the difference from another value, with a paired error if both are of one text."""
        unknown = self.deviation is None or other.deviation is None
        deviation = None if unknown else math.hypot(self.deviation, other.deviation)
        return _combined(self.mean - other.mean, deviation, [(1, self), (-1, other)])

    def log_of_ratio(self) -> "Value":
        """Return log(1 + x), the logarithm of the ratio whose relative increase x this value is."""
        slope = 1 / (1 + self.mean)
        deviation = None if self.deviation is None else self.deviation * slope
        return _combined(math.log1p(self.mean), deviation, [(slope, self)])

    def is_apart(self, other: "Value") -> bool:
        """Return whether the two values differ by more than the scatter of their difference."""
        difference = self.minus(other)
        return abs(difference.mean) > DEVIATIONS * difference.spread

    def is_above(self, other: "Value") -> bool:
        """Return whether this value exceeds the other by more than the scatter of their difference."""
        return self.mean > other.mean and self.is_apart(other)


def averaged(values: Sequence[Value], deviation: float | None = None) -> Value:
    """Return the mean of values, with this standard deviation over draws."""
    share = 1 / len(values)
    return _combined(math.fsum(value.mean for value in values) * share, deviation, [(share, value) for value in values])


def _combined(mean: float, deviation: float | None, terms: Sequence[tuple[float, Value]]) -> Value:
    """Return a value that is, to first order, a sum of factor × value; its error is paired if all are of one text."""
    known = [(factor, value) for factor, value in terms if value.error is not None or value.pairs is not None]
    texts = {(value.pairs.text, len(value.pairs.residuals)) if value.pairs else None for _, value in known}
    if len(texts) != 1 or None in texts:
        error = math.hypot(*(factor * (value.error or 0) for factor, value in known)) if known else None
        return Value(mean, deviation, error)
    by_unit = zip(*([factor * residual for residual in value.pairs.residuals] for factor, value in known), strict=True)
    pairs = known[0][1].pairs._replace(residuals=tuple(map(math.fsum, by_unit)))
    return Value(mean, deviation, standard_error(pairs.residuals), pairs)


def scattered_by(rows: list[dict]) -> str:
    """Name the sources of scatter in rows: the text if the rows record it, and masks or rounding."""
    by = "masks" if any(row.get("mask_seeds", 1) > 1 for row in rows) else "rounding"
    return f"text and {by}" if any("standard_error" in row for row in rows) else by


def exact(number: float) -> Value:
    """Return a number without scatter as a value."""
    return Value(number, 0.0)


def value_of(row: Mapping, name: str = "value") -> Value:
    """Return a value of a row, or of a table row with columns NAME, NAME_deviation and NAME_error."""
    of_row = name == "value"
    deviation, error = (
        None if pd.isna(part) else part
        for part in (
            row.get("standard_deviation" if of_row else f"{name}_deviation"),
            row.get("paired_error", row.get("standard_error")) if of_row else row.get(f"{name}_error"),
        )
    )
    pairs = _pairs_of(row, name)
    return Value(row.get(name), deviation, standard_error(pairs.residuals) if error is None and pairs else error, pairs)


BITS = "bits_per_byte"


def _pairs_of(row: Mapping, name: str) -> Pairs | None:
    """Return the residuals of a row's value or of its bits per byte; None if the row, an old one, records no units."""
    counts = {"value": "unit_counts", BITS: "unit_bytes"}.get(name)
    if counts is None or not any(row.get(counts, ())):
        return None
    slope = 1.0  # the derivative of the value by the mean over its units
    if name == BITS:
        slope = 1 / math.log(2)
    elif row["metric"].startswith(TOTALS):
        slope = math.fsum(row["unit_counts"])
    elif "perplexity" in row["metric"] and not has_no_number(row):  # an exponential of a mean loss
        slope = row["value"]
    text = row.get("tokens_hash", row.get("documents_hash", ""))
    return Pairs(text, tuple(residuals(row["unit_sums"], row[counts], slope)))


# Metrics that are compared with another metric of the unquantized model.
BASELINE_OF = {"damage.perplexity_only": "perplexity", "damage.perplexity_without": "perplexity"}
UNDER = "perplexity."  # prefix of metrics of a trained model under a scheme
TOTALS = "token_losses"  # prefix of metrics whose values are sums over a text, not means
COMPARED = ("damage.kl", "damage.top1_agreement", TOTALS)  # prefixes of metrics that are themselves comparisons
MODEL = (
    "model",
    "run",
    "seed",
    "checkpoint",
    "dtype",
    "weights_hash",
    "tokens_hash",
    "documents_hash",
    "task",
    "stack",
)


PAIRED = {"paired_error": "value", f"{BITS}_error": BITS}  # paired error to the field whose error it is


def with_paired_errors(rows: list[dict]) -> list[dict]:
    """Add `paired_error` to flat rows whose unquantized model was measured on the same text.

    It is the standard error over the text of the difference from that model; `bits_per_byte_error` is that of bits per
    byte.
    """
    measured = [row for row in rows if row.get("unit_sums") and not row["metric"].startswith(COMPARED)]
    groups = grouped(measured, lambda row: (_baseline(row["metric"]), *map(row.get, MODEL)))
    errors: dict[int, dict[str, float]] = {}
    for (metric, *_), group in groups.items():
        exact = [row for row in group if row["variant"] == BASELINE and row["metric"] == metric]
        for row in group if exact and len(group) > 1 else ():
            known = {name: (value_of(row, key), value_of(exact[0], key)) for name, key in PAIRED.items() if key in row}
            of_row = {name: value.minus(baseline).error for name, (value, baseline) in known.items()}
            errors[id(row)] = {name: error for name, error in of_row.items() if error is not None}
    return [row | errors.get(id(row), {}) for row in rows]


def _baseline(metric: str) -> str:
    """Return the metric of the unquantized model that a metric is compared with."""
    return f"{UNDER}{BASELINE}" if metric.startswith(UNDER) else BASELINE_OF.get(metric, metric)


class Numbers(Formatter):
    """A string formatter that prints a whole float without a format code as an integer: 507, not 507.0."""

    def format_field(self, value: Any, form: str) -> str:
        if not form and isinstance(value, float) and value.is_integer():
            value = int(value)
        return super().format_field(value, form)


class Mean(NamedTuple):
    """A mean over seeds, or a ratio, with its 95 % interval (Student's t), which is None for a single seed."""

    value: float
    interval: tuple[float, float] | None
    seeds: int

    @property
    def reach(self) -> float | None:
        return self.interval and (self.interval[1] - self.interval[0]) / 2

    @property
    def differs_from_one(self) -> bool:
        """Whether a ratio differs from 1 beyond the scatter over seeds."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]


def reach(standard_error: float | np.ndarray, freedom: int) -> float | np.ndarray:
    """Return half the width of a 95 % interval (Student's t), from standard error and degrees of freedom."""
    from scipy.stats import t  # late: it takes a second

    return t.ppf((1 + CONFIDENCE) / 2, freedom) * standard_error


def mean(values: Sequence[float]) -> Mean:
    """Return the mean of one value per seed, with its interval."""
    count = len(values)
    value = float(np.mean(values))
    half = float(reach(np.std(values, ddof=1) / math.sqrt(count), count - 1)) if count > 1 else None
    return Mean(value, None if half is None else (value - half, value + half), count)


def ratio(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Mean | None:
    """Return the ratio of two values of runs, by seed: the geometric mean, with the interval of the mean logarithm.

    Runs of the same seed share initial weights and the order of their text, whose effects on both cancel out. None if
    no seed has both, or one of the values is not positive.
    """
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    if not pairs or min(map(min, pairs)) <= 0:
        return None
    value, interval, seeds = mean([math.log(first / second) for first, second in pairs])
    return Mean(math.exp(value), interval and tuple(map(math.exp, interval)), seeds)
