"""Cells (one metric of one subject under one variant), plans of cells, and tasks that measure them. Without torch.

A plan's cells come in stages: the cells of a stage are chosen from the rows of the stages before.
"""

from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

from outliers.config.experiment import Experiment
from outliers.errors import UserError
from outliers.subjects.row import Row
from outliers.terminal.forecaster import Steps

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from outliers.models.variant import Variant
    from outliers.subjects.model_cache import ModelCache


class MeasuresCells(Protocol):
    """How cells are measured, as `outliers.metrics.measurement.Measurement` defines it."""

    unit: str
    cost: float
    splits: bool

    def check(self, cell: "Cell") -> None: ...

    def provenance(self, cell: "Cell", model_cache: "ModelCache") -> dict: ...

    def shared(self, cell: "Cell") -> Hashable: ...

    def steps(self, cells: Sequence["Cell"]) -> int: ...

    def memory_needs(self, cells: Sequence["Cell"]) -> tuple | None: ...

    def measure(
        self, model_cache: "ModelCache", cells: Sequence["Cell"], part: slice, provenance: dict
    ) -> list[Any]: ...

    def values(self, cell: "Cell", results: list[Any]) -> list[dict]: ...


class CellMetric(Protocol):
    """What a cell has to know of a metric, see `outliers.metrics.records.Metric`."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    timed: ClassVar[bool]
    is_stored: ClassVar[bool]

    @property
    def request(self) -> dict: ...

    @property
    def measurement(self) -> MeasuresCells: ...


class Subject:
    """The subject of a measurement; this base class reads no weights and no text.

    name: for messages. request: fields that identify it in rows. experiment: where and how it runs. needs: fields of
    provenance that its tables and figures need. blocks: its inputs, which may be measured in parts. seed_count: how
    many times the same text is in the blocks, once for each mask seed. takes_variants: whether variants change it.
    has_one_variant: whether each variant needs a subject of its own.
    """

    name: str
    request: dict
    experiment: Experiment
    needs: tuple[str, ...] = ()
    blocks: "Sequence | torch.Tensor" = range(1)  # a single part
    seed_count = 1
    takes_variants = has_one_variant = False

    def prepare(self) -> None:
        """Read what is small, such as the configuration, so that mistakes show before anything is measured."""

    def check(self, cells: Iterable["Cell"]) -> None:
        """Raise UserError if a variant or a metric of cells does not fit the subject."""

    def load(self, model_cache: "ModelCache", provenance: dict | None = None) -> "PreTrainedModel":
        """Return the model, after checking that it has the weights that the provenance names."""

    def weights(self, model_cache: "ModelCache") -> dict:
        """Return the hash of the loaded weights as a field of rows."""
        return {}

    def provenance(self, model_cache: "ModelCache", cell: "Cell") -> dict:
        """Return what a row needs beside the identity of its cell: hashes, sizes, kernels."""


@dataclass(frozen=True, eq=False)
class Cell:
    """One metric of one subject under one variant.

    labels: further provenance of its row, which tells it from others of the same request, such as the number of a draw.
    """

    subject: Subject
    variant: "Variant"
    metric: CellMetric
    labels: dict = field(default_factory=dict)

    @property
    def request(self) -> dict:
        """The part of the row that identifies the cell, without provenance."""
        return {"subject": self.subject.request, "variant": self.variant.name, "metric": self.metric.request}

    @property
    def name(self) -> str:
        """The name of the cell in messages, without its subject."""
        return f"{self.variant.name}, {self.metric.name}" if self.subject.takes_variants else self.metric.name


class NotMeasured(UserError):
    """A plan needs the values of a cell that failed."""


class FailedRow:
    """A failed row as a plan gets it: the plan may ignore it, and ends if it reads the values."""

    def __init__(self, row: Row):
        self.provenance, self._row = row.provenance, row

    @property
    def values(self) -> list[dict]:
        """Raise NotMeasured, because a failed row has no values."""
        request = self._row.request
        raise NotMeasured(
            f"'{request['metric']['name']}' of '{request['subject'].get('model')}' under {request['variant']} failed, "
            "and what follows from it cannot be measured"
        )


Stages = Generator[list[Cell], list[Row], None]  # yields cells; their rows, sent back, may decide which cells follow


class CellPlan(NamedTuple):
    """The cells of a subject, stage by stage.

    package: a library that the plan compares with; if it is not installed, a run logs that and leaves the plan out.
    passes: function that estimates how often all stages together pass the blocks, if values decide which cells follow.
    """

    subject: Subject
    stages: Stages
    package: str | None = None
    passes: Callable[[], int] = lambda: 0

    @classmethod
    def of(cls, subject: Subject, cells: Iterable[Cell], package: str | None = None) -> "CellPlan":
        return cls(subject, (stage for stage in [list(cells)]), package)


def next_cells(stages: Stages, rows: list[Row]) -> list[Cell]:
    """Send the rows of the last stage, and return the cells of the next one; an empty list at the end.

    Raises:
        NotMeasured: the cells depend on a row that failed.
    """
    try:
        return stages.send([row if row.values else FailedRow(row) for row in rows])
    except StopIteration:
        return []


class Task(NamedTuple):
    """A piece of work for an engine.

    what: its name in messages, without the subject. function: called with a `ModelCache`, which stays on its machine,
    and with the subject and the arguments, which travel between machines as the result does. steps: by which it moves
    the bar. number: identifies tasks that belong together, such as parts of a text.
    """

    what: str
    function: Callable
    subject: Subject
    arguments: tuple
    steps: Steps = Steps()
    number: int = 0

    @property
    def name(self) -> str:
        return f"{self.subject.name}, {self.what}"
