"""Milliseconds per generated token of models under schemes, by batch size (Table 6)."""

from itertools import product
from typing import Annotated, Literal

from pydantic import Field

from outliers.commands import Command
from outliers.config.experiment import ON_MACHINE, UNDER_SCHEMES, Experiment
from outliers.config.fields import Batch, Begin, Models, Name, SchemesAndPeer, Split, Text, Threshold, Unique
from outliers.criterion import ALPHA
from outliers.metrics import records
from outliers.subjects.cell import Cell, CellPlan
from outliers.subjects.served import Served
from outliers.variants.peer import Bitsandbytes
from outliers.variants.term import PEER


class Latency(records.Generation, Experiment):
    """Time per generated token with a KV cache; prompts are the first tokens of a text."""

    takes = (*ON_MACHINE, *UNDER_SCHEMES)
    view = "outliers.views.latency:latency_section"

    name: Name = "latency"
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        default="bfloat16", description="Type of all that is not quantized."
    )
    models: Models
    schemes: SchemesAndPeer = Field(
        default=["fp32", "llm.int8"],
        validate_default=True,
        description="Schemes as for a sweep, fp32 (no quantization), or bitsandbytes for the layers of that library.",
    )
    text: Text = "sample"
    bos: Begin = False
    alpha: Threshold = ALPHA
    batches: Annotated[list[Batch], Split, Field(min_length=1), Unique] = Field(
        default=[1, 8, 32], description="Batch size."
    )

    def plans(self) -> list[CellPlan]:
        """Return the cells of each batch size for each model under each scheme, of which one is in memory at a time."""
        shared = self.model_dump(include={"name", "text", "bos", "alpha", "device", "dtype"})
        experiment = Experiment(**shared, block=self.prompt, blocks=max(self.batches))
        generation = self.model_dump(include=records.Generation.model_fields.keys())
        metrics = [records.LatencyMetric(batch=batch, **generation) for batch in self.batches]
        peer = [Bitsandbytes(self.alpha)] if PEER in self.schemes else []
        pairs = product(self.models, [*self.quantized, *peer])
        return [
            CellPlan.of(
                subject := Served(name, self.revision, experiment),
                [Cell(subject, variant, metric) for metric in metrics],
                variant.package,
            )
            for name, variant in pairs
        ]


COMMAND = Command(
    "milliseconds per generated token, as in Table 6 of the paper",
    """Time the generation of tokens with a KV cache, with and without int8 weights.

Prints the paper's Table 6, milliseconds per generated token by batch, and writes rows, tables and a page. A second run
resumes the first.

Examples:

`python -m outliers.latency pocket/gpt2-5.9m`

`python -m outliers.latency facebook/opt-1.3b --batch 1,8 --prompt 512 --tokens 64`

`python -m outliers.latency bigscience/bloom-7b1 --scheme fp32,absmax-vector,llm.int8 --device cuda --dtype float16`
""",
    Latency,
)
