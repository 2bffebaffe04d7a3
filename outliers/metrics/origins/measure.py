"""Account for features over a text, all of it or in parts that are merged."""

from collections.abc import Sequence
from functools import reduce

from outliers.errors import UserError
from outliers.metrics.measurement import Measurement
from outliers.metrics.origins.account import Account
from outliers.metrics.origins.observe import check_accountable, controls_of, origins
from outliers.subjects.bench import Bench, naming_under
from outliers.subjects.cell import Cell


class OfWriters(Measurement):
    """The account of each cell."""

    def check(self, cell: Cell) -> None:
        metric, block = cell.metric, cell.subject.settings.block
        if not metric.features:
            raise UserError("no feature is given; expected features of the residual stream, such as --features 3,17")
        check_accountable(cell.subject.config, metric.features)
        for position in metric.positions:
            if position >= block:
                raise UserError(f"position {position} in blocks of {block} tokens; expected 0 to {block - 1}")

    def facts(self, cell: Cell, _bench: Bench) -> dict:
        return {"controls": controls_of(cell.metric.features, cell.subject.width)}

    def answer(self, bench: Bench, cells: Sequence[Cell], part: slice, facts: dict) -> list[Account]:
        (cell,) = cells
        subject, metric = cell.subject, cell.metric
        model, blocks = subject.load(bench, facts), bench.counted(subject.blocks[part])
        with naming_under(subject, cell.variant):
            (variant,) = bench.knowing([cell.variant], subject)
            tokenizer = bench.tokenizer(subject)
            return [origins(model, blocks, metric.features, metric.positions, variant, tokenizer)]

    def values(self, cell: Cell, answers: list[Account]) -> list[dict]:
        return [value | {"unit": "1"} for value in reduce(Account.merge, answers).records(cell.metric.neurons)]


ORIGINS = OfWriters()
