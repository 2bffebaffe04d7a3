"""Agreement with the unquantized model (docs/damage.md#what-is-measured)."""

from typing import ClassVar

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.metrics.perplexity import DRAWS
from outliers.specification.kinds import Repeats


class Agreement(Metric):
    """Mean KL(p ‖ p_q) over predicted positions, in nats, and the share of them with the same most probable token."""

    name: ClassVar[str] = "agreement"
    measured_by: ClassVar[str] = "outliers.metrics.states:STATES"
    seen_by: ClassVar[str] = "outliers.metrics.agreement.measure:SEEN"

    draws: Repeats = Field(1, description=DRAWS)
