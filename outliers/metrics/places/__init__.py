"""Perplexity of each role or layer alone under a scheme or a cache, and of all but it (docs/damage.md)."""

from typing import Literal

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import DRAWS, Repeats


class Places(Metric):
    """Perplexity with only one role, layer or stack under a scheme, and with all but it; of a cache keys or values,
    layers and heads."""

    name = "places"
    measured_by = "outliers.metrics.places.measure:PLACES"

    by: Literal["role", "layer", "stack", "head"] = Field(
        "role", description="Kind of places: roles (of a cache keys and values), layers, stacks, or heads of a cache."
    )
    draws: Repeats = Field(1, description=DRAWS)
