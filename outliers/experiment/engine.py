"""Where an experiment's cells are measured: in this process one after the other, or as tasks of a Ray cluster."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from tqdm import tqdm
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.evaluation.calibration import Passes
from outliers.experiment.foresee import announce, foresee
from outliers.experiment.interrupt import stop_if_asked
from outliers.experiment.job import Job, load
from outliers.experiment.spec import Settings
from outliers.models.watch import check_unchanged

if TYPE_CHECKING:
    from outliers.experiment.cluster import Cluster


class Cell(NamedTuple):
    """A piece of an experiment.

    what: what to call it in messages, beside its model. function: called with a `Bench`, the job and the arguments; it,
    they and what it returns travel between machines. steps: how far it moves the bar.
    """

    what: str
    function: Callable
    job: Job
    arguments: tuple
    steps: int

    @property
    def name(self) -> str:
        """What to call it in messages."""
        return f"{self.job.name}, {self.what}"


class Bench:
    """What a process that measures cells keeps between them: the last model that it loaded, and a bar to move."""

    def __init__(self, bar: tqdm):
        self.bar = bar
        self._key, self._loaded = None, None

    def load(self, job: Job, settings: Settings, like: dict | None = None) -> tuple[PreTrainedModel, dict]:
        """The model of a job, in the form that it was left in, and the fields that all its rows have in common.

        Raises:
            UserError: as `outliers.experiment.job.load`; or its weights are not those of the fields `like`, because
                they changed after another process read them.
        """
        key = job.model, job.revision, settings.model_dump_json()
        if key != self._key:
            self._key = self._loaded = None  # never two at once
            self._loaded = load(job, settings)
            self._key = key
        check_same_weights([self._loaded[1], like or self._loaded[1]])
        return self._loaded

    def check_unchanged(self) -> None:
        """Raise UserError if the files of the last model changed since they were read."""
        if self._key:
            check_unchanged(*self._key[:2])

    def leave(self, model: PreTrainedModel) -> None:
        """Keep the last model in another form, such as under a scheme whose codes the next one shares."""
        self._loaded = model, self._loaded[1]


class Here:
    """Runs cells in this process, one after the other; the first that fails ends the run."""

    def __init__(self, bar: tqdm):
        self.bench = Bench(bar)

    def foresee(self, jobs: list[Job], settings: Settings, passes: Passes, left: float) -> None:
        """Print what a run needs, and refuse what cannot fit; see `outliers.experiment.foresee`."""
        announce(foresee(jobs, settings, passes, left))

    def groups(self, jobs: list[Job]) -> list[list[Job]]:
        """The jobs that are measured together: each alone, for one model at a time is in memory."""
        return [[job] for job in jobs]

    def parts(self, blocks: int, _cells: int) -> list[slice]:
        """How a text of so many blocks is cut: not at all."""
        return [slice(0, blocks)]

    def run(self, cells: Iterable[Cell]) -> Iterator[tuple[Cell, Any]]:
        """Each cell with what it returned; it moves the bar itself. After Ctrl-C no other begins.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed.
        """
        for cell in cells:
            stop_if_asked()
            yield cell, cell.function(self.bench, cell.job, *cell.arguments)


def check_same_weights(fields: list[dict]) -> None:
    """Raise UserError if measurements of a model, which several processes may have made, are of different weights."""
    if len({of_one["weights_hash"] for of_one in fields}) > 1:
        model = fields[0]["model"]
        raise UserError(f"the weights of '{model}' changed while they were measured; run again once they are whole")


Engine = Union[Here, "Cluster"]


def said(part: slice) -> str:
    """A part of a text."""
    return f"blocks {part.start} to {part.stop - 1}"


def gather(engine: Engine, cells: list[Cell]) -> list[Any]:
    """What cells returned, in their order."""
    found = {id(cell): result for cell, result in engine.run(cells)}
    return [found[id(cell)] for cell in cells]


def common_fields(engine: Engine, jobs: list[Job], settings: Settings) -> list[dict]:
    """The fields that all rows of each job have in common; for its weights, every model is loaded."""
    return gather(engine, [Cell("its weights", _common, job, (settings,), 0) for job in jobs])


def _common(bench: Bench, job: Job, settings: Settings) -> dict:
    return bench.load(job, settings)[1]


@contextmanager
def engine_of(settings: Settings, bar: tqdm) -> Iterator[Engine]:
    """The engine that an experiment asks for.

    Raises:
        UserError: as `outliers.experiment.cluster.Cluster`.
    """
    if settings.engine == "local":
        yield Here(bar)
        return
    from outliers.experiment.cluster import Cluster  # which needs this module

    with Cluster(settings, bar) as cluster:
        yield cluster
