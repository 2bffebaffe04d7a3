"""Attention of each head to the first position (docs/writers.md)."""

from outliers.metrics.metric import AttentionMetric


class Sinks(AttentionMetric):
    """By layer and head the attention that queries give to the first position, and by how many nats they prefer it."""

    name = "sinks"
    seen_by = "outliers.metrics.sinks.measure:SINKS"
