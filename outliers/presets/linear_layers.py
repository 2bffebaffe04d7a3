"""The speed of linear layers of some dimensions in many ways (Table 5), and of decoder layers (Table 6)."""

from outliers.metrics.linear_layer import DecoderLayer, LinearLayer
from outliers.specification.kinds import DecoderLayers, LinearLayers
from outliers.subjects import layer
from outliers.subjects.cell import Cell, Plan
from outliers.variants.quantized import EXACT


def linear_layer_plans(spec: LinearLayers) -> list[Plan]:
    """A cell a dimension."""
    metric = LinearLayer(tokens=spec.tokens, seconds=spec.seconds)
    subjects = [layer.Layer(dimension, spec) for dimension in spec.dimensions]
    return [Plan.of(subject, [Cell(subject, EXACT, metric)]) for subject in subjects]


def decoder_layer_plans(spec: DecoderLayers) -> list[Plan]:
    """Of each model a cell a batch."""
    metrics = [DecoderLayer(batch=batch, seconds=spec.seconds) for batch in spec.batches]
    subjects = [layer.DecoderLayer(model, spec) for model in spec.models]
    return [Plan.of(subject, [Cell(subject, EXACT, metric) for metric in metrics]) for subject in subjects]
