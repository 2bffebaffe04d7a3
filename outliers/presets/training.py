"""Training runs that differ in one thing each."""

from outliers.metrics.records import Training
from outliers.specification import training
from outliers.subjects.cell import Cell, Plan
from outliers.subjects.training_run import TrainingRun
from outliers.variants.quantized import EXACT


def training_plans(spec: training.Training) -> list[Plan]:
    """A cell a run and seed."""
    metric = Training(alpha=spec.alpha, watched=spec.watched, schemes=spec.schemes, draws=spec.draws)
    subjects = [TrainingRun(label, run, seed, spec) for label, run in spec.runs.items() for seed in spec.seeds]
    return [Plan.of(subject, [Cell(subject, EXACT, metric)]) for subject in subjects]
