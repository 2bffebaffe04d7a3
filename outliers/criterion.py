"""When a feature is an outlier, an activation massive, a position a sink; the thresholds of the literature."""

# Outlier features: LLM.int8(), section 4.1.
ALPHA = 6.0  # magnitude of a hidden state
LAYERS = 0.25  # fraction of the layers with at least one hit
POSITIONS = 0.06  # fraction of the positions of a sequence with at least one hit
FEW = 0.5  # fraction of all features; where more pass, as under large gains of the norms, the criterion tells nothing

# Massive activations: Sun et al., 2024, section 2.
MASSIVE = 100.0  # magnitude of an entry of the residual stream
MASSIVE_RATIO = 1000.0  # times the median magnitude of that layer's state

SINK = 0.3  # mean attention that a sink receives: Gu et al., 2024, section 3
