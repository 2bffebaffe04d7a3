"""Ablations: the loss of a model without some features, compared with its loss without random ones."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import pandas as pd
from scipy.stats import bootstrap

from outliers.errors import UserError, shown, unknown_name
from outliers.models.anatomy import check_features
from outliers.tracing.result import STREAM
from outliers.variants.ablated import METHODS, SEEDS

CONTROLS = range(10, 10_001)  # numbers of random draws: fewer give no interval, more no better one
RESAMPLES = 10_000


@dataclass(frozen=True)
class Treatment:
    """One arm of an ablation: which features are changed, and how.

    subject: the set of features: "none" (the unchanged model), "outliers" (all given features), "control" (the same
    number of random other ones), or "single" (one of several given features). draw: number of the random set.
    """

    subject: str
    method: str | None = None
    features: tuple[int, ...] = ()
    draw: int | None = None

    @property
    def fields(self) -> dict:
        fields = {name: value for name, value in vars(self).items() if value is not None}
        return fields | {"features": list(self.features)}


def treatments(
    features: Iterable[int],
    width: int,
    methods: Iterable[str] = ("zero",),
    controls: int = CONTROLS.start,
    seed: int = 0,
    where: Iterable[str] = ("attn_in",),
    outliers: Iterable[int] = (),
) -> list[Treatment]:
    """Return the measurements of `ablate`; the controls of all methods are the same draws.

    outliers: the model's outlier features, which no control includes, whether ablated or not.

    Raises:
        UserError: as `ablate`.
    """
    features, methods = check_features(features, width), list(methods)
    for method in methods:
        if method not in METHODS:
            raise unknown_name("method", method, METHODS)
    for role in where:
        if role not in STREAM:
            raise unknown_name("place", role, STREAM)
    if not _is_in(CONTROLS, controls):
        low, high = CONTROLS[0], CONTROLS[-1]
        raise UserError(
            f"{shown(controls)} controls; expected at least {low} random draws for an interval, {high} at most"
        )
    draws = random_features(len(features), controls, width, seed, features, outliers)
    treatments = [Treatment("none")]
    for method in methods:
        treatments.append(Treatment("outliers", method, tuple(features)))
        treatments += [Treatment("control", method, draw, number) for number, draw in enumerate(draws)]
        if len(features) > 1:
            treatments += [Treatment("single", method, (feature,)) for feature in features]
    return treatments


def random_features(
    count: int, draws: int, width: int, seed: int, features: Sequence[int], outliers: Iterable[int]
) -> list[tuple[int, ...]]:
    """Draw sets of features without replacement, excluding some features and outliers.

    count: number of features in a draw. draws: number of draws. width: number of the model's features. features,
    outliers: features that are never drawn.

    Raises:
        UserError: too few features are left; or the seed is invalid.
    """
    if not _is_in(SEEDS, seed):
        raise UserError(f"seed is {shown(seed)}; expected a whole number from 0 to 2**63 - 1")
    others = np.setdiff1d(np.arange(width), [*features, *outliers])
    if len(others) < count:
        raise UserError(
            f"{len(features)} of {width} features leave {len(others)} others that are not outliers, too few to draw "
            f"{count} random ones from; ablate fewer features, or raise alpha"
        )
    generator = np.random.default_rng(seed)
    return [tuple(map(int, np.sort(generator.choice(others, count, replace=False)))) for _ in range(draws)]


def _is_in(numbers: range, value: object) -> bool:
    return isinstance(value, Integral) and int(value) in numbers


def with_damage(measurements: list[dict]) -> pd.DataFrame:
    """Return measurements as a table with `damage`, the relative increase of perplexity over that of subject "none"."""
    table = pd.DataFrame(measurements)
    table["damage"] = table["perplexity"] / table.loc[table["subject"] == "none", "perplexity"].item() - 1
    return table


def summary(measurements: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    """Condense the result of `ablate`: the controls of a method to one row, single features sorted by their damage.

    Returns:
        Columns `subject`, `method`, `features`, `draws`, and `top1_softmax`, `perplexity` and `damage`: the value, or
        the mean of the controls. For controls, `_low` and `_high` bound the 95 % bootstrap interval of the mean
        (percentiles of the means of 10,000 resamples).
    """
    order = ["none", "outliers", "control", "single"]
    groups = measurements.assign(method=measurements["method"].fillna(""))
    groups = groups.assign(alone=groups["features"].where(groups["subject"] == "single", ()))
    rows = []
    for (method, subject, alone), group in groups.groupby(["method", "subject", "alone"], sort=False):
        row = {"subject": subject, "method": method, "features": alone or group["features"].iloc[0]}
        if subject == "control":
            row |= {"features": (), "draws": len(group)}
        for metric in [name for name in ("top1_softmax", "perplexity", "damage") if name in group]:
            row[metric] = group[metric].mean()
            if subject == "control":
                row[f"{metric}_low"], row[f"{metric}_high"] = interval_of_mean(group[metric], seed)
        rows.append((order.index(subject), -row["damage"], row))
    methods = list(dict.fromkeys(row["method"] for *_, row in rows))
    rows.sort(key=lambda row: (methods.index(row[2]["method"]), *row[:2]))
    return pd.DataFrame([row for *_, row in rows])


def interval_of_mean(values: Iterable[float], seed: int = 0) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the mean: percentiles of the means of 10,000 resamples."""
    resampled = bootstrap((list(values),), np.mean, n_resamples=RESAMPLES, method="percentile", rng=seed)
    return float(resampled.confidence_interval.low), float(resampled.confidence_interval.high)
