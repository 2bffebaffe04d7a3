"""Run any experiment: its subjects to rows, going on where an earlier run stopped, here or on a cluster."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outliers.errors import UserError
from outliers.experiment.cell import Cell
from outliers.experiment.engine import Engine, engine_of
from outliers.experiment.forecast import request_of
from outliers.experiment.place import check_alone, place_of
from outliers.experiment.provenance import environment, joined, measuring
from outliers.experiment.rows import RowFile
from outliers.measurements.bench import Bench, check_same_weights, named
from outliers.measurements.latency import LatencyRows
from outliers.measurements.linear_layers import LinearLayerRows
from outliers.measurements.measurement import Measurement, Question
from outliers.measurements.memory import MemoryRows
from outliers.measurements.training.measurement import TrainingRows
from outliers.measurements.zeroshot import ZeroShotRows
from outliers.models.names import full_name
from outliers.specification import kinds
from outliers.specification.kinds import Named, OfOneModel
from outliers.specification.recipe import Training
from outliers.terminal.progress import Progress

MEASUREMENTS: dict[type[Named], type[Measurement]] = {
    kinds.ZeroShot: ZeroShotRows,
    kinds.Latency: LatencyRows,
    kinds.LinearLayers: LinearLayerRows,
    kinds.Memory: MemoryRows,
    Training: TrainingRows,
}
OF_TWINS = ("architecture", "parameters", "tokens_hash")  # what models of the same weights have in common


def run(spec: Named, out: str | Path | None = None, force: bool = False) -> list[dict]:
    """Measure what a specification asks for.

    Each finished row is on disk before the next one starts; rows found there are used again. Names, texts and sizes are
    checked for all subjects before the first one is measured. On a cluster a text may be measured in parts on several
    machines; its rows are written when the last part is there.

    Args:
        spec: what to run.
        out: folder for `rows.jsonl`, and for a trace that is kept; by default that of the specification, see
            `outliers.experiment.place.place_of`.
        force: measure again what is finished.

    Returns:
        The rows, subject by subject, in the order of what is asked.

    Raises:
        UserError: something in the specification is unknown, unreachable or does not fit together; a model computes no
            numbers; the folder holds results of another model, where its tables are those of one; or cells failed on a
            cluster.
    """
    measurement = MEASUREMENTS[type(spec)](spec)
    subjects = measurement.subjects()
    alone = isinstance(spec, OfOneModel)
    row_file = RowFile(place_of(spec, out) if alone else Path(out or spec.folder))
    total = sum(map(measurement.total, subjects))
    with row_file, Progress(total, measurement.unit) as bar, engine_of(spec, bar) as engine:
        if alone:
            check_alone(spec, row_file.folder)  # another run may have ended there
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
        others = [*(fields for fields, _ in looked.values()), *(one.fields for one in self.subjects)]
        asked = [self._asked(group[number], *looked[number], others) for number in sorted(looked)]
        self.subjects += asked
        self._measure(asked)
        if failed:
            raise failed

    def _measure(self, asked: list[_Subject]) -> None:
        together = self.measurement.together
        bundles = [(one, some) for one in asked for some in together(self._without_twins(one)) if some]
        parts = self._parts(len(bundles))
        cells = [self._cell(number, *bundle, part) for number, bundle in enumerate(bundles) for part in parts]
        arrived = defaultdict(dict)
        for cell, answer in self.engine.run(cells):
            of_parts = arrived[cell.number]
            of_parts[cell.arguments[2].start] = answer
            if len(of_parts) == len(parts):
                self._write(*bundles[cell.number], [of_parts[part.start] for part in parts])
        self._copy_twins(asked)

    def _asked(self, subject: Any, fields: dict, facts: Any, others: list[dict]) -> _Subject:
        """What is asked of a subject, with the rows that are finished."""
        measurement = self.measurement
        if fields.get("streamed") and self._weights_matter(fields, others):
            ((_, weights),) = self.engine.run([Cell("its weights", _weights, subject, (measurement,), 0)])
            fields |= weights
        questions = measurement.questions(subject, facts, None)
        rows = [self._found(question, fields) for question in questions]
        one = _Subject(subject, fields, questions, rows)
        every, left = (self._steps(some) for some in (questions, one.missing))
        self.bar.total += every - measurement.total(subject)
        self.bar.skip(every - left)
        return one

    def _steps(self, questions: list[Question]) -> int:
        return sum(map(self.measurement.steps, filter(None, self.measurement.together(questions))))

    def _found(self, question: Question, fields: dict) -> list[dict]:
        """The rows of a question if they are finished."""
        rows = [] if self.force else self.row_file.find_all(fields | question.asked)
        return rows and self.measurement.finished(question, rows, None)

    def _weights_matter(self, fields: dict, others: list[dict]) -> bool:
        """Whether something follows from the weights of a streamed model, which are known after its first pass, before
        it is measured: there may be rows of them, or another model that has the same."""
        twins = [other for other in others if all(other[field] == fields[field] for field in OF_TWINS)]
        if self.measurement.twins and len(twins) > 1:
            return True
        return not self.force and self.row_file.may_have(fields)

    def _parts(self, bundles: int) -> list[slice]:
        """How the text is cut for so many sets of questions."""
        blocks = getattr(self.spec, "blocks", 1)
        return self.engine.parts(blocks, bundles) if self.measurement.splits else [slice(0, blocks)]

    def _cell(self, number: int, one: _Subject, questions: list[Question], part: slice) -> Cell:
        where = f", blocks {part.start} to {part.stop - 1}" if self.measurement.splits else ""
        share = (part.stop - part.start) / getattr(self.spec, "blocks", 1)
        steps = round(self.measurement.steps(questions) * share)
        arguments = self.measurement, questions, part, one.fields
        what = ", ".join(dict.fromkeys(question.what for question in questions))
        return Cell(f"{what}{where}", _answer, one.subject, arguments, steps, number)

    def _write(self, one: _Subject, questions: list[Question], parts: list[tuple]) -> None:
        """Write the rows of questions that were answered together, of all parts of the text."""
        answers, weights, spent = zip(*parts, strict=True)
        check_same_weights([*(one.fields | of_part for of_part in weights), weights[0] | one.fields])
        one.fields.update(weights[0])
        common, made = one.fields, joined(list(spent))
        new = []
        for number, question in enumerate(questions):
            schemes = [question.asked["scheme"]] if "scheme" in question.asked else []
            with named(common.get("model", ""), *schemes):
                found = self.measurement.rows(question, [of_part[number] for of_part in answers], None)
            rows = [common | question.asked | row | made for row in found]
            one.rows[one.questions.index(question)] = rows
            new += rows
        self.row_file.add(*new)

    def _without_twins(self, one: _Subject) -> list[Question]:
        """What is missing of a subject and of none that comes before with the same weights."""
        return [] if self._twins(one) else one.missing

    def _twins(self, one: _Subject) -> list[_Subject]:
        """The subjects that come before with the same weights and tokens, where these are measured once."""
        before = self.subjects[: self.subjects.index(one)] if self.measurement.twins else []
        return [other for other in before if _hashes(other.fields) == _hashes(one.fields)]

    def _copy_twins(self, asked: list[_Subject]) -> None:
        """Write for subjects with the weights of another what was measured of that."""
        for one in asked:
            if not one.missing:
                continue
            twin = self._twins(one)[0]
            same = {"same_weights_as": full_name(twin.fields["model"], twin.fields.get("checkpoint"))}
            one.rows[:] = [[row | one.fields | same for row in rows] for rows in twin.rows]
            self.row_file.add(*(row for rows in one.rows for row in rows))
            self.bar.skip(self._steps(one.questions))


def _hashes(fields: dict) -> tuple[str, str]:
    """What makes two models the same: weights and tokens. Of weights that are not known, no other has the same."""
    return fields.get("weights_hash") or full_name(fields["model"], fields.get("checkpoint")), fields["tokens_hash"]


def _look(bench: Bench, subject: Any, measurement: Measurement) -> tuple[dict, Any]:
    fields, facts = measurement.look(bench, subject)
    name = measurement.experiment or measurement.spec.name
    return {"experiment": name, **fields, **environment(_device(measurement))}, facts


def _device(measurement: Measurement) -> str:
    return getattr(measurement.spec, "device", "meta")


def _weights(bench: Bench, subject: Any, measurement: Measurement) -> dict:
    measurement.look(bench, subject)
    return bench.weights()


def _answer(
    bench: Bench, subject: Any, measurement: Measurement, questions: list[Question], part: slice, fields: dict
) -> tuple[list, dict, dict]:
    """The answers to some questions, of which weights they are, and where they were made at what cost."""
    with measuring(_device(measurement)) as spent:
        answers = measurement.answer(bench, subject, questions, part, fields)
        weights = bench.weights()
    return answers, weights, spent.fields
