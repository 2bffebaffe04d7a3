"""Any metrics of any models under any variants."""

from outliers.errors import UserError
from outliers.presets.cells import Cells
from outliers.runs.cell import Cell, Plan, Stages
from outliers.subjects.causal import Causal


def measure_plans(spec: Cells) -> list[Plan]:
    """Of each model every metric under each variant."""
    for variant in spec.variants:
        if variant.needs_trace:
            raise UserError(
                f"'{variant.name}' needs the mean of each feature over the text, which outliers.ablate finds; expected "
                "zero or shuffle, or a variant that knows it"
            )
    subjects = [Causal(name, spec.revision, spec) for name in spec.models]
    return [Plan(subject, _stages(subject, spec)) for subject in subjects]


def _stages(subject: Causal, spec: Cells) -> Stages:
    yield [Cell(subject, variant, metric) for variant in spec.variants for metric in spec.asked_metrics]
