"""Candidates for super weights: where activations spike, and the largest weights of their layer."""

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import CONTROLS, SEED, Count, Repeats


class Candidates(Metric):
    """Candidates for super weights, with the weights that they are compared with."""

    name = "candidates"
    measured_by = "outliers.metrics.candidates.measure:CANDIDATES"

    count: Count = Field(4, description="Most candidates by activations, and as many by the weights alone.")
    controls: Repeats = Field(5, description=CONTROLS)
    seed: int = Field(0, description=SEED, ge=0, lt=2**63)
