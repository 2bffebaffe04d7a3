"""Queries, keys and values of a text, all of it or in parts that are merged."""

from collections.abc import Sequence
from functools import reduce

from outliers.metrics.keys.channels import Channels
from outliers.metrics.keys.observe import check_shows, observed_channels
from outliers.metrics.measurement import Measurement
from outliers.models.skeleton import skeleton
from outliers.subjects.bench import Bench, naming_under
from outliers.subjects.cell import Cell


class OfChannels(Measurement):
    """The channels of each cell."""

    def check(self, cell: Cell) -> None:
        check_shows(skeleton(cell.subject.config))

    def answer(self, bench: Bench, cells: Sequence[Cell], part: slice, facts: dict) -> list[Channels]:
        (cell,) = cells
        subject = cell.subject
        model, blocks = subject.load(bench, facts), bench.counted(subject.blocks[part])
        with naming_under(subject, cell.variant):
            (variant,) = bench.knowing([cell.variant], subject)
            return [observed_channels(model, blocks, cell.metric.channels, variant)]

    def values(self, cell: Cell, answers: list[Channels]) -> list[dict]:
        return [value | {"unit": "1"} for value in reduce(Channels.merge, answers).records(cell.metric.channels)]


KEYS = OfChannels()
