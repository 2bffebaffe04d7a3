"""Perplexity (docs/perplexity.md#perplexity)."""

from outliers.metrics.metric import StatesMetric


class Perplexity(StatesMetric):
    """exp of the mean negative log-likelihood of the predicted tokens, over draws."""

    name = "perplexity"
    seen_by = "outliers.metrics.perplexity.measure:SEEN"
