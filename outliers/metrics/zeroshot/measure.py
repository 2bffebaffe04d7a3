"""Measurement of a task; one quantization of a model's weights serves all tasks under schemes that share it."""

import functools
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outliers.errors import UserError
from outliers.metrics.measurement import Keeps, Measurement
from outliers.metrics.zeroshot import ZeroShot
from outliers.metrics.zeroshot.harness import documents_hash, evaluate, load_tasks
from outliers.models.weight_files import state_of
from outliers.subjects.bench import Bench
from outliers.subjects.cell import Cell

if TYPE_CHECKING:
    from lm_eval.api.task import Task

EXAMPLE = 512  # tokens of a long example of a task
LOGITS = 3  # of all its tokens: in the model's dtype, in float32 and normalized


class OfTasks(Measurement):
    """A task at a time."""

    unit = "task"
    splits = False

    def check(self, cell: Cell) -> None:
        """Load the task.

        Raises:
            UserError: the model is streamed; as `load_tasks`.
        """
        if getattr(cell.subject.settings, "stream", False):
            raise UserError("zero-shot tasks of a streamed model; expected one in memory: leave --stream out")
        _task(cell.metric)

    def facts(self, cell: Cell, _bench: Bench) -> dict:
        """Facts that make a task the same measurement."""
        task = _task(cell.metric)
        return {
            "task": cell.metric.task,
            "task_version": task.VERSION,
            "documents_hash": documents_hash(task, cell.metric.limit),
            "lm_eval": importlib.metadata.version("lm_eval"),
        }

    def keeps(self, cells: Sequence[Cell]) -> Keeps:
        """The logits of a long example; of codes those of a variant at a time."""
        options = frozenset(("dtype", "device"))
        return super().keeps(cells)._replace(logits=LOGITS, block=EXAMPLE, options=options)

    def answer(self, bench: Bench, cells: Sequence[Cell], _part: slice, facts: dict) -> list[list[dict]]:
        """The results of the task."""
        (cell,) = cells
        cell.subject.load(bench, facts)
        tokenizer, tasks = bench.tokenizer(cell.subject), [_task(cell.metric)]
        with bench.under(cell.variant) as model:
            return [evaluate(model, tokenizer, tasks, cell.metric.limit, bench.bar.see)]

    def values(self, _cell: Cell, answers: list[list[dict]]) -> list[dict]:
        """A value a metric of the task."""
        return [
            {"metric": f"zeroshot.{result['metric']}", "unit": "1"}
            | {name: result[name] for name in ("value", "standard_error", "examples")}
            for result in answers[0]
        ]


def _task(metric: ZeroShot) -> "Task":
    """A task with its documents, loaded once as long as its files stay what they are; it can be evaluated again."""
    files = sorted(Path(metric.data).glob("*")) if metric.data else ()
    return _loaded(metric.task, metric.data, tuple(map(state_of, files)))


@functools.lru_cache(maxsize=8)
def _loaded(name: str, data: str | None, _files: tuple) -> "Task":
    (task,) = load_tasks([name], data)
    return task


ZEROSHOT = OfTasks()
