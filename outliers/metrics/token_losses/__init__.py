"""The tokens that carry the increase of the loss (docs/damage.md#loss-by-token)."""

from outliers.metrics.metric import StatesMetric


class TokenLosses(StatesMetric):
    """Loss under the variant minus loss without it: by token, type, position and context, and how few carry half."""

    name = "token_losses"
    of_text = True
    seen_by = "outliers.metrics.token_losses.measure:SEEN"
