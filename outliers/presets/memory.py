"""The memory that models need at inference, and which of them hardware holds (Table 3)."""

from outliers.errors import unknown_name
from outliers.metrics.records import Fits, Memory
from outliers.specification import kinds
from outliers.subjects.cell import Cell, Plan
from outliers.subjects.configured import Configured
from outliers.variants.quantized import EXACT


def memory_plans(spec: kinds.Memory) -> list[Plan]:
    """Of each model its footprint, then whether each hardware holds it; rows say whether it is a candidate.

    Raises:
        UserError: a candidate is none of the models.
    """
    for name in spec.candidates or []:
        if name not in spec.models:
            raise unknown_name("candidate", name, spec.models, "(the field 'models' names it too)")
    size = spec.model_dump(include={"context", "batch"})
    places = [Fits(**size, headroom=spec.headroom, **dict(hardware)) for hardware in spec.hardware]
    candidates = spec.candidates or spec.models
    return [
        Plan.of(subject, [Cell(subject, EXACT, metric, about) for metric in (Memory(**size), *places)])
        for subject in map(Configured, spec.models)
        for about in [{"candidate": subject.name in candidates}]
    ]
