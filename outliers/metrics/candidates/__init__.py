"""Candidates for super weights: where activations spike, and the largest weights of their layer."""

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import Count, Repeats


class Candidates(Metric):
    """Candidates for super weights, with the weights that they are compared with."""

    name = "candidates"
    measured_by = "outliers.metrics.candidates.measure:CANDIDATES"

    count: Count = Field(4, description="Most candidates by activations, and as many by the weights alone.")
    controls: Repeats = Field(10, description="Weights nearest in magnitude, to compare each with.")
