"""A causal language model that somebody has in memory, with token blocks: as the functions of Python take it."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace

import torch
from transformers import PreTrainedModel

from outliers.models.stream import is_streamed
from outliers.runs.cell import Cell
from outliers.runs.planner import bundles_of
from outliers.subjects.bench import Bench, Job


class Given:
    """A model, resident or streamed, with token blocks (T,) of any lengths; variants know their calibration."""

    def __init__(self, model: PreTrainedModel, blocks: Sequence[torch.Tensor]):
        self.model, self.blocks = model, blocks
        self.name = model.config.name_or_path or type(model).__name__
        self.job = Job(self.name, None, model.config)
        self.settings = SimpleNamespace(stream=is_streamed(model))

    def load(self, bench: Bench, facts: dict | None = None) -> PreTrainedModel:
        """The model itself."""
        return bench.keep(self.job, "given", lambda: (self.model, {}), facts)[0]


def records_of(cells: Iterable[Cell]) -> list[dict]:
    """What cells of one given model are answered, a flat dictionary for each value, in the order of the cells."""
    cells = list(cells)
    bench, values = Bench(SimpleNamespace(update=_quiet, begin=_quiet)), {}
    for bundle in bundles_of(cells):
        measurement = bundle[0].metric.measurement
        answers = measurement.answer(bench, bundle, slice(0, len(bundle[0].subject.blocks)), {})
        values |= {cell: measurement.values(cell, [answer]) for cell, answer in zip(bundle, answers, strict=True)}
    return [cell.variant.fields() | value for cell in cells for value in values[cell]]


def _quiet(_steps: int = 1) -> None:
    """As a bar that nobody sees."""
