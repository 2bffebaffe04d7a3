"""The engine of tasks in this process, one after the other; a Ray cluster is another one. Failures cost cells alone."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from outliers.errors import MeasurementFailed, UserError, reason_of
from outliers.runs.forecast import Request, forecast, room_of
from outliers.subjects.bench import Bench
from outliers.subjects.cell import Task
from outliers.terminal.interrupt import stop_if_asked
from outliers.terminal.progress import Progress

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # in torch's RuntimeError, by device
LESS = "take a smaller --block, fewer schemes at once, --stream, or a machine with more"


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
            result = tried(result_of, self.bench, task.function, task.subject, task.arguments)
            if end > self.bar.n:  # what the task did not move itself
                self.bar.update(end - self.bar.n)
            yield task, result


def result_of(bench: Bench, function: Callable, subject: Any, arguments: tuple) -> Any:
    """The result of a task, whose weights are those that it was to have, in files that did not change meanwhile."""
    result = function(bench, subject, *arguments)
    bench.check_weights()
    bench.check_unchanged()
    return result


def tried(function: Callable, *arguments: Any) -> Any:
    """Return what a function returns, or how it failed: a UserError, too little memory, or a refusal of the system.

    Errors of a program, such as TypeError, and Ctrl-C end the run.
    """
    try:
        return function(*arguments)
    except UserError as error:
        kind = type(error) if isinstance(error, MeasurementFailed) else MeasurementFailed
        return kind(str(error))  # without the traceback, whose frames hold the model
    except (MemoryError, RuntimeError) as error:
        reason = reason_of(error, 300)
        if isinstance(error, RuntimeError) and not any(part in reason for part in NO_MEMORY):
            raise
        return MeasurementFailed(f"too little memory ({reason}); {LESS}")
    except BrokenPipeError:  # of what is printed
        raise
    except OSError as error:
        return MeasurementFailed(f"the system refuses it ({reason_of(error, 300)})")
