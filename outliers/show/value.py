"""Analysis of numbers: scatter, intervals, and whether two values are apart."""

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


class Pairs(NamedTuple):
    """The residuals of a number by the units of a text, see `outliers.show.units`; those of two numbers pair."""

    text: str
    residuals: tuple[float, ...]


class Value(NamedTuple):
    """A measured number.

    deviation: its standard deviation by what scatters it beside the text, such as rounding; None of a single draw.
    error: its standard error over the text, of a number that was measured beside the unquantized model that of their
    difference; None where it is unknown. pairs: by which its difference from another number has an error of its own.
    """

    mean: float
    deviation: float | None = None
    error: float | None = None
    pairs: Pairs | None = None

    @property
    def bar(self) -> float | None:
        """The number behind ±: the deviation and the error over the text together; None where both are unknown."""
        known = [part for part in (self.deviation, self.error) if part is not None]
        return math.hypot(*known) if known else None

    @property
    def shown(self) -> tuple[float, float | None]:
        """The number and its bar."""
        return self.mean, self.bar

    @property
    def spread(self) -> float:
        """The bar that a claim must exceed; infinite, so that nothing is claimed, of a single draw or few units."""
        few = self.pairs is not None and len(self.pairs.residuals) < FEWEST
        return math.inf if self.deviation is None or few else math.hypot(self.deviation, self.error or 0)

    def beside(self, baseline: "Value") -> "Value":
        """Its increase over a baseline, whose draws scatter nothing, as a share of that."""
        deviation = None if self.deviation is None else self.deviation / baseline.mean
        ratio = self.mean / baseline.mean
        return _combined(ratio - 1, deviation, [(1 / baseline.mean, self), (-ratio / baseline.mean, baseline)])

    def minus(self, other: "Value") -> "Value":
        """Its difference from another value."""
        unknown = self.deviation is None or other.deviation is None
        deviation = None if unknown else math.hypot(self.deviation, other.deviation)
        return _combined(self.mean - other.mean, deviation, [(1, self), (-1, other)])

    def logarithm(self) -> "Value":
        """That of a ratio, of which this is the increase: log(1 + increase)."""
        slope = 1 / (1 + self.mean)
        deviation = None if self.deviation is None else self.deviation * slope
        return _combined(math.log1p(self.mean), deviation, [(slope, self)])

    def is_apart(self, other: "Value") -> bool:
        """Whether the two differ beyond what scatters their difference."""
        difference = self.minus(other)
        return abs(difference.mean) > DEVIATIONS * difference.spread

    def is_above(self, other: "Value") -> bool:
        """Whether it is larger than another beyond what scatters their difference."""
        return self.mean > other.mean and self.is_apart(other)


def averaged(values: Sequence[Value], deviation: float | None = None) -> Value:
    """The mean of values, with the deviation that is said."""
    share = 1 / len(values)
    return _combined(math.fsum(value.mean for value in values) * share, deviation, [(share, one) for one in values])


def _combined(mean: float, deviation: float | None, terms: Sequence[tuple[float, Value]]) -> Value:
    """A value that is, to first order, a sum of factors times values; paired where they are of one text."""
    known = [(factor, value) for factor, value in terms if value.error is not None or value.pairs is not None]
    texts = {(value.pairs.text, len(value.pairs.residuals)) if value.pairs else None for _, value in known}
    if len(texts) != 1 or None in texts:
        error = math.hypot(*(factor * (value.error or 0) for factor, value in known)) if known else None
        return Value(mean, deviation, error)
    by_unit = zip(*([factor * residual for residual in value.pairs.residuals] for factor, value in known), strict=True)
    pairs = known[0][1].pairs._replace(residuals=tuple(map(math.fsum, by_unit)))
    return Value(mean, deviation, standard_error(pairs.residuals), pairs)


def scattered_by(rows: list[dict]) -> str:
    """The sources of scatter in the values of rows: the text where they know it, and masks or rounding."""
    by = "masks" if any(row.get("mask_seeds", 1) > 1 for row in rows) else "rounding"
    return f"text and {by}" if any("standard_error" in row for row in rows) else by


def exact(number: float) -> Value:
    """A number that nothing scatters."""
    return Value(number, 0.0)


def value_of(row: Mapping, name: str = "value") -> Value:
    """A value of a row, or of a table with columns NAME, NAME_deviation and NAME_error."""
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
    """The units of a row's value, or of its bits per byte; None where it does not know them, as old rows."""
    counts = {"value": "unit_counts", BITS: "unit_bytes"}.get(name)
    if counts is None or not any(row.get(counts, ())):
        return None
    slope = 1 / math.log(2) if name == BITS else row[name] if is_perplexity(row["metric"]) else 1
    text = row.get("tokens_hash", row.get("documents_hash", ""))
    return Pairs(text, tuple(residuals(row["unit_sums"], row[counts], slope)))


def is_perplexity(metric: str) -> bool:
    """Whether the values of a metric are exponentials of a mean loss."""
    return "perplexity" in metric and LOG_PERPLEXITY not in metric


# Metrics of which a variant is compared with the model as it is in another metric.
BASELINE_OF = {"damage.perplexity_only": "perplexity", "damage.perplexity_without": "perplexity"}
COMPARED = ("damage.kl", "damage.top1_agreement")  # how metrics begin that are comparisons already
MODEL = ("model", "checkpoint", "dtype", "weights_hash", "tokens_hash", "documents_hash", "task", "stack")


PAIRED = {"paired_error": "value", f"{BITS}_error": BITS}  # fields of paired errors, and of what


def with_paired_errors(rows: list[dict]) -> list[dict]:
    """Flat rows with the field `paired_error`, where the model as it is was measured on the same text, too: the
    standard error over the text of the difference from it; and `bits_per_byte_error`, the same of bits per byte."""
    measured = [row for row in rows if row.get("unit_sums") and not row["metric"].startswith(COMPARED)]
    groups = grouped(measured, lambda row: (BASELINE_OF.get(row["metric"], row["metric"]), *map(row.get, MODEL)))
    errors: dict[int, dict[str, float]] = {}
    for group in groups.values():
        exact = [row for row in group if row["variant"] == BASELINE and row["metric"] not in BASELINE_OF]
        for row in group if exact and len(group) > 1 else ():
            known = {name: (value_of(row, of), value_of(exact[0], of)) for name, of in PAIRED.items() if of in row}
            of_row = {name: value.minus(baseline).error for name, (value, baseline) in known.items()}
            errors[id(row)] = {name: error for name, error in of_row.items() if error is not None}
    return [row | errors.get(id(row), {}) for row in rows]


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
