"""The largest inputs of projections (docs/damage.md)."""

from typing import ClassVar

from outliers.metrics.metric import Metric


class Inputs(Metric):
    """The largest |x| of each hidden state that projections read, with its feature, position and token."""

    name: ClassVar[str] = "inputs"
    measured_by: ClassVar[str] = "outliers.metrics.errors.measure:ERRORS"
