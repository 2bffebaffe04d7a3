"""How fast linear layers of some dimensions are in many ways (Table 5)."""

from outliers.metrics.linear_layer import LinearLayer
from outliers.specification.kinds import LinearLayers
from outliers.subjects.cell import Cell, Plan, at_once
from outliers.subjects.layer import Layer
from outliers.variants.quantized import EXACT


def linear_layer_plans(spec: LinearLayers) -> list[Plan]:
    """A cell a dimension."""
    metric = LinearLayer(tokens=spec.tokens, seconds=spec.seconds)
    subjects = [Layer(dimension, spec) for dimension in spec.dimensions]
    return [Plan(subject, at_once([Cell(subject, EXACT, metric)])) for subject in subjects]
