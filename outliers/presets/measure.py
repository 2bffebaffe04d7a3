"""Any metrics of any models under any variants."""

from itertools import product
from typing import TYPE_CHECKING

from outliers.errors import UserError
from outliers.presets.cells import Cells
from outliers.runs.cell import Cell, Plan, Stages
from outliers.subjects.causal import Causal

if TYPE_CHECKING:
    from outliers.metrics.metric import Metric
    from outliers.models.stream import Variant


def measure_plans(spec: Cells) -> list[Plan]:
    """Of each model every metric under each variant."""
    for variant in spec.variants:
        if variant.needs_trace:
            raise UserError(
                f"'{variant.name}' needs the mean of each feature over the text, which outliers.ablate finds; expected "
                "zero or shuffle, or a variant that knows it"
            )
    subjects = [Causal(name, spec.revision, spec) for name in spec.models]
    asked = list(product(spec.variants, spec.asked_metrics))
    return [Plan(subject, _stages(subject, asked)) for subject in subjects]


def _stages(subject: Causal, asked: "list[tuple[Variant, Metric]]") -> Stages:
    yield [Cell(subject, variant, metric) for variant, metric in asked]
