"""Measurement of a training run; one that was stopped goes on from its last checkpoint."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outliers.metrics.measurement import Measurement
from outliers.metrics.perplexity.measure import perplexity
from outliers.metrics.training import Training
from outliers.metrics.training.watch import watch
from outliers.models.load import find_device
from outliers.quantization.convert import quantize
from outliers.quantization.schemes import BASELINE, get_scheme
from outliers.subjects.bench import Bench, naming
from outliers.subjects.cell import Cell
from outliers.training.layers import train_int8
from outliers.training.loop import train
from outliers.training.start import start
from outliers.variants.draw import drawn, scattered

# What is kept of a model in the middle of its training; of the trained one it is all that `watch` finds.
ALONG = ("perplexity", "count", "layers", "positions", "attention_sink", "max")  # and those of each role


class Answer(NamedTuple):
    """The outcome of a run: facts of its model, its log, and the perplexity under each scheme."""

    facts: dict
    logged: list[dict]
    perplexities: dict[str, dict]


class OfRuns(Measurement):
    """A run at a time, from its start to the schemes at its end."""

    unit = "step"
    splits = False

    def facts(self, cell: Cell, _bench: Bench) -> dict:
        """Facts of the metric for tables."""
        return {"alpha": cell.metric.alpha, "draws": cell.metric.draws}

    def steps(self, cells: Sequence[Cell]) -> int:
        """Those of the training."""
        return sum(cell.subject.recipe.steps for cell in cells)

    def keeps(self, _cells: Sequence[Cell]) -> None:
        """Nothing of which a forecast is made."""

    def answer(self, bench: Bench, cells: Sequence[Cell], _part: slice, _facts: dict) -> list[Answer]:
        """Train, watch, and quantize what was trained."""
        run, metric = cells[0].subject, cells[0].metric
        model = start(run.recipe, run.seed, find_device(run.settings.device))
        facts = {"architecture": model.config.model_type, "parameters": model.num_parameters()}
        with naming(run.name):
            at = {*metric.watched, run.recipe.steps}
            seen = lambda model, _step: watch(model, run.blocks, metric.alpha)  # noqa: E731
            logged = train(model, run.recipe, run.training_blocks(), run.folder, seen, at, bench.bar.update)
            return [Answer(facts, logged, _under_schemes(model, run.blocks, metric))]

    def values(self, cell: Cell, answers: list[Answer]) -> list[dict]:
        """A value a metric and step, then one a scheme."""
        facts, logged, perplexities = answers[0]
        steps = cell.subject.recipe.steps
        along = [
            {"checkpoint": f"step-{entry['step']}", "metric": metric, "value": value}
            for entry in logged
            if "perplexity" in entry
            for metric, value in entry.items()
            if metric in ALONG
            or metric.startswith("max.")
            or (entry["step"] == steps and metric not in ("step", "epoch"))
        ]
        at_the_end = [
            {"checkpoint": f"step-{steps}", "metric": f"perplexity.{name}"} | perplexity
            for name, perplexity in perplexities.items()
        ]
        return [facts | value | {"unit": "1"} for value in along + at_the_end]


def _under_schemes(model: PreTrainedModel, blocks: torch.Tensor, metric: Training) -> dict[str, dict]:
    """The perplexity of a trained model under each scheme; that of BASELINE is of its weights in float32."""
    train_int8(model, ffn=False, linear=False)
    perplexities = {}
    for scheme in dict.fromkeys(map(get_scheme, [BASELINE, *metric.schemes])):
        changed, draws = quantize(model, scheme), []
        for draw in range(metric.draws):
            with drawn(changed, draw):
                draws.append(perplexity(changed, blocks))
        perplexities[scheme.name] = scattered(draws)
    return perplexities


TRAINING = OfRuns()
