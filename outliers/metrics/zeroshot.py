"""Zero-shot accuracy by the language model evaluation harness (Figure 1)."""

import contextlib
import copy
import difflib
import functools
import hashlib
import importlib.metadata
import io
import itertools
import json
import logging
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outliers.errors import UserError, unknown_name
from outliers.metrics.measurement import Measurement, MemoryNeeds
from outliers.metrics.records import ZeroShotMetric
from outliers.models.decoder import inference
from outliers.models.weight_files import state_of
from outliers.show import units
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache
from outliers.text.documents import check_data_set
from outliers.text.task_data import FIGURE1_TASKS, FOLDER, LOCAL_TASKS, no_data

if TYPE_CHECKING:
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager


def _error_of_mean(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def _error_of_perplexity(log_likelihoods: Sequence[float]) -> float:
    """Return the standard error by the delta method: the derivative of exp(−mean) times the error of the mean."""
    return math.exp(-statistics.fmean(log_likelihoods)) * _error_of_mean(log_likelihoods)


# The standard error of each reported metric, from the values of the examples.
STANDARD_ERRORS = {"acc": _error_of_mean, "acc_norm": _error_of_mean, "perplexity": _error_of_perplexity}


def zeroshot(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    data: str | Path | None = None,
    limit: int | None = None,
) -> list[dict]:
    """Measure a model, quantized or not, on tasks of the harness without examples in the prompt.

    Args:
        model: a causal language model, on its device and in its dtype.
        tokenizer: the model's tokenizer.
        tasks: names of the harness, or `lambada-local` and `piqa-local`, which read local files.
        data: the folder of those files; None for the first 200 examples of each, which are included.
        limit: number of examples from the start of each task; None for all.

    Returns:
        One result per task and metric (`acc`, `acc_norm`, `perplexity`): task, task_version, metric, value,
        standard_error (None for a single example), examples, and by_example: the value of each example, for a
        perplexity the log-likelihood.

    Raises:
        UserError: the harness is not installed; a task is unknown, has none of these metrics, or its data cannot be
            reached; log-likelihoods are NaN or inf.
    """
    return evaluate(model, tokenizer, load_tasks(tasks, data), limit)


def load_tasks(names: Sequence[str], data: str | Path | None = None) -> "list[Task]":
    """Load tasks of the harness with their documents; they can be evaluated any number of times.

    Raises:
        UserError: as for `zeroshot`.
    """
    _need_harness()
    from lm_eval.tasks import TaskManager

    metadata = {} if data is None else {"data": str(data)}
    with _quiet():
        local = TaskManager(include_path=FOLDER, include_defaults=False, metadata=metadata)
        return [_load_task(name, local if name in LOCAL_TASKS else _tasks_of_the_harness()) for name in names]


@functools.cache
def _tasks_of_the_harness() -> "TaskManager":
    """Return the harness's index, which takes seconds to build: it reads some 15 000 files."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def _need_harness() -> None:
    try:
        import lm_eval.models.huggingface  # noqa: F401
    except ImportError as error:
        raise UserError(f"zero-shot tasks need '{error.name}'; pip install 'outliers[zeroshot]'") from None


def _load_task(name: str, manager: "TaskManager") -> "Task":
    if name not in manager.all_subtasks:
        known = [*LOCAL_TASKS, *manager.all_subtasks]
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        raise unknown_name("task", name, near or (*FIGURE1_TASKS, *LOCAL_TASKS), "(or another task of lm-eval)")
    source = (manager.task_index[name].cfg or {}).get("dataset_path")
    try:
        if source and "/" in source and not Path(source).exists():
            check_data_set(source)
        task = manager.load(name)["tasks"][name]
    except UserError:
        raise
    except Exception as error:  # each version of the hub's client raises its HTTP library's own errors
        raise no_data(name, source, error) from None
    if not set(task.aggregation()) & set(STANDARD_ERRORS):
        raise UserError(
            f"task '{name}' reports {', '.join(task.aggregation())}; expected a task with {', '.join(STANDARD_ERRORS)}"
        )
    task.set_config(key="num_fewshot", value=0)
    return task


def documents_hash(task: "Task", limit: int | None = None) -> str:
    """Return the SHA-256 of the documents of a task that are evaluated: 16 hexadecimal digits."""
    digest = hashlib.sha256()
    for document in itertools.islice(task.eval_docs, limit):
        digest.update(json.dumps(document, sort_keys=True, default=str).encode())
    return digest.hexdigest()[:16]


@inference
def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: "Sequence[Task]",
    limit: int | None = None,
    set_share: Callable[[float], None] = lambda share: None,
) -> list[dict]:
    """Measure a model on loaded tasks.

    Sequences pass through the model one at a time: schemes with one scale or one outlier set for a whole batch would
    otherwise depend on the batch size, and on the padding. Logits of 16-bit models are normalized in float32, as for
    `perplexity`: bfloat16 could not distinguish choices of nearly the same likelihood.

    set_share: called after each pass through the model with a lower bound of the completed share of the running task's
    requests.

    Returns:
        As `zeroshot`.

    Raises:
        UserError: log-likelihoods are NaN or inf, or a continuation is longer than the model's context.
    """
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    with _quiet():
        harness_model = HFLM(**harness_arguments(model, tokenizer))
        by_name = {task.task_name: task for task in tasks}
        try:
            with _with_progress(harness_model, model, set_share):
                results = lm_eval.evaluate(harness_model, {"tasks": by_name}, limit=limit, bootstrap_iters=0)
        except OverflowError:  # the exponential of a loss
            raise UserError(
                f"the perplexity of this model on {' or '.join(by_name)} is larger than any number; expected a model "
                "that predicts: check its weights and dtype"
            ) from None
        except AssertionError:  # how the harness refuses an example; its context alone it would shorten
            raise UserError(
                f"the continuation of an example of {' or '.join(by_name)} is empty or longer than the model's "
                f"context of {harness_model.max_length} tokens; use another model, or fewer examples (--limit)"
            ) from None
    return [result for task in tasks for result in _results(task, results)]


def harness_arguments(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Return the arguments of lm-eval's `HFLM`, which wraps a model and its tokenizer."""
    copied = copy.deepcopy(tokenizer)  # a copy, because the harness adds a padding token if there is none
    return {"pretrained": model, "tokenizer": copied, "batch_size": 1, "softmax_dtype": "float32"}


@contextlib.contextmanager
def _with_progress(harness_model, model: PreTrainedModel, set_share: Callable[[float], None]) -> Iterator[None]:
    """Report progress by counting the passes through a model, at most one per request."""
    answer, requested, made = harness_model.loglikelihood, 0, itertools.count(1)

    def loglikelihood(requests: list, *arguments, **options):
        nonlocal requested, made
        requested, made = len(requests), itertools.count(1)
        return answer(requests, *arguments, **options)

    harness_model.loglikelihood = loglikelihood
    handle = model.register_forward_hook(lambda *_: set_share(next(made) / max(requested, 1)))
    try:
        yield
    finally:
        handle.remove()


def _results(task: "Task", results: dict) -> Iterator[dict]:
    """Yield the results of a task; standard errors are this project's, as those of the harness draw random samples."""
    name = task.task_name
    samples = results["samples"][name]
    for sample in samples:
        for response, *_ in sample["filtered_resps"]:
            if not math.isfinite(response):
                raise UserError(
                    f"NaN or inf in the log-likelihoods of task '{name}', example {sample['doc_id']}; expected finite "
                    "numbers: try another dtype (float32, bfloat16) or check the weights"
                )
    for metric, error in STANDARD_ERRORS.items():
        if metric in task.aggregation():
            yield {
                "task": name,
                "task_version": task.VERSION,
                "metric": metric,
                "value": results["results"][name][f"{metric},none"],
                "standard_error": error([sample[metric] for sample in samples]) if len(samples) > 1 else None,
                "examples": len(samples),
                "by_example": [sample[metric] for sample in samples],
            }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the harness's log and, unless standard error is a terminal, its progress bars."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)


EXAMPLE = 512  # tokens of a long example
LOGITS = 3  # matrices of logits: in the model's dtype, in float32 and normalized


class ZeroShotMeasurement(Measurement):
    """The measurement of zero-shot tasks, one at a time."""

    unit = "task"
    splits = False

    def check(self, cell: Cell) -> None:
        """Load the task.

        Raises:
            UserError: the model is streamed; as `load_tasks`.
        """
        if cell.subject.experiment.stream:
            raise UserError("zero-shot tasks of a streamed model; expected one in memory: leave --stream out")
        _task(cell.metric)

    def provenance(self, cell: Cell, _model_cache: ModelCache) -> dict:
        task = _task(cell.metric)
        return {
            "task": cell.metric.task,
            "task_version": task.VERSION,
            "documents_hash": documents_hash(task, cell.metric.limit),
            "lm_eval": importlib.metadata.version("lm_eval"),
        }

    def memory_needs(self, cells: Sequence[Cell]) -> MemoryNeeds:
        """Forecast the logits of a long example, and the codes of one variant at a time."""
        options = frozenset(("dtype", "device"))
        return super().memory_needs(cells)._replace(logit_matrices=LOGITS, block=EXAMPLE, options=options)

    def measure(
        self, model_cache: ModelCache, cells: Sequence[Cell], _part: slice, provenance: dict
    ) -> list[list[dict]]:
        (cell,) = cells
        cell.subject.load(model_cache, provenance)
        tokenizer, tasks = cell.subject.preprocessor, [_task(cell.metric)]
        with model_cache.under(cell.variant) as model:
            return [evaluate(model, tokenizer, tasks, cell.metric.limit, model_cache.bar.set_share)]

    def values(self, _cell: Cell, results: list[list[dict]]) -> list[dict]:
        return [
            {"metric": f"zeroshot.{result['metric']}", "unit": "1"}
            | _units(result)
            | {name: result[name] for name in ("value", "standard_error", "examples")}
            for result in results[0]
        ]


def _units(result: dict) -> dict:
    """Return the questions of a result as units of the text: the loss of each if the metric is a perplexity."""
    sign = -1 if result["metric"] == "perplexity" else 1
    return units.fields([[(sign * value, 1) for value in result["by_example"]]])


def _task(metric: ZeroShotMetric) -> "Task":
    """Return a task with its documents, cached as long as its files do not change."""
    files = sorted(Path(metric.data).glob("*")) if metric.data else ()
    return _loaded(metric.task, metric.data, tuple(map(state_of, files)))


@functools.lru_cache(maxsize=8)
def _loaded(name: str, data: str | None, _files: tuple) -> "Task":
    (task,) = load_tasks([name], data)
    return task


MEASUREMENT = ZeroShotMeasurement()
