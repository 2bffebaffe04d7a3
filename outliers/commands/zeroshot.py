"""Zero-shot accuracy of models under schemes, task by task (Figure 1)."""

from itertools import product

from pydantic import Field

from outliers.commands import Command
from outliers.config.experiment import ON_ENGINE, UNDER_SCHEMES, Experiment
from outliers.config.fields import Data, ExampleLimit, Models, Name, Names, Schemes, Threshold
from outliers.criterion import ALPHA
from outliers.metrics import records
from outliers.subjects.causal import Pretrained
from outliers.subjects.cell import Cell, CellPlan


class ZeroShot(Experiment):
    """Zero-shot accuracy by the language model evaluation harness (Figure 1)."""

    takes = (*ON_ENGINE, *UNDER_SCHEMES)
    view = "outliers.views.zeroshot:zeroshot_section"

    name: Name = "zeroshot"
    models: Models
    schemes: Schemes = Field(
        default=["fp32", "absmax-vector", "llm.int8"],
        validate_default=True,
        description="Schemes; fp32 is not quantized.",
    )
    tasks: Names = Field(
        default=["hellaswag", "piqa", "winogrande", "lambada_openai"],
        description="Tasks of lm-eval; or lambada-local and piqa-local, with 200 embedded examples each.",
    )
    data: Data = None
    limit: ExampleLimit = None
    alpha: Threshold = ALPHA

    def check(self) -> None:
        from outliers.text.task_data import check_task  # late, for `--help` does not need it

        for task in self.tasks:
            check_task(task)

    def plans(self) -> list[CellPlan]:
        metrics = [
            records.ZeroShotMetric(task=task, **self.model_dump(include={"data", "limit"})) for task in self.tasks
        ]
        subjects = [Pretrained(name, self.revision, self) for name in self.models]
        pairs = list(product(self.quantized, metrics))
        return [CellPlan.of(subject, [Cell(subject, *pair) for pair in pairs]) for subject in subjects]


COMMAND = Command(
    "zero-shot accuracy under 8-bit schemes, as in Figure 1 of the paper",
    """Measure the zero-shot accuracy of models under 8-bit schemes with the harness lm-eval.

Prints the table and writes rows, the table and a figure. A second run resumes the first. Options replace
the fields of the experiment; with models and no experiment, the other fields have their defaults. The harness
comes with `pip install 'outliers[zeroshot]'`.

Examples:

`python -m outliers.zeroshot`

`python -m outliers.zeroshot --model smollm2-135m --task lambada-local --scheme fp32 --scheme absmax`

`python -m outliers.zeroshot paper/figure1 --model facebook/opt-125m --task piqa --task winogrande`
""",
    ZeroShot,
    default="pocket/figure1",
)
