"""When a feature is an outlier, an activation massive, a position a sink; the thresholds of the literature."""

from numbers import Real

from outliers.errors import UserError, shown

# Hidden states, by the projections that read them: q/k/v, attention output, first and second feed-forward; and of the
# cross-attention of a decoder the queries, the keys and values, which read what the encoder puts out, and the output.
CROSS = ("cross_in", "cross_kv", "cross_out")
OF_EVERY_STACK = ("attn_in", "attn_out", "ffn_in", "ffn_out")
ROLES = (*OF_EVERY_STACK, *CROSS)
PAPER = ("attn_in", "attn_out", "ffn_in")  # in which the paper counts outliers

# Outlier features: LLM.int8(), section 4.1.
ALPHA = 6.0  # magnitude of a hidden state
LAYERS = 0.25  # fraction of the layers with at least one hit
POSITIONS = 0.06  # fraction of the positions of a sequence with at least one hit
FEW = 0.5  # fraction of all features; where more pass, as under large gains of the norms, the criterion tells nothing

# Hidden states are float32 where they are compared with a threshold, which has to be a normal number of that kind.
THRESHOLDS = (2.0**-126, 3.4e38)

# Massive activations: Sun et al., 2024, section 2.
MASSIVE = 100.0  # magnitude of an entry of the residual stream
MASSIVE_RATIO = 1000.0  # times the median magnitude of that layer's state

SPIKE = 50.0  # magnitude at the input and at the output of a projection with a super weight: Yu et al., 2024

SINK = 0.3  # mean attention that a sink receives: Gu et al., 2024, section 3


def check_threshold(name: str, value: float) -> float:
    """The threshold as a float; raise UserError where it is no positive number that float32 holds."""
    low, high = THRESHOLDS
    if isinstance(value, bool) or not isinstance(value, Real) or not low <= value <= high:
        raise UserError(f"{name} is {shown(value)}; expected a positive number, such as {ALPHA}")
    return float(value)
