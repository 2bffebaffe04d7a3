"""Zero-shot accuracy of models under schemes, task by task (Figure 1)."""

from itertools import product

from outliers.metrics.records import ZeroShot
from outliers.specification import kinds
from outliers.specification.kinds import schemes_of
from outliers.subjects.causal import Pretrained
from outliers.subjects.cell import Cell, Plan
from outliers.variants.quantized import Quantized


def zeroshot_plans(spec: kinds.ZeroShot) -> list[Plan]:
    """Of each model under each scheme every task; schemes that share weight codes are side by side."""
    metrics = [ZeroShot(task=task, **spec.model_dump(include={"data", "limit"})) for task in spec.tasks]
    variants = [Quantized(scheme, tuple(spec.skip)) for scheme in schemes_of(spec)]
    subjects = [Pretrained(name, spec.revision, spec) for name in spec.models]
    return [Plan.of(subject, [Cell(subject, *pair) for pair in product(variants, metrics)]) for subject in subjects]
