"""The engine that runs tasks in this process, one after the other; a task that fails costs its cells alone.

`outliers.runs.cluster` has the engine of a Ray cluster.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from outliers.errors import MeasurementFailed, UserError, reason_of
from outliers.runs.forecast import ModelRun, forecast, room_of
from outliers.subjects.cell import Subject, Task
from outliers.subjects.model_cache import ModelCache
from outliers.terminal.interrupt import stop_if_asked
from outliers.terminal.progress import Progress

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # in torch's RuntimeError, by device
LESS = "take a smaller --block, fewer schemes at once, --stream, or a machine with more"


class LocalEngine:
    """An engine that runs tasks in this process, one after the other."""

    def __init__(self, bar: Progress, model_cache: ModelCache):
        self.bar, self.model_cache = bar, model_cache
        model_cache.bar = bar

    def forecast(self, model_runs: list[ModelRun]) -> dict[str, str]:
        """Return the models that do not fit in memory, each with the reason; see `outliers.runs.forecast`."""
        return forecast(model_runs, room_of(model_runs[0].device))[1]

    def groups(self, subjects: list) -> list[list]:
        """Return each subject as a group of its own, because one model at a time is in memory."""
        return [[subject] for subject in subjects]

    def parts(self, blocks: int, _tasks: int) -> list[slice]:
        """Return one part, the whole text: a single process gains nothing from cutting it."""
        return [slice(0, blocks)]

    def run(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Any]]:
        """Yield each task with its result or its failure, and move the bar.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; no task is begun after it.
        """
        for task in tasks:
            stop_if_asked()
            self.bar.enter(self.name_of(task), task.steps)
            end = self.bar.n + task.steps.count
            result = self.outcome_of(task)
            if end > self.bar.n:  # steps by which the task did not move the bar itself
                self.bar.update(end - self.bar.n)
            yield task, result

    def name_of(self, task: Task) -> str:
        """Return the label of a task in the progress bar."""
        return task.name

    def outcome_of(self, task: Task) -> Any:
        """Return the result of a task, or its failure."""
        return tried(result_of, self.model_cache, task.function, task.subject, task.arguments)


def result_of(model_cache: ModelCache, function: Callable, subject: Subject, arguments: tuple) -> Any:
    """Return the result of a task, after checking that weights and files of the model are those expected."""
    result = function(model_cache, subject, *arguments)
    model_cache.check_weights()
    model_cache.check_unchanged()
    return result


def tried(function: Callable, *arguments: Any) -> Any:
    """Return a function's result; for a UserError, too little memory or a system error return a MeasurementFailed.

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
    except BrokenPipeError:  # standard output is closed
        raise
    except OSError as error:
        return MeasurementFailed(f"the system refuses it ({reason_of(error, 300)})")
