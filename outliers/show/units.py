"""Standard errors over a text, for means over predictions that are sums over units (blocks, documents or questions).

The formulas stand in docs/perplexity.md, Standard error over the text.
"""

import math
from collections.abc import Iterable, Sequence

FEWEST = 8  # fewest units for which a difference is reported
DIGITS = ".10g"  # precision of a sum that a row keeps


def residuals(sums: Sequence[float], counts: Sequence[float], slope: float = 1) -> list[float]:
    """Return the influence of each unit on a mean Σ sums / Σ counts, to first order; they add up to 0.

    slope: derivative of the reported number by the mean, such as the perplexity itself.
    """
    total = math.fsum(counts)
    mean = math.fsum(sums) / total
    return [slope * (of_unit - mean * count) / total for of_unit, count in zip(sums, counts, strict=True)]


def standard_error(residuals: Sequence[float]) -> float | None:
    """Return the standard error of a number from its residuals; None for fewer than two units."""
    units = len(residuals)
    if units < 2:
        return None
    return math.sqrt(units / (units - 1) * math.fsum(residual**2 for residual in residuals))


def fields(draws: Iterable[Sequence[tuple[float, float]]], slope: float = 1) -> dict:
    """Return a row's fields for a mean over units: `unit_sums`, `unit_counts` and, for several units, `standard_error`.

    draws: for each draw the sum and the number of predictions of every unit; their means over draws are kept. slope:
    derivative of the reported number by the mean.
    """
    by_unit = [
        [tuple(map(math.fsum, zip(*of_unit, strict=True))), len(of_unit)] for of_unit in zip(*draws, strict=True)
    ]
    sums, counts = ([row_digits(sums[part] / number) for sums, number in by_unit] for part in (0, 1))
    error = standard_error(residuals(sums, counts, slope)) if any(counts) else None
    of_text = {} if error is None else {"standard_error": error}
    return of_text | {"unit_sums": sums, "unit_counts": counts}


def row_digits(number: float) -> float | int:
    """Round a number to the ten digits that rows keep; a whole one becomes an int."""
    return int(number) if float(number).is_integer() else float(f"{number:{DIGITS}}")
