"""Milliseconds a generated token, with a KV cache (Table 6); of encoders a pass."""

from typing import Annotated

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import Batch, Count, Tokens


class Latency(Metric):
    """Medians with quartiles of what decode steps, the prefill and whole generations take; of a model that generates
    nothing, what a pass of its encoder over the batch takes, of which `tokens` says nothing.

    The model is alone in memory, and timed in this process: beside others, no time is its own.
    """

    name = "latency"
    measured_by = "outliers.metrics.latency.measure:LATENCY"
    subject = "outliers.subjects.served:Served"
    needs = ("q1", "q3", "batch", "prompt", "tokens", "repeats", "device_name", "threads")
    timed = True

    batch: Batch = Field(1, description="Batch size.")
    prompt: Tokens = Field(128, description="Tokens of the prompt.")
    tokens: Count = Field(32, description="Timed decode steps of a generation, after the first token.")
    repeats: Annotated[int, Field(ge=2, le=10**4)] = Field(3, description="Timed generations.")
