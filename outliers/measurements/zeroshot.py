"""Zero-shot accuracy: models × schemes × tasks (Figure 1)."""

import importlib.metadata
from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from outliers.measurements.bench import (
    Bench,
    Job,
    check_machine,
    check_schemes,
    check_uncalibrated,
    left_fields,
    say_what_is_left,
)
from outliers.measurements.harness import STANDARD_ERRORS, documents_hash, evaluate, load_tasks
from outliers.measurements.measurement import Measurement, Question
from outliers.metrics.measurement import Keeps, each_alone
from outliers.models.load import load_config, load_tokenizer
from outliers.quantization.schemes import Scheme
from outliers.specification.kinds import ZeroShot, schemes_of
from outliers.variants.quantized import Quantized

if TYPE_CHECKING:
    from lm_eval.api.task import Task

_loaded: "dict[tuple, Task]" = {}  # of this process, by name, folder of the data and hash of the documents
EXAMPLE = 512  # tokens of a long example of a task
LOGITS = 3  # of all its tokens: in the model's dtype, in float32 and normalized


class ZeroShotRows(Measurement[ZeroShot]):
    """One row a model, scheme, task and metric.

    Names, tokenizers and tasks are checked for all models before the first one is measured. One load of a model serves
    all its schemes, and one quantization of its weights all schemes that share it.
    """

    unit = "task"

    def subjects(self) -> list[Job]:
        spec = self.spec
        check_machine(spec)
        self.schemes = schemes_of(spec)
        check_uncalibrated(self.schemes)
        jobs = [Job(name, spec.revision, load_config(name, spec.revision)) for name in spec.models]
        for job in jobs:
            check_schemes(job.config, self.schemes, spec.skip)
            say_what_is_left(job.name, job.config, self.schemes)
            load_tokenizer(job.model, job.revision)
        self.tasks = {}
        for task in load_tasks(spec.tasks, spec.data):
            metrics = tuple(f"zeroshot.{metric}" for metric in STANDARD_ERRORS if metric in task.aggregation())
            self.tasks[task.task_name] = self._asked(task), metrics
            _loaded[self._key(task.task_name)] = task
        return jobs

    def _asked(self, task: "Task") -> dict:
        """What makes a task the same measurement; the limit is there also where it is none, to tell it from one."""
        return {
            "task": task.task_name,
            "task_version": task.VERSION,
            "documents_hash": documents_hash(task, self.spec.limit),
            "limit": self.spec.limit,
            "lm_eval": importlib.metadata.version("lm_eval"),
        }

    def _key(self, name: str) -> tuple:
        return name, self.spec.data, self.tasks[name][0]["documents_hash"]

    def _task(self, name: str) -> "Task":
        """A task with its documents, which each process loads once."""
        if self._key(name) not in _loaded:
            (_loaded[self._key(name)],) = load_tasks([name], self.spec.data)
        return _loaded[self._key(name)]

    def keeps(self, _job: Job) -> Keeps:
        return Keeps(each_alone(self.schemes), logits=LOGITS, block=EXAMPLE, options=frozenset(("dtype", "device")))

    def total(self, _job: Job) -> int:
        return len(self.schemes) * len(self.tasks)

    def look(self, bench: Bench, job: Job) -> tuple[dict, dict]:
        model, fields = bench.load(job, self.spec)
        return fields, {scheme.name: self._said(scheme, model) for scheme in self.schemes}

    def _said(self, scheme: Scheme, model: PreTrainedModel) -> dict:
        """The settings of a scheme, its name among them, which kernels run it, and what of a model it leaves."""
        left = left_fields(model, model.num_parameters()) if scheme.quantizes else {}
        return Quantized(scheme, tuple(self.spec.skip)).fields(model) | left

    def questions(self, _job: Job, facts: dict) -> list[Question]:
        return [
            Question(f"{scheme.name} {name}", {**facts[scheme.name], **asked}, (scheme, name), metrics)
            for scheme in self.schemes
            for name, (asked, metrics) in self.tasks.items()
        ]

    def answer(self, bench: Bench, job: Job, question: Question, fields: dict) -> list[dict]:
        bench.load(job, self.spec, fields)
        scheme, name = question.about
        model = bench.quantized(scheme, self.spec.skip)  # shares all codes if the task before was under this scheme
        tokenizer = load_tokenizer(job.model, job.revision)
        return evaluate(model, tokenizer, [self._task(name)], self.spec.limit, bench.bar.see)

    def rows(self, _question: Question, answer: list[dict]) -> list[dict]:
        return [result | {"metric": f"zeroshot.{result['metric']}", "unit": "1"} for result in answer]
