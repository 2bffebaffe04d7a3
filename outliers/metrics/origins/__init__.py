"""Contributions to a feature of the residual stream, layer by layer, and the gains of norms at it."""

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import NEURONS, POSITIONS, Count, Features, Positions

PARTS = {  # of a layer, and what is before all: the writers of each
    "embedding": ("embedding", "positions", "embedding norm"),
    "attention": ("head", "attention bias", "attention norm"),
    "feed-forward": ("neuron", "other neurons", "expert", "feed-forward bias", "feed-forward norm"),
}
PART_OF = {writer: part for part, writers in PARTS.items() for writer in writers}
SINGLE = ("embedding", "positions", "head", "neuron", "expert")  # writers by themselves, no rest and no constant


class Origins(Metric):
    """The terms of which some features consist, and the gains of the norms that read them."""

    name = "origins"
    measured_by = "outliers.metrics.origins.measure:ORIGINS"

    features: Features | None = Field(None, description="Features of the residual stream, such as 3,17.")
    positions: Positions = Field([], description=POSITIONS)
    neurons: Count = Field(3, description=NEURONS)
