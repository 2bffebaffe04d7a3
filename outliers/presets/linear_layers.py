"""The speed of linear layers of some dimensions in many ways (Table 5)."""

from outliers.metrics.records import LinearLayer
from outliers.specification.kinds import LinearLayers
from outliers.subjects import layer
from outliers.subjects.cell import Cell, Plan
from outliers.variants.quantized import EXACT


def linear_layer_plans(spec: LinearLayers) -> list[Plan]:
    """A cell a dimension."""
    metric = LinearLayer(tokens=spec.tokens, seconds=spec.seconds)
    subjects = [layer.Layer(dimension, spec) for dimension in spec.dimensions]
    return [Plan.of(subject, [Cell(subject, EXACT, metric)]) for subject in subjects]
