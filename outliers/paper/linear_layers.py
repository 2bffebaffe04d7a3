"""The speed of linear layers of some dimensions in several number formats (Table 5)."""

from typing import Literal

from outliers.config.experiment import ON_MACHINE, Experiment
from outliers.config.fields import Name, Shapes
from outliers.metrics.records import LinearLayer, Timed
from outliers.subjects import layer
from outliers.subjects.cell import Cell, CellPlan
from outliers.variants.quantized import EXACT


class LinearLayers(Timed, Experiment):
    """The first feed-forward layer of models of some dimensions: d features and 4 d outputs, or a shape (Table 5).

    dtype: the 16-bit type.
    """

    takes = ON_MACHINE
    view = "outliers.views.linear_layer:linear_layer_section"
    with_weights = False

    name: Name = "linear-layers"
    dtype: Literal["float16", "bfloat16"] = "bfloat16"
    dimensions: Shapes

    def plans(self) -> list[CellPlan]:
        metric = LinearLayer(tokens=self.tokens, seconds=self.seconds)
        subjects = [layer.SingleLayer(dimension, self) for dimension in self.dimensions]
        return [CellPlan.of(subject, [Cell(subject, EXACT, metric)]) for subject in subjects]
