"""Top-1 softmax probability of the attention (LLM.int8(), section 4.2)."""

from outliers.metrics.metric import AttentionMetric


class Top1(AttentionMetric):
    """Mean over layers, heads, queries and sequences of the largest attention probability."""

    name = "top1"
    seen_by = "outliers.metrics.top1.measure:TOP1"
