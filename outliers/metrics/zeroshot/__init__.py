"""Zero-shot accuracy by the language model evaluation harness (Figure 1)."""

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import DATA, LIMIT, Count, Line


class ZeroShot(Metric):
    """`acc`, `acc_norm` and `perplexity` of a task, as far as it has them, with their standard errors."""

    name = "zeroshot"
    measured_by = "outliers.metrics.zeroshot.measure:ZEROSHOT"
    subject = "outliers.subjects.causal:Pretrained"
    needs = ("standard_error", "examples", "task", "lm_eval")

    task: Line = Field("lambada-local", description="Task of lm-eval, or lambada-local or piqa-local.")
    data: Line | None = Field(None, description=DATA, exclude=True)
    limit: Count | None = Field(None, description=LIMIT)
