"""Where an experiment's cells are measured: in this process one after the other, or as tasks of a Ray cluster."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from outliers.estimate.advice import announce, foresee
from outliers.estimate.probe import Passes
from outliers.experiment.cell import Bench, Cell
from outliers.experiment.cluster import Cluster
from outliers.experiment.interrupt import stop_if_asked
from outliers.experiment.job import Job, requests_of
from outliers.specification.kinds import Settings
from outliers.terminal.progress import Progress


class Here:
    """Runs cells in this process, one after the other; the first that fails ends the run."""

    def __init__(self, bar: Progress):
        self.bench = Bench(bar)

    def foresee(self, jobs: list[Job], settings: Settings, passes: Passes, left: float) -> None:
        """Print what a run needs, and refuse what cannot fit; see `outliers.estimate.advice`."""
        foreseen = foresee(requests_of(jobs, settings, passes, left))
        announce(foreseen)
        self.bench.bar.expect([(needed.seconds or 0) / left for needed in foreseen.needs])

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
            self.bench.bar.set_description(cell.name)
            result = cell.function(self.bench, cell.job, *cell.arguments)
            self.bench.check_weights()
            yield cell, result


Engine = Here | Cluster


def gather(engine: Engine, cells: list[Cell]) -> list[Any]:
    """What cells returned, in their order."""
    found = {id(cell): result for cell, result in engine.run(cells)}
    return [found[id(cell)] for cell in cells]


def common_fields(engine: Engine, jobs: list[Job], settings: Settings) -> list[dict]:
    """The fields that all rows of each job have in common, for which every model is loaded.

    Those of streamed models say nothing of their weights, see `with_weights`.
    """
    return gather(engine, [Cell("its fields", _common, job, (settings,), 0) for job in jobs])


def _common(bench: Bench, job: Job, settings: Settings) -> dict:
    return bench.load(job, settings)[1]


def with_weights(engine: Engine, job: Job, settings: Settings, fields: dict, needed: Callable[[dict], object]) -> dict:
    """The fields of a job's rows with the hash of its weights, before they are measured.

    That of a streamed model is known after its first pass. It is read for it before that only where it decides whether
    there is something to measure: if `needed` says so of the fields without it.
    """
    if "weights_hash" in fields or not needed(fields):
        return fields
    (weights,) = gather(engine, [Cell("its weights", _weights, job, (settings,), 0)])
    return fields | weights


def _weights(bench: Bench, job: Job, settings: Settings) -> dict:
    bench.load(job, settings)
    return bench.weights()


@contextmanager
def engine_of(settings: Settings, bar: Progress) -> Iterator[Engine]:
    """The engine that an experiment asks for.

    Raises:
        UserError: as `outliers.experiment.cluster.Cluster`.
    """
    if settings.engine == "local":
        yield Here(bar)
    else:
        with Cluster(settings, bar) as cluster:
            yield cluster
