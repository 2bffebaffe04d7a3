"""What is measured but is no cell yet: what its runner (`outliers.experiment.runner`) has to know to do the rest."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from outliers.measurements.bench import Bench
from outliers.metrics.measurement import Keeps
from outliers.specification.kinds import Named

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


class Measurement(ABC, Generic[Spec]):
    """Of a specification: its subjects, such as models with their text; what is asked of each; what answers.

    unit: what the bar counts. experiment: what its rows say that they are of, where it is not the specification's name.
    """

    unit: str
    experiment: str | None = None

    def __init__(self, spec: Spec):
        self.spec = spec

    @abstractmethod
    def subjects(self) -> list:
        """What is measured, each with a name, checked so that a mistake shows before anything is measured."""

    def keeps(self, subject) -> Keeps | None:
        """What the measurement of a subject keeps in memory; None where no model is measured."""
        return None

    def total(self, subject) -> int:
        """How far a subject moves the bar, as far as that is known before it is looked at."""
        return 1

    @abstractmethod
    def look(self, bench: Bench, subject) -> tuple[dict, Any]:
        """The fields that all rows of a subject have in common, for which it is loaded, and what `questions` needs."""

    @abstractmethod
    def questions(self, subject, facts: Any) -> list[Question]:
        """What is asked of a subject, in the order of its rows. facts: what `look` has found."""

    def finished(self, question: Question, rows: list[dict]) -> list[dict]:
        """Of rows that were found those of a question, if they are all there; others may answer what is asked alike."""
        rows = [row for row in rows if row["metric"] in question.metrics] if question.metrics else rows
        return rows if self.is_whole(question, rows) else []

    def is_whole(self, question: Question, rows: list[dict]) -> bool:
        """Whether rows that were found are all of a question."""
        return {row["metric"] for row in rows} == set(question.metrics)

    def steps(self, question: Question) -> int:
        """How far the answer to a question moves the bar."""
        return 1

    @abstractmethod
    def answer(self, bench: Bench, subject, question: Question, fields: dict) -> Any:
        """What is measured for a question; it travels between machines.

        fields: of the subject, of which a model that is loaded for this must have the weights.
        """

    @abstractmethod
    def rows(self, question: Question, answer: Any) -> list[dict]:
        """What each row of a question adds to what was asked."""
