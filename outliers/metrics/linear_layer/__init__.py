"""A linear layer with three outlier features, multiplied in many ways (Table 5)."""

from typing import Annotated

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import Count, Finite


class LinearLayer(Metric):
    """Milliseconds of each way to multiply, and how many times faster than 16 bits it is: medians with quartiles.

    All ways are timed in turn, in this process: beside others, no time is its own. tokens: rows of the input. seconds:
    how long a layer is timed at least.
    """

    name = "linear_layer"
    measured_by = "outliers.metrics.linear_layer.measure:LINEAR_LAYER"
    subject = None
    needs = ("way", "q1", "q3", "tokens", "device_name", "threads")
    timed = True

    tokens: Count = 512
    seconds: Annotated[Finite, Field(gt=0, le=86400)] = 3.0
