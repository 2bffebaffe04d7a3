"""When a feature is an outlier (LLM.int8(), section 4.1); the paper's thresholds."""

ALPHA = 6.0  # magnitude of a hidden state
LAYERS = 0.25  # fraction of the layers with at least one hit
POSITIONS = 0.06  # fraction of the positions of a sequence with at least one hit
