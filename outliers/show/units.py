"""Standard errors over a text: means over predictions as sums over its units, which are blocks, documents or questions.

The formulas stand in docs/perplexity.md, Standard error over the text.
"""

import math
from collections.abc import Iterable, Sequence

FEWEST = 8  # units of which a difference is told
DIGITS = ".10g"  # of a sum in a row


def residuals(sums: Sequence[float], counts: Sequence[float], slope: float = 1) -> list[float]:
    """Return the share of each unit in the error of a mean Σ sums / Σ counts, to first order; they add up to 0.

    slope: derivative of the reported number by the mean, such as the perplexity itself.
    """
    total = math.fsum(counts)
    mean = math.fsum(sums) / total
    return [slope * (of_unit - mean * count) / total for of_unit, count in zip(sums, counts, strict=True)]


def standard_error(residuals: Sequence[float]) -> float | None:
    """The standard error of a number by its residuals; None of fewer than two units."""
    units = len(residuals)
    if units < 2:
        return None
    return math.sqrt(units / (units - 1) * math.fsum(residual**2 for residual in residuals))


def fields(draws: Iterable[Sequence[tuple[float, float]]], slope: float = 1) -> dict:
    """The units of a mean as fields of its value, with its standard error where there are several.

    draws: of each draw the sum and the number of predictions of each unit, of which the means over draws are kept.
    """
    by_unit = [
        [tuple(map(math.fsum, zip(*of_unit, strict=True))), len(of_unit)] for of_unit in zip(*draws, strict=True)
    ]
    sums, counts = ([short(sums[part] / number) for sums, number in by_unit] for part in (0, 1))
    error = standard_error(residuals(sums, counts, slope)) if any(counts) else None
    of_text = {} if error is None else {"standard_error": error}
    return of_text | {"unit_sums": sums, "unit_counts": counts}


def short(number: float) -> float | int:
    """A number as rows have it, a whole one without its fraction."""
    return int(number) if float(number).is_integer() else float(f"{number:{DIGITS}}")
