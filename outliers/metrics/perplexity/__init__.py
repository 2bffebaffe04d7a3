"""Perplexity (docs/definitions.md#perplexity)."""

from typing import ClassVar

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import Repeats

DRAWS = "Measure each so many times with embeddings changed by 1e-6, for mean ± scatter."


class Perplexity(Metric):
    """exp of the mean negative log-likelihood of the predicted tokens, over draws."""

    name: ClassVar[str] = "perplexity"
    measured_by: ClassVar[str] = "outliers.metrics.states:STATES"
    seen_by: ClassVar[str] = "outliers.metrics.perplexity.measure:SEEN"

    draws: Repeats = Field(1, description=DRAWS)
