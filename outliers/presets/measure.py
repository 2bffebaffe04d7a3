"""Any metrics of any models under any variants."""

from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING

from outliers.errors import UserError
from outliers.presets.cells import Cells
from outliers.specification.kinds import resolved
from outliers.subjects.cell import Cell, Plan

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
    groups: dict[tuple, list[tuple[Variant, Metric]]] = defaultdict(list)
    for variant, metric in product(spec.variants, spec.asked_metrics):
        kind = resolved(metric.subject)
        groups[kind, variant.name if kind.of_one_variant else None].append((variant, metric))
    subjects = [(kind(name, spec.revision, spec), asked) for name in spec.models for (kind, _), asked in groups.items()]
    return [Plan.of(subject, [Cell(subject, *pair) for pair in asked]) for subject, asked in subjects]
