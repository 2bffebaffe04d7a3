"""What a measurement is: data, and what one runner (`outliers.experiment.runner`) has to know to do the rest."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from outliers.measurements.bench import Bench, Job
from outliers.metrics.measurement import Keeps
from outliers.specification.kinds import Named
from outliers.tracing.result import Trace

Spec = TypeVar("Spec", bound=Named)


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

    def keeps(self, subject) -> Keeps | None:
        """What the measurement of a subject keeps in memory; None where no model is measured."""
        return None

    def total(self, subject) -> int:
        """How far a subject moves the bar, as far as that is known before it is looked at."""
        return 1

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
