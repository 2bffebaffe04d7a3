"""GPU memory of a model at inference, and whether hardware holds it (Table 3)."""

from typing import Annotated

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import Batch, Count, Finite, Line, Tokens


class Memory(Metric):
    """Parameters, and bytes of weights in 16 and in 8 bits, of the cache and of activations."""

    name = "memory"
    measured_by = "outliers.metrics.memory.measure:MEMORY"
    subject = "outliers.subjects.configured:Configured"
    needs = ("parameters", "context_used", "context", "batch")

    context: Tokens = Field(256, description="Tokens per sequence, at most the model's context.")
    batch: Batch = Field(1, description="Batch size.")


class Fits(Memory):
    """Whether a model fits some equal GPUs in 16 and in 8 bits: 1 or 0.

    gigabytes, headroom: GiB of a GPU, and what it keeps free of them. owner: who has such hardware.
    """

    name = "fits"
    needs = (*Memory.needs, "bits", "candidate", "hardware", "gpus", "gigabytes", "headroom")

    hardware: Line
    owner: Line | None = None
    gpus: Count = 1
    gigabytes: Annotated[Finite, Field(gt=0)]
    headroom: Annotated[Finite, Field(ge=0)] = 0.75
