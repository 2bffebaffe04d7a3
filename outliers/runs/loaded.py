"""Run cells of a loaded model through the planner, for Python functions such as `outliers.damage`, without a folder."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from outliers.runs.engine import LocalEngine
from outliers.runs.planner import FailedCells, Planner
from outliers.runs.rows import Row
from outliers.runs.run import records
from outliers.subjects.cell import Cell, CellPlan, Stages, Task
from outliers.subjects.given import Given
from outliers.subjects.model_cache import ModelCache
from outliers.terminal.forecaster import Steps
from outliers.terminal.progress import manual_bar


class NoBar:
    """A progress bar that shows nothing."""

    n = total = 0
    desc = ""

    def __init__(self):
        self.estimates: dict[str, Steps] = defaultdict(Steps)

    def __getattr__(self, _name: str) -> Any:
        return lambda *_arguments: None


class NoRows:
    """The rows of a run that neither finds nor keeps any."""

    def find(self, _request: dict, _provenance: dict) -> None:
        return None

    def may_have(self, _request: dict) -> bool:
        return False

    def add(self, *_rows: Row) -> None:
        pass


class LoadedEngine(LocalEngine):
    """An engine that raises the error of a task, and whose bar keeps the name of the Python function."""

    def name_of(self, _task: Task) -> str:
        return self.bar.desc.removesuffix(": ")

    def outcome_of(self, task: Task) -> Any:
        return task.function(self.model_cache, task.subject, *task.arguments)


class LoadedPlanner(Planner):
    """A run of plans of loaded models, which fit in memory, where a cell that fails ends the run."""

    def model_runs(self, *_plans: object) -> list:
        return []

    def _failed(self, failures: FailedCells, provenance: dict[Cell, dict], rows: dict[Cell, Row]) -> dict[Cell, Row]:
        if failures:
            raise [*failures.values()][-1]  # the last cell locates the failure best
        return {}


def measure_loaded(subject: Given, cells: Iterable[Cell] | Stages) -> list[dict]:
    """Measure cells of a loaded model, and return a flat dictionary for each value, in their order.

    Args:
        subject: the model with its blocks.
        cells: the cells, or a generator of stages, some of which follow from the rows of earlier ones.

    Raises:
        UserError: a cell cannot be measured.
    """
    plan = CellPlan(subject, cells) if isinstance(cells, Iterator) else CellPlan.of(subject, cells)
    with manual_bar() as bar:
        bar = NoBar() if bar is None else bar
        return records(LoadedPlanner(NoRows(), LoadedEngine(bar, ModelCache()), bar, "").run([plan]))
