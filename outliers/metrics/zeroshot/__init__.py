"""Zero-shot accuracy by the language model evaluation harness (Figure 1)."""

from typing import ClassVar

from pydantic import Field

from outliers.metrics.metric import Metric
from outliers.specification.kinds import DATA, LIMIT, Count, Line


class ZeroShot(Metric):
    """`acc`, `acc_norm` and `perplexity` of a task, as far as it has them, with their standard errors."""

    name: ClassVar[str] = "zeroshot"
    measured_by: ClassVar[str] = "outliers.metrics.zeroshot.measure:ZEROSHOT"
    view: ClassVar[str] = "outliers.metrics.zeroshot.view:zeroshot_section"
    subject: ClassVar[str] = "outliers.subjects.causal:Pretrained"
    needs: ClassVar[tuple[str, ...]] = ("standard_error", "examples", "task", "lm_eval")

    task: Line = Field("lambada-local", description="Of lm-eval, or lambada-local or piqa-local.")
    data: Line | None = Field(None, description=DATA, exclude=True)
    limit: Count | None = Field(None, description=LIMIT)
