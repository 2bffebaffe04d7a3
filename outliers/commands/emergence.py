"""Outlier features along a family of models, or along revisions of one."""

from pydantic import Field

from outliers.commands import Command
from outliers.config.experiment import ON_TEXT, Experiment
from outliers.config.fields import Models, Name, Names
from outliers.errors import UserError
from outliers.metrics.records import TraceMetric
from outliers.runs.stages.trace import PASSES, trace_stages
from outliers.subjects.causal import ModelWithText
from outliers.subjects.cell import CellPlan


class Emergence(Experiment):
    """Outlier features along a family of models, or along revisions of one.

    Example:
        >>> rows = outliers.run(outliers.Emergence(models=["pocket/gpt2-0.1m"], block=64, blocks=2))
    """

    takes = ON_TEXT
    command = "emergence"
    view = "outliers.views.table4:emergence_section"

    name: Name = "emergence"
    models: Models
    revisions: Names | None = Field(
        default=None, description="Revisions of one model, such as step1000,step8000; or folders in its own."
    )

    @property
    def checkpoints(self) -> list[tuple[str, str | None]]:
        revisions = (self.revisions if len(self.models) == 1 else None) or [None]
        return [(name, revision) for name in self.models for revision in revisions]

    def plans(self) -> list[CellPlan]:
        """Return the cells for the row of Table 4 of every model, or of every revision of one.

        Raises:
            UserError: there are revisions of several models.
        """
        if self.revisions and len(self.models) > 1:
            raise UserError(f"revisions of {len(self.models)} models; expected revisions of one model")
        subjects = [ModelWithText(name, revision, self) for name, revision in self.checkpoints]
        return [
            CellPlan(subject, trace_stages(subject, TraceMetric(alpha=self.alpha)), passes=lambda: PASSES)
            for subject in subjects
        ]


COMMAND = Command(
    "outlier features along a family of models or along training, Figures 3 and 4",
    """Measure how outlier features emerge with size, with perplexity, or during training.

Prints the paper's Table 4 with the exponential fits of Figure 3b, and writes rows, tables, and Figures 3 and 4. By
default all pocket models, and SmolLM2-135M where it is installed. A second run resumes the first.

Examples:

`python -m outliers.emergence`

`python -m outliers.emergence --model gpt2 --model gpt2-medium --model gpt2-large --text c4 --block 1024`

`python -m outliers.emergence --model EleutherAI/pythia-160m --revisions step1000,step8000,step64000,step143000`

`python -m outliers.emergence --redraw my-training/outliers`
""",
    Emergence,
    default="pocket/table4",
    instead=lambda fields: {"name": "emergence", "shows": None},
    redraws=True,
)
