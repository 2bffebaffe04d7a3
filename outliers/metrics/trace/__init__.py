"""The trace of a text: where hidden states have outlier features, and how large they are."""

from pydantic import Field

from outliers.criterion import ALPHA, PAPER
from outliers.metrics.metric import Metric
from outliers.specification.kinds import OUTLIER, Names, Threshold


class Trace(Metric):
    """Outlier features, and what Table 4 says of them, from statistics of hidden states."""

    name = "trace"
    measured_by = "outliers.metrics.trace.measure:TRACE"

    roles: Names = Field(list(PAPER), description="Hidden states to trace, by the projections that read them.")
    alpha: Threshold = Field(ALPHA, description=OUTLIER)
    attention: bool = Field(False, description="Find attention sinks, for which the model attends eagerly.")
    details: bool = Field(False, description="Also give rows of each feature, layer and position.")


class KeptTrace(Trace):
    """The same with the trace itself in files beside the rows; which tokens carry the features is in these alone.

    An imatrix and masks are further files.
    """

    measured_by = "outliers.metrics.trace.measure:KEPT"

    tokens: bool = Field(False, exclude=True)
    imatrix: bool = Field(False, exclude=True)
    masks: bool = Field(False, exclude=True)
