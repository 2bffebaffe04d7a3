"""Error of the outputs of projections under a scheme (docs/damage.md)."""

from typing import ClassVar

from outliers.metrics.metric import Metric


class Errors(Metric):
    """‖Y_q − Y‖² / ‖Y‖² of each projection, over all tokens and for the mean token, from inputs without the scheme."""

    name: ClassVar[str] = "errors"
    measured_by: ClassVar[str] = "outliers.metrics.errors.measure:ERRORS"
