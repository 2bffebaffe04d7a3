"""Places and sizes of the outlier features of one model."""

from pydantic import Field

from outliers.commands import Command
from outliers.config.experiment import ON_TEXT, Experiment
from outliers.config.fields import Model, Name
from outliers.criterion import OF_EVERY_STACK
from outliers.metrics.records import StoredTrace
from outliers.runs.stages.trace import PASSES, trace_stages
from outliers.subjects.causal import MaybeUnlabelled
from outliers.subjects.cell import CellPlan


class Tracing(Experiment):
    """A trace of one model."""

    takes = (*ON_TEXT, "revision")
    command = "trace"
    view = "outliers.views.trace:trace_rows_section"

    name: Name = "trace"
    model: Model
    by_token: bool = Field(
        default=False, title="tokens", description="Find the tokens that carry the outlier features."
    )
    imatrix: bool = Field(default=False, description="Also write imatrix.gguf for llama-quantize.")
    masks: bool = Field(
        default=False, description="Also write masks of outlier features and tokens; takes another pass."
    )

    def plans(self) -> list[CellPlan]:
        files = {"tokens": self.by_token, "imatrix": self.imatrix, "masks": self.masks}
        metric = StoredTrace(roles=OF_EVERY_STACK, alpha=self.alpha, attention=True, details=True, **files)
        subject = MaybeUnlabelled(self.model, self.revision, self)
        return [CellPlan(subject, trace_stages(subject, metric), passes=lambda: PASSES)]


COMMAND = Command(
    "outlier features of a model, their places and magnitudes",
    """Trace a model's hidden states: its outlier features and its row in the paper's Table 4.

Prints the features, the largest input of each kind of projection, massive activations and attention sinks; writes
the trace, rows, tables and figures to results/trace/NAME. A second run resumes the first.

Examples:

`python -m outliers.trace pocket/gpt2-1.7m`

`python -m outliers.trace smollm2-135m --tokens`

`python -m outliers.trace smollm2-135m --imatrix --masks`

`python -m outliers.trace facebook/opt-1.3b --text c4 --block 2048 --device cuda --dtype float16`
""",
    Tracing,
)
