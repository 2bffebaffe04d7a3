"""Milliseconds a generated token, with a KV cache (Table 6)."""

from typing import Annotated, ClassVar

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import Batch, Count, Tokens


class Latency(Metric):
    """Medians with quartiles of what decode steps, the prefill and whole generations take.

    The model is alone in memory, and timed in this process: beside others, no time is its own.
    """

    name: ClassVar[str] = "latency"
    measured_by: ClassVar[str] = "outliers.metrics.latency.measure:LATENCY"
    view: ClassVar[str] = "outliers.metrics.latency.view:latency_section"
    subject: ClassVar[str] = "outliers.subjects.served:Served"
    needs: ClassVar[tuple[str, ...]] = ("q1", "q3", "batch", "prompt", "tokens", "repeats", "device_name", "threads")
    timed: ClassVar[bool] = True

    batch: Batch = Field(1, description="Sequences at once.")
    prompt: Tokens = Field(128, description="Tokens a sequence has before.")
    tokens: Count = Field(32, description="Timed decode steps of a generation, after the first token.")
    repeats: Annotated[int, Field(ge=2, le=10**4)] = Field(3, description="Timed generations.")
