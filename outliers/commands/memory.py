"""The memory that models need at inference, and the largest model that fits some hardware (Table 3)."""

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

from outliers.commands import Command
from outliers.config.experiment import Experiment
from outliers.config.fields import Finite, Models, Name, Split
from outliers.errors import UserError, unknown_name
from outliers.metrics import records
from outliers.metrics.records import Hardware, SequenceSize
from outliers.subjects.cell import Cell, CellPlan
from outliers.subjects.configured import Configured
from outliers.variants.quantized import EXACT


def _gpus(value):
    """Return hardware such as 8x24 or 24, the number of GPUs and the GiB of each, as fields; other types unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(?:([0-9]{1,9})x)?([0-9]{1,9}(?:\.[0-9]+)?)", value)
    if not match:
        raise UserError(f"hardware '{value}'; expected a number of GPUs and the GiB of each, such as --gpu 8x24")
    count = int(match[1] or 1)
    return {"hardware": f"{count}x GPU", "gpus": count, "gigabytes": float(match[2])}


class Memory(SequenceSize, Experiment):
    """The memory that models need at inference, from their configurations, and the largest that some hardware holds.

    With these defaults the paper's Table 3 is reproduced as published, as it is with a headroom of 0.65 to 1.08 GiB at
    a context of 128, 0.57 to 0.92 at 256, 0.49 to 0.76 at 384, 0.41 to 0.56 at 512, 0.32 to 0.34 at 640; never at 768.
    """

    with_weights = False

    view = "outliers.views.memory:memory_section"

    name: Name = "memory"
    models: Models
    candidates: Models | None = Field(
        default=None, description="Candidates for the largest model that fits; by default all."
    )
    hardware: Annotated[list[Annotated[Hardware, BeforeValidator(_gpus)]], Split, Field(min_length=1)] = Field(
        default=[], title="gpus", description="Hardware: 8x24 for eight GPUs of 24 GiB, 24 for one."
    )
    headroom: Annotated[Finite, Field(ge=0)] = Field(default=0.75, description="GiB of each GPU left free.")

    def plans(self) -> list[CellPlan]:
        """Return the cells for the footprint of each model, and for whether each hardware holds it.

        Rows have the field `candidate`: whether the largest model that hardware holds is looked for among it.

        Raises:
            UserError: a candidate is none of the models.
        """
        for name in self.candidates or []:
            if name not in self.models:
                raise unknown_name("candidate", name, self.models, "(the field 'models' names it too)")
        size = self.model_dump(include=SequenceSize.model_fields.keys())
        places = [records.Fits(**size, headroom=self.headroom, **dict(hardware)) for hardware in self.hardware]
        candidates = self.candidates or self.models
        return [
            CellPlan.of(
                subject, [Cell(subject, EXACT, metric, labels) for metric in (records.MemoryMetric(**size), *places)]
            )
            for subject in map(Configured, self.models)
            for labels in [{"candidate": subject.name in candidates}]
        ]


COMMAND = Command(
    "memory of models, and the largest model that some GPUs hold, as in Table 3",
    """Compute the memory of models at inference in 16 and in 8 bits, and the largest model that fits GPUs.

Counts weights, KV cache and activations from a model's configuration: no weights are loaded, no GPU is needed. With
no model, those of the paper's Table 3 and their families; with no model and no GPUs, Table 3.

Examples:

`python -m outliers.memory`

`python -m outliers.memory --gpu 2x24 --gpu 16 --context 2048`

`python -m outliers.memory facebook/opt-6.7b bigscience/bloom-7b1 --gpu 12 --batch 8`
""",
    Memory,
    default="paper/table3",
    instead=lambda fields: {"name": "memory", "candidates": None} if "hardware" in fields else {},
)
