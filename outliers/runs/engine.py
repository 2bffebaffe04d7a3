"""Engines of an experiment's tasks: this process, one after the other, or a Ray cluster."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Union

from outliers.runs.failures import tried
from outliers.runs.forecast import Request, forecast, room_of
from outliers.specification.kinds import Named
from outliers.subjects.bench import Bench
from outliers.subjects.cell import Task
from outliers.terminal.interrupt import stop_if_asked
from outliers.terminal.progress import Progress

if TYPE_CHECKING:
    from outliers.runs.cluster import Cluster


class Here:
    """Runs tasks in this process, one after the other."""

    def __init__(self, bar: Progress, bench: Bench):
        self.bar, self.bench = bar, bench
        bench.bar = bar

    def forecast(self, requests: list[Request]) -> dict[str, str]:
        """The models that cannot fit, and why; see `outliers.runs.forecast`."""
        return forecast(requests, room_of(requests[0].device))[1]

    def groups(self, subjects: list) -> list[list]:
        """The subjects that are measured together: each alone, for one model at a time is in memory."""
        return [[subject] for subject in subjects]

    def parts(self, blocks: int, _cells: int) -> list[slice]:
        """The parts of a text of so many blocks: all of it."""
        return [slice(0, blocks)]

    def run(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Any]]:
        """Each task with what it returned, or with how it failed; it moves the bar itself.

        After Ctrl-C none: KeyboardInterrupt.
        """
        for task in tasks:
            stop_if_asked()
            self.bar.enter(task.name, task.steps)
            end = self.bar.n + task.steps.count
            result = tried(self._result, task)
            if end > self.bar.n:  # what the task did not move itself
                self.bar.update(end - self.bar.n)
            yield task, result

    def _result(self, task: Task) -> Any:
        result = task.function(self.bench, task.subject, *task.arguments)
        self.bench.check_weights()
        return result


Engine = Union[Here, "Cluster"]


def engine_of(spec: Named, bar: Progress, bench: Bench) -> AbstractContextManager[Engine]:
    """The engine that an experiment asks for; raise UserError as `outliers.runs.cluster.Cluster`.

    bench: what this process keeps between cells.
    """
    if getattr(spec, "engine", "local") == "local":
        return nullcontext(Here(bar, bench))
    from outliers.runs.cluster import Cluster

    return Cluster(spec, bar)
