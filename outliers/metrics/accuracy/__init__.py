"""Accuracy of classes (docs/perplexity.md#perplexity)."""

from outliers.metrics.metric import StatesMetric


class Accuracy(StatesMetric):
    """Share of pictures whose most probable class is their own, and the mean cross-entropy, over draws."""

    name = "accuracy"
    seen_by = "outliers.metrics.accuracy.measure:SEEN"
