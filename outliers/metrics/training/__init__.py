"""Growth of outlier features while a model trains, and its final state (LLM.int8(), appendix E)."""

from typing import Annotated

from pydantic import Field, PlainSerializer

from outliers.criterion import ALPHA
from outliers.metrics.metric import Metric
from outliers.models.pocket.ladder import CHECKPOINTS
from outliers.specification.kinds import DRAWS, OUTLIER, Count, Repeats, Schemes, Threshold

AS_NAMES = PlainSerializer(lambda schemes: [getattr(scheme, "name", scheme) for scheme in schemes])


class Training(Metric):
    """All of `outliers.watch` after some steps and at the end; there also perplexity under schemes, over draws."""

    name = "training"
    measured_by = "outliers.metrics.training.measure:TRAINING"
    subject = None
    needs = ("checkpoint", "architecture", "parameters")

    alpha: Threshold = Field(ALPHA, description=OUTLIER)
    watched: list[Count] = Field(list(CHECKPOINTS))
    schemes: Annotated[Schemes, AS_NAMES] = Field(["absmax", "llm.int8"])
    draws: Repeats = Field(3, description=DRAWS)
