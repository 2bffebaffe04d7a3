"""Distance of the weights of another model from a model's own (docs/checkpoints.md#measurements)."""

from outliers.metrics.metric import Metric


class Weights(Metric):
    """‖W_other − W‖² / ‖W‖² of each projection; its largest |weight|, and that which is changed most."""

    name = "weights"
    measured_by = "outliers.metrics.weights.measure:WEIGHTS"
