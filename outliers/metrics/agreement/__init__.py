"""Agreement with the unquantized model (docs/damage.md#measurements)."""

from outliers.metrics.metric import StatesMetric


class Agreement(StatesMetric):
    """Mean KL(p ‖ p_q) over predicted positions, in nats, and the share of them with the same most probable token."""

    name = "agreement"
    seen_by = "outliers.metrics.agreement.measure:SEEN"
