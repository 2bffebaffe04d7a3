"""A sweep: the perplexity of models under schemes (Table 1)."""

from outliers.metrics.perplexity import Perplexity
from outliers.specification.kinds import Experiment, schemes_of
from outliers.subjects.causal import Causal
from outliers.subjects.cell import Cell, Plan, at_once
from outliers.variants.quantized import Quantized


def sweep_plans(spec: Experiment) -> list[Plan]:
    """Of each model its perplexity under each scheme; those that share weight codes are side by side."""
    metric, variants = (
        Perplexity(draws=spec.draws),
        [Quantized(scheme, tuple(spec.skip)) for scheme in schemes_of(spec)],
    )
    subjects = [Causal(name, spec.revision, spec) for name in spec.models]
    return [Plan(subject, at_once([Cell(subject, one, metric) for one in variants])) for subject in subjects]
