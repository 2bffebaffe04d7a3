"""Timings of projections: one of each shape and scheme, for equal ones take equal times."""

import statistics
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from outliers.metrics.latency.measure import timed
from outliers.metrics.measurement import Measurement
from outliers.models.anatomy import projections
from outliers.models.decoder import inference
from outliers.quantization.linear import stored_weight
from outliers.subjects.bench import Bench
from outliers.subjects.cell import Cell

RUNS = 9  # after two that are not counted


class OfProjections(Measurement):
    """The projections of a model under one variant."""

    splits = False
    unit = "model"

    def steps(self, cells: Sequence[Cell]) -> int:
        return len(cells)

    def answer(self, bench: Bench, cells: Sequence[Cell], _part: slice, facts: dict) -> list[dict[tuple, float]]:
        """Milliseconds by layer, role and path."""
        (cell,) = cells
        cell.subject.load(bench, facts)
        (variant,) = bench.knowing([cell.variant], cell.subject)
        with bench.under(variant) as changed:
            times = _times(changed, cell.metric.tokens)
        bench.bar.update()
        return [times]

    def values(self, cell: Cell, answers: list[dict[tuple, float]]) -> list[dict]:
        return [
            {
                "metric": "times.projection",
                "value": value,
                "layer": layer,
                "role": role,
                "projection": path,
                "unit": "ms",
            }
            for (layer, role, path), value in answers[0].items()
        ]


@inference
def _times(model: PreTrainedModel, tokens: int) -> dict[tuple[int, str, str], float]:
    medians, known = {}, {}
    generator = torch.Generator().manual_seed(0)
    for part in projections(model):
        weight = part.module.weight if hasattr(part.module, "here") else stored_weight(part.module)
        kind = tuple(weight.shape), getattr(part.module, "scheme", None), getattr(part.module, "bias", None) is None
        if kind not in known:
            x = torch.randn(tokens, weight.shape[1], generator=generator).to(weight)
            runs = [timed(lambda: part.module(x), weight.device)[0] for _ in range(2 + RUNS)]  # noqa: B023
            known[kind] = statistics.median(runs[2:])
        medians[part.layer, part.role, part.path] = known[kind]
    return medians


TIMES = OfProjections()
