"""The planner: which cells have rows, which are measured together and on which machine, and what becomes of answers."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from outliers.errors import UserError
from outliers.metrics.measurement import Keeps, bundles_of
from outliers.models.names import full_name
from outliers.runs.engine import Engine
from outliers.runs.forecast import request_of
from outliers.runs.rows import Row, Rows
from outliers.subjects.bench import Bench, check_same_weights, naming
from outliers.subjects.cell import Cell, Plan, Subject, Task, following
from outliers.subjects.provenance import environment, joined, measuring
from outliers.terminal.interrupt import stop_if_asked
from outliers.terminal.progress import Progress

OF_TWINS = ("architecture", "parameters", "tokens_hash")  # facts that models of the same weights have in common
NAMED = 12  # cells that are measured together in the name of their task, more are counted
# Of what `environment` says: the code is a fact of each row, and where it ran one of times.
CODE, MACHINE = "code", ("device_name", "threads", "python", "torch", "triton", "bitsandbytes")


class Planner:
    """One run of plans.

    experiment: what its rows say that they were made for. force: measure again what has rows.
    """

    def __init__(self, rows: Rows, engine: Engine, bar: Progress, experiment: str, force: bool = False):
        self.rows, self.engine, self.bar, self.experiment, self.force = rows, engine, bar, experiment, force
        self.subjects: dict[tuple, Subject] = {}  # the first of those that may have the same weights
        self.known: dict[str, Row] = {}  # of this run, by what other names of the same weights have in common

    def run(self, plans: Sequence[Plan]) -> list[Row]:
        """The rows of all plans, in their order, whose subjects are prepared.

        Raises:
            UserError: something is unknown or does not fit together, which shows before anything is measured; a model
                computes no numbers; or some subjects or cells failed, and the others are finished.
        """
        stages = [next(plan.stages) for plan in plans]
        for plan, cells in zip(plans, stages, strict=True):
            plan.subject.check(cells)
            for cell in cells:
                cell.metric.measurement.check(cell)
        self.bar.total += sum(map(_steps, stages))
        self.bar.unit = next((cell.metric.measurement.unit for cells in stages for cell in cells), self.bar.unit)
        needs = [(plan.subject, keeps) for plan, cells in zip(plans, stages, strict=True) for keeps in keeps_of(cells)]
        requests = [request_of(subject, keeps) for subject, keeps in needs if keeps]
        if requests:
            self.engine.forecast(requests)
        rows_of_plans: list[list[Row]] = [[] for _ in plans]
        for group in self.engine.groups(range(len(plans))):
            waiting = {number: stages[number] for number in group}
            while waiting:
                rows = self._measured(list(chain.from_iterable(waiting.values())))
                for number, cells in list(waiting.items()):
                    new_rows = [rows[cell] for cell in cells]
                    rows_of_plans[number] += new_rows
                    waiting[number] = following(plans[number].stages, new_rows)
                    self.bar.total += _steps(waiting[number])
                waiting = {number: cells for number, cells in waiting.items() if cells}
        return list(chain.from_iterable(rows_of_plans))

    def _measured(self, cells: list[Cell]) -> dict[Cell, Row]:
        """The row of each cell, found or measured; where the facts of some are not to be had, after the others."""
        stop_if_asked()
        facts, failure = self._facts(cells)
        rows: dict[Cell, Row] = {}
        finished: list[Cell] = []
        missing: dict[str, list[Cell]] = defaultdict(list)  # by what they have in common under other names
        for cell, cell_facts in facts.items():
            kept = cell.metric.measurement.beside_row(cell, cell_facts, self)
            row = None if self.force else self.rows.find(cell.asked, cell_facts)
            if kept is None and row:
                finished.append(cell)
            elif kept is not None and not row:
                row = self._rows([cell], kept, facts)[cell]
                self._write({cell: row})
            if row:
                rows[cell] = row
                self.known[_common(cell, cell_facts)] = row
            else:
                missing[_common(cell, cell_facts)].append(cell)
        self.bar.skip(_steps(finished))
        new = [alike[0] for key, alike in missing.items() if key not in self.known]
        rows |= self._answered(new, facts)
        self.known |= {_common(cell, facts[cell]): rows[cell] for cell in new}
        for key, alike in missing.items():
            for cell in alike:
                if cell not in rows:
                    rows[cell] = self._under_its_name(cell, self.known[key])
        if failure:
            raise failure
        return rows

    def _facts(self, cells: list[Cell]) -> tuple[dict[Cell, dict], UserError | None]:
        """The facts of cells, and why some have none."""
        subjects = {id(cell.subject): cell.subject for cell in cells}
        by_subject = [[cell for cell in cells if id(cell.subject) == key] for key in subjects]
        tasks = [
            Task("its facts", _look, group[0].subject, (group,), 0, number) for number, group in enumerate(by_subject)
        ]
        facts: dict[Cell, dict] = {}
        failure = None
        try:
            for task, cell_facts in self.engine.run(tasks):
                facts |= dict(zip(by_subject[task.number], cell_facts, strict=True))
        except UserError as error:
            failure = error
        # In the order of the cells, whichever a cluster looked at first: of equal weights the first name is measured.
        return self._with_weights({cell: facts[cell] for cell in cells if cell in facts}), failure

    def _with_weights(self, facts: dict[Cell, dict]) -> dict[Cell, dict]:
        """With the weights of a streamed model where rows or another one may have them, for they are read for that."""
        for cell, cell_facts in facts.items():
            unknown = "weights_hash" not in cell_facts and getattr(cell.subject.settings, "stream", False)
            if unknown and (self._has_twin(cell, cell_facts) or (not self.force and self.rows.may_have(cell.asked))):
                weights = self.weights(cell.subject)
                for other in facts:
                    if other.subject is cell.subject:
                        facts[other].update(weights)
        return facts

    def _has_twin(self, cell: Cell, facts: dict) -> bool:
        """Whether another subject has nothing that tells their weights apart."""
        kind = tuple(facts.get(name) for name in OF_TWINS)
        return self.subjects.setdefault(kind, cell.subject) is not cell.subject

    def _answered(self, cells: list[Cell], facts: dict[Cell, dict]) -> dict[Cell, Row]:
        """The rows of cells that are measured, each written when its last part is there."""
        bundles = list(bundles_of(cells))
        parts = [self._parts(bundle, len(bundles)) for bundle in bundles]
        tasks = [
            task
            for number, bundle in enumerate(bundles)
            for task in self.tasks(bundle, parts[number], facts[bundle[0]], number)
        ]
        arrived: dict[int, dict] = defaultdict(dict)
        rows: dict[Cell, Row] = {}
        for task, answer in self.engine.run(tasks):
            number, answers = task.number, arrived[task.number]
            answers[task.arguments[1].start] = answer
            if len(answers) == len(parts[number]):
                new = self._rows(bundles[number], [answers[part.start] for part in parts[number]], facts)
                self._write(new)
                rows |= new
        return rows

    def tasks(self, bundle: list[Cell], parts: list[slice], facts: dict, number: int = 0) -> list[Task]:
        """Tasks that answer cells of a subject, in parts of its text. number: of all cells that are answered now."""
        return [
            Task(_name(bundle, part), answer, bundle[0].subject, (bundle, part, facts), steps, number)
            for part, steps in zip(parts, _shares(bundle, parts), strict=True)
        ]

    def weights(self, subject: Subject) -> dict:
        """The weights of a subject, which are read for that."""
        ((_, weights),) = self.engine.run([Task("its weights", _weights, subject, (), 0)])
        return weights

    def _parts(self, bundle: list[Cell], count: int) -> list[slice]:
        """The parts of the text of cells where there are so many bundles."""
        blocks = len(bundle[0].subject.blocks)
        return self.engine.parts(blocks, count) if bundle[0].metric.measurement.splits else [slice(0, blocks)]

    def _rows(self, bundle: list[Cell], parts: list[tuple], facts: dict[Cell, dict]) -> dict[Cell, Row]:
        """The rows of cells that were answered together; with the weights of a streamed model, known from now on."""
        answers, weights, spent = zip(*parts, strict=True)
        subject, known = bundle[0].subject, facts[bundle[0]]
        check_same_weights(subject.name, [known | part_weights for part_weights in (weights[0] | known, *weights)])
        for cell in facts:
            if cell.subject is subject:
                facts[cell] = weights[0] | facts[cell]
        rows = {}
        for number, cell in enumerate(bundle):
            with naming(cell.subject.name, cell.variant.name):
                values = cell.metric.measurement.values(cell, [part_answers[number] for part_answers in answers])
            made = {"experiment": self.experiment, **_made(cell, joined(list(spent)))}
            rows[cell] = Row(asked=cell.asked, facts=facts[cell], values=values, made=made)
        return rows

    def _write(self, rows: dict[Cell, Row]) -> None:
        for subject in {id(cell.subject): cell.subject for cell in rows}.values():
            subject.check_unchanged()
        self.rows.add(*rows.values())

    def _under_its_name(self, cell: Cell, twin: Row) -> Row:
        """The row of a cell that asks for the same of the same weights under another name."""
        self.bar.skip(_steps([cell]))
        if twin.asked == cell.asked:
            return twin
        other = full_name(twin.asked["subject"]["model"], twin.asked["subject"].get("checkpoint"))
        row = twin.model_copy(update={"asked": cell.asked, "made": twin.made | {"same_weights_as": other}})
        self._write({cell: row})
        return row


def _steps(cells: list[Cell]) -> int:
    return sum(bundle[0].metric.measurement.steps(bundle) for bundle in bundles_of(cells))


def keeps_of(cells: list[Cell]) -> Iterable[Keeps | None]:
    """The memory that each kind of measurement keeps for some cells of a subject."""
    measurements = {cell.metric.measured_by: cell.metric.measurement for cell in cells}
    by_measurement = ([cell for cell in cells if cell.metric.measured_by == name] for name in measurements)
    return (measurement.keeps(group) for measurement, group in zip(measurements.values(), by_measurement, strict=True))


def _shares(bundle: list[Cell], parts: list[slice]) -> list[int]:
    """The steps by which each part of a text moves the bar."""
    steps, blocks = _steps(bundle), len(bundle[0].subject.blocks)
    return [round(steps * part.stop / blocks) - round(steps * part.start / blocks) for part in parts]


def _name(bundle: list[Cell], part: slice) -> str:
    names = list(dict.fromkeys(cell.name for cell in bundle))
    what = ", ".join([*names[:NAMED], *([f"{len(names) - NAMED} more"] if len(names) > NAMED else [])])
    return f"{what}, blocks {part.start} to {part.stop - 1}" if bundle[0].metric.measurement.splits else what


def _common(cell: Cell, facts: dict) -> str:
    """A key that cells share whose rows are the same but for the name of the model; times are taken for each."""
    asked = cell.asked
    names = {"model", "checkpoint"} if facts.get("weights_hash") and not cell.metric.timed else set()
    subject = {name: value for name, value in asked["subject"].items() if name not in names}
    return repr((subject, asked["variant"], asked["metric"], sorted(facts.items())))


def _made(cell: Cell, spent: dict) -> dict:
    """The place and the cost of a cell's measurement, but for what is a fact of it."""
    facts = (CODE, *MACHINE) if cell.metric.timed else (CODE,)
    streamed = {"streamed": True} if getattr(cell.subject.settings, "stream", False) else {}
    device = {"device": cell.subject.settings.device}
    return {**device, **{name: value for name, value in spent.items() if name not in facts}, **streamed}


def _look(bench: Bench, subject: Subject, cells: list[Cell]) -> list[dict]:
    """The facts of some cells of a subject."""
    here = environment(subject.settings.device)
    return [
        {
            **subject.facts(bench, cell),
            **cell.metric.measurement.facts(cell, bench),
            **cell.about,
            **{name: here[name] for name in (CODE, *(MACHINE if cell.metric.timed else ())) if name in here},
        }
        for cell in cells
    ]


def _weights(bench: Bench, subject: Subject) -> dict:
    subject.load(bench)
    return subject.weights(bench)


def answer(bench: Bench, _subject: Subject, cells: list[Cell], part: slice, facts: dict) -> tuple[list, dict, dict]:
    """The answers to some cells, of which weights they are, and where they were made at what cost."""
    with measuring(cells[0].subject.settings.device) as spent:
        answers: list[Any] = cells[0].metric.measurement.answer(bench, cells, part, facts)
        weights = cells[0].subject.weights(bench)
    return answers, weights, spent.fields
