"""What a measurement is: data, and what one runner (`outliers.experiment.runner`) has to know to do the rest."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from transformers import PreTrainedModel

from outliers.measurements.bench import Bench, Job
from outliers.specification.kinds import Named
from outliers.tracing.result import Trace

Spec = TypeVar("Spec", bound=Named)

LAYERS = 2  # of the model by which a cost is found: how what is kept grows from one to the next shows only with two
FEATURE = 0  # stands there for outlier features that nobody knows yet


def _nothing(model: PreTrainedModel) -> PreTrainedModel:
    return model


class Part(NamedTuple):
    """A part of a measurement, by which its cost is found (`outliers.estimate`).

    each: what is done with every block, int64 (1, T), in any number of passes through the model. once: what is made of
    the model before, such as one under a scheme, at a cost for each layer. times: how many parts of the measurement
    cost the same as this one.
    """

    each: Callable[[PreTrainedModel, torch.Tensor], object]
    once: Callable[[PreTrainedModel], PreTrainedModel] = _nothing
    times: int = 1


Passes = list[list[Part]]  # the parts of each pass over the text; a streamed model reads its layers once a pass


class Workload(NamedTuple):
    """What the measurement of a model is made of, by which its cost is found.

    settings: dtype and device, and, as far as it has them, stream, memory, block and blocks. block, blocks: tokens of
    what a part is called with and how many of these there are, where they are not those of the settings. options: which
    of those fields the user may be told to change.
    """

    job: Job
    settings: Named
    passes: Passes
    block: int | None = None
    blocks: int | None = None
    options: tuple[str, ...] = ("dtype", "device", "block", "blocks", "stream", "memory")


@dataclass(frozen=True, eq=False)
class Question:
    """Rows that are found again, measured and written together.

    what: to call it in messages, beside its subject. asked: the fields that its rows have beyond those of their subject
    and what is measured. about: what the measurement wants to know of it, such as a scheme. metrics: what its rows are
    about when they are all there.
    """

    what: str
    asked: dict
    about: Any = None
    metrics: tuple[str, ...] = ()


class First(NamedTuple):
    """The trace of the text that a measurement needs before it can ask; kept: on disk, from where it goes on."""

    roles: tuple[str, ...]
    attention: bool
    kept: bool
    tokens: bool = False


class Measurement(ABC, Generic[Spec]):
    """Of a specification: its subjects, such as models with their text; what is asked of each; what answers.

    unit: what the bar counts. splits: whether a text can be measured in parts, on several machines. twins: whether
    subjects of equal weights are measured once. first: the trace that comes before. experiment: what its rows say that
    they are of, where it is not the specification's name.
    """

    unit = "block"
    splits = False
    twins = False
    first: First | None = None
    experiment: str | None = None

    def __init__(self, spec: Spec):
        self.spec = spec

    def subjects(self) -> list:
        """What is measured, each with a name, checked so that a mistake shows before anything is measured."""
        return [Job.of(name, self.spec.revision, self.spec) for name in self.spec.models]

    def workload(self, subject) -> Workload | None:
        """What the measurement of a subject is made of; None where nothing can be foreseen."""
        return None

    def total(self, subject) -> int:
        """How far a subject moves the bar, as far as that is known before it is looked at."""
        return 1

    def finished_share(self, rows: list[dict], subjects: list) -> float:
        """How much of it is finished, by the rows that are there."""
        return len({(row.get("model"), row.get("checkpoint")) for row in rows}) / len(subjects)

    def look(self, bench: Bench, subject) -> tuple[dict, Any]:
        """The fields that all rows of a subject have in common, for which it is loaded, and what `questions` needs."""
        return bench.load(subject, self.spec)[1], None

    @abstractmethod
    def questions(self, subject, facts: Any, trace: Trace | None) -> list[Question]:
        """What is asked of a subject, in the order of its rows. facts: what `look` has found."""

    def finished(self, question: Question, rows: list[dict], trace: Trace | None) -> list[dict]:
        """Of rows that were found those of a question, if they are all there; others may answer what is asked alike."""
        rows = [row for row in rows if row["metric"] in question.metrics] if question.metrics else rows
        return rows if self.is_whole(question, rows, trace) else []

    def is_whole(self, question: Question, rows: list[dict], trace: Trace | None) -> bool:
        """Whether rows that were found are all of a question."""
        return {row["metric"] for row in rows} == set(question.metrics)

    def together(self, questions: list[Question]) -> list[list[Question]]:
        """Questions that are answered at once, as much as one pass over the text, or over the layers, has in common."""
        return [[question] for question in questions]

    def steps(self, questions: Sequence[Question]) -> int:
        """How far the answers to some questions, which are given at once, move the bar."""
        return len(questions)

    @abstractmethod
    def answer(self, bench: Bench, subject, questions: list[Question], part: slice, fields: dict) -> list:
        """What is measured of a part of the text for each question; it travels between machines.

        fields: of the subject, of which a model that is loaded for this must have the weights.
        """

    @abstractmethod
    def rows(self, question: Question, answers: list, trace: Trace | None) -> list[dict]:
        """What each row of a question adds to what was asked, from the answers of all parts in their order."""
