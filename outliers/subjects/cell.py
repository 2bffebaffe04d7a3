"""A cell, one metric of one subject under one variant; plans of cells, and tasks that answer them. Without torch."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from outliers.errors import UserError
from outliers.terminal.forecaster import Steps

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from outliers.models.variant import Variant

# Of rooms to the right: outliers.subjects.bench, outliers.metrics.records, outliers.runs.rows.
Bench = Metric = Row = Any


USUAL = {"device": "cpu", "bos": False, "documents": False, "mask_seed": 0, "mask_seeds": 1, "objective": None}
USUAL |= {"stride": None, "scored": None}


def unusual(settings: Mapping) -> dict:
    """The settings that rows name only where they are not the usual ones."""
    return {name: settings[name] for name, usual in USUAL.items() if settings.get(name, usual) != usual}


class Subject:
    """The subject of a measurement; here one of which no stored weights are read, and no text.

    name: to call it in messages. asked: what rows say of it. settings: where and how it runs. needs: facts that its
    tables and figures take. blocks: its inputs, of which measurements may take parts. seeds: how
    many times the same text is in them, see `outliers.models.anatomy.examples.Examples`. of_variants: whether a variant
    changes anything of it; of_one_variant: whether each is a subject of its own.
    """

    name: str
    asked: dict
    settings: Any
    needs: tuple[str, ...] = ()
    blocks: "Sequence | torch.Tensor" = range(1)  # it is measured at once
    seeds = 1
    of_variants = of_one_variant = False

    def prepare(self) -> None:
        """Read what is light of it, so that a mistake shows before anything is measured."""

    def check(self, cells: Iterable["Cell"]) -> None:
        """Raise UserError where a variant or a metric of cells does not fit it."""

    def load(self, bench: Bench, facts: dict | None = None) -> "PreTrainedModel":
        """The model, if it has the weights that the facts say."""

    def weights(self, bench: Bench) -> dict:
        """The weights that were loaded, as a fact."""
        return {}

    def facts(self, bench: Bench, cell: "Cell") -> dict:
        """The facts about it and a variant on it beside what identifies a cell: hashes, sizes, kernels."""


@dataclass(frozen=True, eq=False)
class Cell:
    """One metric of one subject under one variant.

    about: further facts of its row, which tell it from others that ask the same, such as the number of a draw.
    """

    subject: Subject
    variant: "Variant"
    metric: Metric
    about: dict = field(default_factory=dict)

    @property
    def asked(self) -> dict:
        """The part of its row that identifies it, beside facts."""
        return {"subject": self.subject.asked, "variant": self.variant.name, "metric": self.metric.asked}

    @property
    def name(self) -> str:
        """Its name in messages, beside its subject."""
        return f"{self.variant.name}, {self.metric.name}" if self.subject.of_variants else self.metric.name


class NotMeasured(UserError):
    """A plan needs the values of a cell that failed."""


class Unknown:
    """A failed row for a plan: it may pass over it, and ends where it needs its values."""

    def __init__(self, row: Row):
        self.facts, self._row = row.facts, row

    @property
    def values(self) -> list[dict]:
        """Raise NotMeasured."""
        asked = self._row.asked
        raise NotMeasured(
            f"'{asked['metric']['name']}' of '{asked['subject'].get('model')}' under {asked['variant']} failed, and "
            "what follows from it cannot be measured"
        )


Stages = Generator[list[Cell], list[Row], None]  # cells, whose rows may decide which cells follow


class Plan(NamedTuple):
    """The cells of a subject, stage by stage.

    package: a library that it compares with; where it is not installed, a run leaves the plan out and says so. usual:
    how often all stages together usually pass its blocks, where values decide which ones follow the first.
    """

    subject: Subject
    stages: Stages
    package: str | None = None
    usual: Callable[[], int] = lambda: 0

    @classmethod
    def of(cls, subject: Subject, cells: Iterable[Cell], package: str | None = None) -> "Plan":
        """All cells in one stage."""
        return cls(subject, (stage for stage in [list(cells)]), package)


def following(stages: Stages, rows: list[Row]) -> list[Cell]:
    """The cells that follow some rows; none at the end.

    Raises:
        NotMeasured: they follow from a row that failed.
    """
    try:
        return stages.send([row if row.values else Unknown(row) for row in rows])
    except StopIteration:
        return []


class Task(NamedTuple):
    """A piece of an experiment.

    what: what to call it in messages, beside its subject. function: called with a `Bench`, the subject and the
    arguments; it, they and what it returns travel between machines. steps: how far it moves the bar. number: of those
    that belong together, such as parts of a text.
    """

    what: str
    function: Callable
    subject: Any
    arguments: tuple
    steps: Steps = Steps()
    number: int = 0

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{self.subject.name}, {self.what}"
