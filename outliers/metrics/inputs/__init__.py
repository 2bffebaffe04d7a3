"""The largest inputs of projections (docs/damage.md)."""

from outliers.metrics.metric import Metric


class Inputs(Metric):
    """The largest |x| of each hidden state that projections read, with its feature, position and token."""

    name = "inputs"
    measured_by = "outliers.metrics.errors.measure:ERRORS"
