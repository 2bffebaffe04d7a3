"""The effect of each layer of another model alone (docs/checkpoints.md#measurements)."""

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import DRAWS, Repeats


class Layers(Metric):
    """Perplexity, KL and top-1 agreement of a model of which one layer alone, with its norms, is under a variant."""

    name = "layers"
    measured_by = "outliers.metrics.layers.measure:LAYERS"

    draws: Repeats = Field(default=1, description=DRAWS)
