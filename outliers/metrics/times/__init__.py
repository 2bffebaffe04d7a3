"""Milliseconds of each projection."""

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import Count


class Times(Metric):
    """Milliseconds that each projection takes: the median of some runs, one projection of each shape and scheme."""

    name = "times"
    measured_by = "outliers.metrics.times.measure:TIMES"
    timed = True

    tokens: Count = Field(512, description="Rows of the input of the timed projections.")
