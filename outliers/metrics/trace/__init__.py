"""The trace of a text: where hidden states have outlier features, and how large they are."""

from typing import ClassVar

from pydantic import Field

from outliers.criterion import ALPHA, PAPER
from outliers.metrics.metric import Metric
from outliers.specification.kinds import OUTLIER, Threshold


class Trace(Metric):
    """Outlier features, and what Table 4 says of them, from statistics of hidden states."""

    name: ClassVar[str] = "trace"
    measured_by: ClassVar[str] = "outliers.metrics.trace.measure:TRACE"

    roles: tuple[str, ...] = Field(PAPER, description="Hidden states that are traced, by the projections they go into.")
    alpha: Threshold = Field(ALPHA, description=OUTLIER)
    attention: bool = Field(False, description="Find attention sinks, for which the model attends eagerly.")
    details: bool = Field(False, description="Say what is found of each feature, layer and position.")
    # How it is made, of which rows say nothing: they are the same.
    tokens: bool = Field(False, exclude=True, description="Find which tokens carry the features, in what is kept.")
    kept: bool = Field(False, exclude=True, description="Keep the trace beside the rows, and go on from what is there.")
