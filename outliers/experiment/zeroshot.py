"""Zero-shot accuracy: models × schemes × tasks to rows, going on where an earlier run stopped."""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from outliers.experiment.interrupt import stop_if_asked
from outliers.experiment.job import check_kernels, describe_model, say_what_is_left
from outliers.experiment.provenance import measuring
from outliers.experiment.rows import RowFile
from outliers.experiment.sweep import scheme_fields, schemes_of
from outliers.measurements.harness import STANDARD_ERRORS, documents_hash, evaluate, load_tasks
from outliers.models.load import load_config, load_model, load_tokenizer
from outliers.quantization.convert import quantize
from outliers.specification.kinds import ZeroShot
from outliers.terminal.progress import Progress

if TYPE_CHECKING:
    from lm_eval.api.task import Task


def measure_zeroshot(spec: ZeroShot, out: str | Path | None = None, force: bool = False) -> list[dict]:
    """Measure every model under every scheme on every task (Figure 1).

    The rows of a task are on disk before the next one starts; rows found there are used again. Names, tokenizers and
    tasks are checked for all models before the first one is measured.

    Args:
        spec: what to run.
        out: folder for `rows.jsonl`; by default `results/<name>`.
        force: measure again what is finished.

    Returns:
        One row a model, scheme, task and metric, model by model.

    Raises:
        UserError: something is unknown, unreachable or does not fit together.
    """
    check_kernels(spec)
    schemes = schemes_of(spec)
    for name in spec.models:
        say_what_is_left(name, load_config(name, spec.revision), schemes)
    tokenizers = {name: load_tokenizer(name, spec.revision) for name in spec.models}
    tasks = load_tasks(spec.tasks, spec.data)
    total = len(tokenizers) * len(spec.schemes) * len(tasks)
    with RowFile(Path(out or spec.folder)) as row_file, Progress(total, "task") as bar:
        return [
            row
            for name, tokenizer in tokenizers.items()
            for row in _measure(name, tokenizer, tasks, spec, row_file, force, bar)
        ]


def _measure(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    tasks: "list[Task]",
    spec: ZeroShot,
    row_file: RowFile,
    force: bool,
    bar: Progress,
) -> Iterator[dict]:
    """One load of the model serves all its schemes, and one quantization of its weights all schemes that share it."""
    bar.set_description(name)
    model = load_model(name, spec.dtype, spec.device, spec.revision)
    config = load_config(name, spec.revision)
    common = {"experiment": spec.name, **describe_model(name, spec.revision, config, model, spec)}
    common["lm_eval"] = importlib.metadata.version("lm_eval")
    for scheme in schemes_of(spec):
        for task in tasks:
            bar.set_description(f"{name} {scheme.name} {task.task_name}")
            cell = {**common, "scheme": scheme.name, **scheme_fields(scheme, model), **_task_fields(task, spec)}
            rows = [] if force else row_file.find_all(cell)
            expected = {f"zeroshot.{metric}" for metric in STANDARD_ERRORS if metric in task.aggregation()}
            if expected == {row["metric"] for row in rows}:
                bar.skip(1)
            else:
                stop_if_asked()
                with measuring(spec.device) as spent:
                    model = quantize(model, scheme)  # shares all codes if the task before was under this scheme
                    results = evaluate(model, tokenizer, [task], spec.limit, bar.see)
                rows = [
                    cell | result | {"metric": f"zeroshot.{result['metric']}", "unit": "1"} | spent.fields
                    for result in results
                ]
                row_file.add(*rows)
                bar.update()
            yield from rows


def _task_fields(task: "Task", spec: ZeroShot) -> dict:
    """What makes a task the same measurement; the limit is there also where it is none, to tell it from one."""
    return {
        "task": task.task_name,
        "task_version": task.VERSION,
        "documents_hash": documents_hash(task, spec.limit),
        "limit": spec.limit,
    }
