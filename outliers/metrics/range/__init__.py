"""The largest numbers of a pass, beside what number formats of 16 and 8 bits hold (docs/definitions.md)."""

from outliers.metrics.metric import Metric

# The largest finite number of each, by its name; e4m3 without a scale.
LIMITS = {"e4m3": 448.0, "float16": 65_504.0, "bfloat16": 3.3895313892515355e38}


class Range(Metric):
    """The largest inputs, outputs and block sums of projections, of the residual stream, and of attention logits."""

    name = "range"
    measured_by = "outliers.metrics.range.measure:RANGE"
