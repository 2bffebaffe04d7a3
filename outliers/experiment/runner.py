"""Run what is not of cells yet: its subjects to rows, going on where an earlier run stopped, here or on a cluster."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outliers.errors import UserError
from outliers.experiment.cell import Cell
from outliers.experiment.engine import Engine, engine_of
from outliers.experiment.forecast import request_of
from outliers.experiment.provenance import environment, measuring
from outliers.experiment.rows import RowFile
from outliers.measurements.bench import Bench, check_same_weights, named
from outliers.measurements.latency import LatencyRows
from outliers.measurements.linear_layers import LinearLayerRows
from outliers.measurements.measurement import Measurement, Question
from outliers.measurements.memory import MemoryRows
from outliers.measurements.training.measurement import TrainingRows
from outliers.measurements.zeroshot import ZeroShotRows
from outliers.specification import kinds
from outliers.specification.kinds import Named
from outliers.specification.recipe import Training
from outliers.terminal.progress import Progress

MEASUREMENTS: dict[type[Named], type[Measurement]] = {
    kinds.ZeroShot: ZeroShotRows,
    kinds.Latency: LatencyRows,
    kinds.LinearLayers: LinearLayerRows,
    kinds.Memory: MemoryRows,
    Training: TrainingRows,
}


def run(spec: Named, out: str | Path | None = None, force: bool = False) -> list[dict]:
    """As `outliers.runs.run.run`, of a specification that has no plans."""
    measurement = MEASUREMENTS[type(spec)](spec)
    subjects = measurement.subjects()
    row_file, total = RowFile(Path(out or spec.folder)), sum(map(measurement.total, subjects))
    with row_file, Progress(total, measurement.unit) as bar, engine_of(spec, bar) as engine:
        one = _Run(measurement, engine, row_file, bar, force)
        one.forecast(subjects)
        for group in engine.groups(subjects):
            one.measure(group)
    return [row for subject in one.subjects for rows in subject.rows for row in rows]


@dataclass(eq=False)
class _Subject:
    """A subject with what is asked of it, and the rows of each question; none of what is not finished.

    fields: what all its rows have.
    """

    subject: Any
    fields: dict
    questions: list[Question]
    rows: list[list[dict]]

    @property
    def missing(self) -> list[Question]:
        """The questions that have no rows."""
        return [question for question, rows in zip(self.questions, self.rows, strict=True) if not rows]


class _Run:
    """One run of a measurement."""

    def __init__(self, measurement: Measurement, engine: Engine, row_file: RowFile, bar: Progress, force: bool):
        self.measurement, self.spec, self.engine = measurement, measurement.spec, engine
        self.row_file, self.bar, self.force = row_file, bar, force
        self.subjects: list[_Subject] = []

    def forecast(self, subjects: list) -> None:
        """Refuse what cannot fit."""
        kept = [(subject, keeps) for subject in subjects if (keeps := self.measurement.keeps(subject))]
        if kept:
            self.engine.forecast([request_of(subject, self.spec, keeps) for subject, keeps in kept])

    def measure(self, group: list) -> None:
        """Measure what is not finished of some subjects; where some cannot be loaded, the others are measured first."""
        looks = [Cell("its fields", _look, one, (self.measurement,), 0, number) for number, one in enumerate(group)]
        looked, failed = {}, None
        try:
            for cell, found in self.engine.run(looks):
                looked[cell.number] = found
        except UserError as error:
            failed = error
        asked = [self._asked(group[number], *looked[number]) for number in sorted(looked)]
        self.subjects += asked
        missing = [(one, question) for one in asked for question in one.missing]
        cells = [self._cell(number, *pair) for number, pair in enumerate(missing)]
        for cell, answer in self.engine.run(cells):
            self._write(*missing[cell.number], *answer)
        if failed:
            raise failed

    def _asked(self, subject: Any, fields: dict, facts: Any) -> _Subject:
        """What is asked of a subject, with the rows that are finished."""
        questions = self.measurement.questions(subject, facts)
        one = _Subject(subject, fields, questions, [self._found(question, fields) for question in questions])
        every, left = (sum(map(self.measurement.steps, some)) for some in (questions, one.missing))
        self.bar.total += every - self.measurement.total(subject)
        self.bar.skip(every - left)
        return one

    def _found(self, question: Question, fields: dict) -> list[dict]:
        """The rows of a question if they are finished."""
        rows = [] if self.force else self.row_file.find_all(fields | question.asked)
        return rows and self.measurement.finished(question, rows)

    def _cell(self, number: int, one: _Subject, question: Question) -> Cell:
        arguments = self.measurement, question, one.fields
        return Cell(question.what, _answer, one.subject, arguments, self.measurement.steps(question), number)

    def _write(self, one: _Subject, question: Question, answer: Any, weights: dict, made: dict) -> None:
        """Write the rows of a question that was answered."""
        check_same_weights([one.fields | weights, weights | one.fields])
        scheme = [question.asked["scheme"]] if "scheme" in question.asked else []
        with named(one.fields.get("model", ""), *scheme):
            found = self.measurement.rows(question, answer)
        rows = [one.fields | question.asked | row | made for row in found]
        one.rows[one.questions.index(question)] = rows
        self.row_file.add(*rows)


def _look(bench: Bench, subject: Any, measurement: Measurement) -> tuple[dict, Any]:
    fields, facts = measurement.look(bench, subject)
    name = measurement.experiment or measurement.spec.name
    return {"experiment": name, **fields, **environment(_device(measurement))}, facts


def _device(measurement: Measurement) -> str:
    return getattr(measurement.spec, "device", "meta")


def _answer(
    bench: Bench, subject: Any, measurement: Measurement, question: Question, fields: dict
) -> tuple[Any, dict, dict]:
    """The answer to a question, of which weights it is, and where it was made at what cost."""
    with measuring(_device(measurement)) as spent:
        answer = measurement.answer(bench, subject, question, fields)
        weights = bench.weights()
    return answer, weights, spent.fields
