"""A mergeable quantile sketch: counts of values in buckets whose bounds grow by 2 %, separately for each sign.

Any value of a bucket is within 1 % of the bucket's estimate, so that any quantile is within 1 % of a value that
occurred (the idea of DDSketch: Masson, Rim and Lee, 2019). Buckets are numbered from 1 up, negative for negative
values, so that they sort as their values do.
"""

import math

import numpy as np
import pandas as pd
import torch

from outliers.criterion import CROSS_ROLES, OF_EVERY_STACK

KEYED = (*OF_EVERY_STACK, *CROSS_ROLES)  # indices in this tuple are part of the keys of saved traces
RELATIVE_ERROR = 0.01
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_OFFSET = 6000  # the smallest float32 number is in bucket 6000 - 5166
BUCKETS = 1 << 14  # exceeds every |bucket|: the largest float32 number is in bucket 6000 + 4436


def buckets(values: torch.Tensor) -> torch.Tensor:
    """Return the bucket of each value, int64; values must be finite and not zero."""
    magnitudes = values.double().abs().log_().div_(math.log(_GAMMA)).ceil_().add_(_OFFSET)
    return torch.copysign(magnitudes, values).long()


def estimates(buckets: np.ndarray) -> np.ndarray:
    """Return the value, float64, that represents each bucket."""
    return np.sign(buckets) * 2 / (_GAMMA + 1) * _GAMMA ** (np.abs(buckets) - float(_OFFSET))


def quantiles(counts: pd.DataFrame, by: list[str], fractions: dict[str, float]) -> pd.DataFrame:
    """Return quantiles of groups of values.

    Args:
        counts: columns `bucket` and `count` beside those of `by`.
        by: columns that define a group.
        fractions: fraction q by the name of the quantile, which is the value of rank floor(q · (n - 1)) of n.

    Returns:
        One row per group (index), one column per quantile.
    """
    sums = counts.groupby([*by, "bucket"])["count"].sum().reset_index()
    groups = sums.groupby(by)["count"]
    ranks, totals = groups.cumsum(), groups.transform("sum")
    columns = {}
    for name, fraction in fractions.items():
        rank = np.floor(fraction * (totals - 1))
        columns[name] = sums[ranks > rank].groupby(by)["bucket"].first()
    return pd.DataFrame({name: estimates(column) for name, column in columns.items()})


def pack_keys(layer, role, feature: torch.Tensor, bucket: torch.Tensor) -> torch.Tensor:
    """Pack the layer, the index of the role in `KEYED`, the feature and the bucket of each hit into one int64."""
    return ((layer * len(KEYED) + role << 24) + feature) * (2 * BUCKETS) + bucket + BUCKETS


def unpack_keys(keys: np.ndarray) -> dict[str, np.ndarray]:
    """Invert `pack_keys`."""
    place, bucket = np.divmod(keys, 2 * BUCKETS)
    layer, role = np.divmod(place >> 24, len(KEYED))
    return {"layer": layer, "role": role, "feature": place & (1 << 24) - 1, "bucket": bucket - BUCKETS}
