"""A sweep: the perplexity of models under schemes (Table 1)."""

from outliers.metrics.perplexity import Perplexity
from outliers.quantization.schemes import by_weights, get_scheme
from outliers.runs.cell import Cell, Plan, Stages
from outliers.specification.kinds import Experiment, alpha_of_schemes
from outliers.subjects.causal import Causal
from outliers.variants.quantized import Quantized


def sweep_plans(spec: Experiment) -> list[Plan]:
    """Of each model its perplexity under each scheme; those that share weight codes are side by side."""
    subjects = [Causal(name, spec.revision, spec) for name in spec.models]
    return [Plan(subject, _stages(subject, spec)) for subject in subjects]


def _stages(subject: Causal, spec: Experiment) -> Stages:
    schemes = by_weights(get_scheme(scheme, alpha_of_schemes(spec)) for scheme in spec.schemes)
    yield [Cell(subject, Quantized(scheme, tuple(spec.skip)), Perplexity(draws=spec.draws)) for scheme in schemes]
