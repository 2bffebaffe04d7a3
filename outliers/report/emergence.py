"""The exponential of the paper's Figure 3b."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy.optimize import curve_fit
from scipy.stats import t


class Fit(NamedTuple):
    """fraction = exp((full − perplexity) / scale), by least squares over points.

    full: the perplexity at which the fraction reaches 1. scale: by how much perplexity falls while the fraction grows
    e-fold. Each with its 95 % interval (Student's t on the standard error).
    """

    full: float
    full_interval: tuple[float, float]
    scale: float
    scale_interval: tuple[float, float]
    points: int

    def at(self, perplexity):
        """The fraction at a perplexity, not above 1."""
        return np.minimum(1, np.exp((self.full - np.asarray(perplexity)) / self.scale))


def exponential_fit(perplexity: Iterable[float], fraction: Iterable[float]) -> Fit | None:
    """Fit how a fraction of layers or positions affected grows with falling perplexity (LLM.int8(), section 4.2).

    Models of which either is not known are left out.

    Returns:
        None where there is nothing to fit: fewer than three points, fewer than two of them above 0, a fraction that
        does not grow, or an interval without end.
    """
    x, y = np.asarray(list(perplexity), float), np.asarray(list(fraction), float)
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    positive = y > 0
    if len(x) < 3 or len(np.unique(x[positive])) < 2:
        return None
    try:
        slope, intercept = np.polyfit(x[positive], np.log(y[positive]), 1)
        if slope >= 0:
            return None
        found, covariance = curve_fit(
            lambda x, full, scale: np.exp((full - x) / scale), x, y, (-intercept / slope, -1 / slope), maxfev=10_000
        )
    except (RuntimeError, np.linalg.LinAlgError):  # it found no minimum
        return None
    reach = t.ppf(0.975, len(x) - 2) * np.sqrt(np.diag(covariance))
    if not np.isfinite(reach).all() or found[1] <= 0:
        return None
    (full, scale), (of_full, of_scale) = found.tolist(), reach.tolist()
    return Fit(full, (full - of_full, full + of_full), scale, (scale - of_scale, scale + of_scale), len(x))


def fits_of(models: pd.DataFrame) -> dict[str, Fit | None]:
    """The exponential for layers and for positions; models: as `outliers.report.table4.by_model` makes them.

    Of models that read other tokens than most, because they have another vocabulary, perplexities do not compare: they
    are left out.
    """
    if "tokens_hash" in models and models["tokens_hash"].notna().any():
        models = models[models["tokens_hash"] == models["tokens_hash"].mode()[0]]
    return {name: exponential_fit(models["perplexity"], models[name]) for name in ("layers", "positions")}
