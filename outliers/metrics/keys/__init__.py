"""Queries, keys and values by head and channel: how large they are, how constant, what biases make (docs/caches.md)."""

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import Count

PARTS = {"q": "queries", "k": "keys", "v": "values"}  # outputs of projections: their roles
BEFORE, AFTER = "before", "after"  # as projections put them out; as attention multiplies them


class Keys(Metric):
    """The largest channels of queries, keys and values, before and after the rotation of positions."""

    name = "keys"
    measured_by = "outliers.metrics.keys.measure:KEYS"

    channels: Count = Field(3, description="Channels listed per layer, those with the largest queries, keys or values.")
