"""A sweep: the perplexity of models under schemes (Table 1)."""

from outliers.criterion import LOG_PERPLEXITY
from outliers.metrics.records import Accuracy, Agreement, Metric, Perplexity
from outliers.runs.rows import Row
from outliers.specification.kinds import PICTURES, Experiment, schemes_of
from outliers.subjects.causal import MaybeUnlabelled
from outliers.subjects.cell import Cell, Plan, Stages, Subject
from outliers.variants.quantized import Quantized


def sweep_plans(spec: Experiment) -> list[Plan]:
    """Of each model its perplexity under each scheme; those that share weight codes are side by side."""
    subjects = [MaybeUnlabelled(name, spec.revision, spec) for name in spec.models]
    variants = [Quantized(scheme, tuple(spec.skip)) for scheme in schemes_of(spec)]
    return [Plan(subject, _stages(subject, variants, spec.draws), further=False) for subject in subjects]


def _stages(subject: Subject, variants: list[Quantized], draws: int) -> Stages:
    """Perplexity; of pictures then how many are put into their class, or, without classes, where they were before."""

    def under_each(metric: Metric) -> list[Cell]:
        return [Cell(subject, variant, metric) for variant in variants]

    rows = yield under_each(Perplexity(draws=draws))
    measured = next((row for row in rows if isinstance(row, Row)), None)  # the others failed
    if measured and measured.facts.get("protocol") == PICTURES:
        by_class = measured.values[0]["metric"] in (Perplexity.name, LOG_PERPLEXITY)
        yield under_each((Accuracy if by_class else Agreement)(draws=draws))
