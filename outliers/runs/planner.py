"""Decide which cells have rows, measure the others together or on several machines, and write their rows."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from outliers.config.experiment import Experiment
from outliers.errors import BadWeights, BrokenModel, EngineLost, MeasurementFailed, UserError
from outliers.metrics.measurement import Measurement, bundles_of
from outliers.models.names import full_name
from outliers.quantization.schemes import BASELINE
from outliers.runs.engine import LocalEngine, tried
from outliers.runs.forecast import ModelRun, model_run_of
from outliers.runs.reprint import is_here
from outliers.runs.rows import Row, Rows
from outliers.show.value import grouped
from outliers.show.words import span
from outliers.subjects.cell import Cell, CellPlan, NotMeasured, Subject, Task, next_cells
from outliers.subjects.model_cache import ModelCache, check_same_weights, naming
from outliers.subjects.provenance import code_hash, environment, joined_provenance, measuring
from outliers.subjects.row import MACHINE
from outliers.terminal.forecaster import FIXED, Steps
from outliers.terminal.interrupt import asked_to_stop, stop_if_asked
from outliers.terminal.progress import Progress

if TYPE_CHECKING:
    from outliers.runs.cluster import Cluster

FailedCells = dict[Cell, MeasurementFailed]
Outcomes = dict[Cell, Row | MeasurementFailed]
logger = logging.getLogger(__name__)

SAME_FOR_EQUAL_WEIGHTS = ("architecture", "parameters", "tokens_hash")
MOST_NAMED = 2  # failed cells that a warning lists if nothing of their model was measured; more are counted
SECONDS_BETWEEN_SAVES = 30  # of a trace
NAMED = 12  # cells that the name of a task lists; more are counted
FINE = "the unquantized model is fine: the {} breaks it"
# Field of `environment` that is provenance of every row; the fields of the machine are provenance of timed rows only.
CODE = "code"


class Planner:
    """A run of cell plans: it reads the rows that exist, measures all other cells, and writes their rows.

    rows: of the folder. engine: where tasks run. bar: of progress. experiment: the name that rows give as the
    experiment they were measured for. force: measure again what has rows.
    """

    def __init__(
        self, rows: Rows, engine: "LocalEngine | Cluster", bar: Progress, experiment: str, force: bool = False
    ):
        self.rows, self.engine, self.bar, self.experiment, self.force = rows, engine, bar, experiment, force
        self.subjects: dict[tuple, Subject] = {}  # the first of the subjects that may have equal weights
        self.refused: dict[str, str] = {}  # models that do not fit in memory, and why
        self.alone = False  # whether the run has one model
        self.sizes: dict[str, int] = {}  # of models, in weights
        self.kinds: dict[Cell, str] = {}  # of steps, by cell
        self.known: dict[str, Row] = {}  # rows of this run, by `_shared_key`

    def run(self, plans: Sequence[CellPlan]) -> list[Row]:
        """Return the rows of all plans, in their order; rows of cells that failed give the reason.

        The subjects of the plans are prepared before.

        Raises:
            UserError: something is unknown or does not fit together, or no model fits in memory, or the only one cannot
                be loaded, which shows before anything is measured; or rows cannot be written.
        """
        stages = [next(plan.stages) for plan in plans]
        self.alone = len({plan.subject.name for plan in plans}) == 1
        for plan, cells in zip(plans, stages, strict=True):
            plan.subject.check(cells)
            for cell in cells:
                cell.metric.measurement.check(cell)
        if model_runs := self.model_runs(plans, stages):
            self.refused = self.engine.forecast(model_runs)
        for plan, cells in zip(plans, stages, strict=True):
            self._estimate(plan, cells, plan.passes())
        rows_of_plans: list[list[Row]] = [[] for _ in plans]
        for group in self.engine.groups(range(len(plans))):
            waiting = {number: stages[number] for number in group}
            while waiting:
                rows = self._measure(list(chain.from_iterable(waiting.values())))
                for number, cells in list(waiting.items()):
                    new_rows = [rows[cell] for cell in cells]
                    rows_of_plans[number] += new_rows
                    try:
                        waiting[number] = next_cells(plans[number].stages, new_rows)
                    except NotMeasured as error:
                        logger.warning(str(error))
                        waiting[number] = []
                    self._estimate(plans[number], waiting[number])
                waiting = {number: cells for number, cells in waiting.items() if cells}
        return list(chain.from_iterable(rows_of_plans))

    def model_runs(self, plans: Sequence[CellPlan], stages: Sequence[list[Cell]]) -> list[ModelRun]:
        """Return the runs of models, whose memory the engine forecasts, and remember the sizes of these models."""
        model_runs = []
        for plan, cells in zip(plans, stages, strict=True):
            for measurement, group in grouped(cells, lambda cell: cell.metric.measurement).items():
                if memory_needs := measurement.memory_needs(group):
                    model_runs.append(model_run_of(plan.subject, memory_needs))
        self.sizes = {run.name: run.shape.weights for run in model_runs}
        return model_runs

    def estimated_steps(self, plan: CellPlan, cells: list[Cell]) -> Iterator[Steps]:
        """Yield the steps that a plan is expected to take before anything is measured.

        Args:
            plan: whose subject is prepared.
            cells: of its first stage.
        """
        steps = [self.steps(bundle) for bundle in bundles_of(cells)]
        left = plan.passes() * len(plan.subject.blocks) - sum(stage.count for stage in steps)
        yield from (*steps, Steps(max(0, left), self.sizes.get(plan.subject.name, 0)))

    def _measure(self, cells: list[Cell]) -> dict[Cell, Row]:
        """Return the row of each cell, found or measured; rows of failed cells are written after all others."""
        provenance, failures = self._provenance(cells)
        rows: dict[Cell, Row] = {}
        skipped = list(failures)
        missing: dict[str, list[Cell]] = defaultdict(list)  # by the key that they share under other names
        for cell, cell_provenance in provenance.items():
            try:
                stored = self._trace_and_store(cell, cell_provenance) if cell.metric.is_stored else None
            except MeasurementFailed as error:
                failures[cell] = error
                continue
            row = None if self.force else self.rows.find(cell.request, cell_provenance)
            if stored is None and row:
                skipped.append(cell)
            elif stored is not None and not row:
                row = self._rows([cell], stored, provenance)[cell]
                self._write({cell: row})
            if isinstance(row, MeasurementFailed):
                failures[cell] = row
            elif row:
                rows[cell] = row
                self.known[_shared_key(cell, cell_provenance)] = row
            else:
                missing[_shared_key(cell, cell_provenance)].append(cell)
        for bundle in bundles_of(skipped):
            self.bar.skip(self.steps(bundle))
        new = [alike[0] for key, alike in missing.items() if key not in self.known]
        measured = self._measure_bundles(list(bundles_of(new)), provenance)
        failures |= {cell: result for cell, result in measured.items() if isinstance(result, MeasurementFailed)}
        rows |= {cell: row for cell, row in measured.items() if cell not in failures}
        self.known |= {_shared_key(cell, provenance[cell]): rows[cell] for cell in new if cell in rows}
        for key, alike in missing.items():
            for cell in alike:
                if cell not in rows and key in self.known:
                    rows[cell] = self._add_duplicate(cell, self.known[key])
                elif cell not in rows:
                    failures.setdefault(cell, failures[alike[0]])
        self._check_alone(failures)
        return rows | self._failed(failures, provenance, rows)

    def _check_alone(self, failures: FailedCells) -> None:
        """Raise UserError if the run has one model, of which nothing is measured because of its weights."""
        reasons = {str(failure): failure for failure in failures.values()}
        unusable = all(type(failure) is BadWeights for failure in reasons.values())
        if self.alone and unusable and not self.known and len(reasons) == 1:
            raise UserError(*reasons)

    def _failed(self, failures: FailedCells, provenance: dict[Cell, dict], rows: dict[Cell, Row]) -> dict[Cell, Row]:
        """Write and return the rows of cells that failed, with the reason of each.

        Each reason is logged once per model; if no cell of the model was measured, once for all its cells.
        """
        fine = {(id(cell.subject), cell.metric.measurement) for cell in rows if cell.variant.name == BASELINE}
        reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
        failed_rows = {}
        for cell, failure in failures.items():
            reason = str(failure)
            for prefix in (f"'{cell.subject.name}' under {cell.variant.name}: ", f"'{cell.subject.name}': "):
                reason = reason.removeprefix(prefix)  # the row has model and variant already
            if isinstance(failure, BrokenModel) and (id(cell.subject), cell.metric.measurement) in fine:
                kind = "scheme" if cell.variant.schemes else "variant"
                reason = f"{reason.partition('; expected')[0]}; {FINE.format(kind)}"
            if not isinstance(failure, EngineLost):
                reasons[cell.subject.name, reason].append(cell.name)
            known = provenance.get(cell) or {
                "scheme": BASELINE,
                **cell.variant.fields(),
                **cell.labels,
                CODE: code_hash(),
            }
            run = _run_part(cell, environment(cell.subject.experiment.device))
            run = {"experiment": self.experiment, **run, "failed": reason}
            failed_rows[cell] = Row(request=cell.request, provenance=known, values=[], run=run)
        measured = {cell.subject.name for cell in rows}
        for (name, reason), cells in reasons.items():
            alike = len(cells) > MOST_NAMED and name not in measured
            logger.warning(f"failed: {name}, {f'all {len(cells)} cells' if alike else '; '.join(cells)}: {reason}")
        self._write(failed_rows)
        return failed_rows

    def _provenance(self, cells: list[Cell]) -> tuple[dict[Cell, dict], FailedCells]:
        """Return the provenance of cells, which the engine finds subject by subject, and the failures of the others."""
        subjects = {id(cell.subject): cell.subject for cell in cells}
        by_subject = [[cell for cell in cells if id(cell.subject) == key] for key in subjects]
        outcomes: dict[Cell, dict | MeasurementFailed] = {}
        for group in by_subject:
            if reason := self.refused.get(group[0].subject.name):
                outcomes |= dict.fromkeys(group, MeasurementFailed(reason))
        tasks = [
            Task("its provenance", _provenance_of, group[0].subject, (group,), number=number)
            for number, group in enumerate(by_subject)
            if group[0] not in outcomes
        ]
        for task, results in self.engine.run(tasks):
            group = by_subject[task.number]
            results = [results] * len(group) if isinstance(results, MeasurementFailed) else results
            outcomes |= dict(zip(group, results, strict=True))
        # In the order of the cells, not that in which a cluster finished: of equal weights the first name is measured.
        failures = {cell: outcomes[cell] for cell in cells if isinstance(outcomes[cell], MeasurementFailed)}
        return self._with_weights({cell: outcomes[cell] for cell in cells if cell not in failures}, failures), failures

    def _with_weights(self, provenance: dict[Cell, dict], failures: FailedCells) -> dict[Cell, dict]:
        """Add the weights hash of streamed models to the provenance, if rows or another model might share the weights.

        Reading all weights takes long, so it is done only then. Cells of a model whose weights cannot be read are moved
        to the failures.
        """
        for cell, cell_provenance in list(provenance.items()):
            unknown = cell in provenance and "weights_hash" not in cell_provenance
            unknown = unknown and cell.subject.experiment.stream
            if unknown and (
                self._may_share_weights(cell, cell_provenance) or (not self.force and self.rows.may_have(cell.request))
            ):
                ((_, weights),) = self.engine.run([Task("its weights", _weights, cell.subject, ())])
                for other in [other for other in provenance if other.subject is cell.subject]:
                    if isinstance(weights, MeasurementFailed):
                        failures[other] = weights
                        del provenance[other]
                    else:
                        provenance[other].update(weights)
        return provenance

    def _may_share_weights(self, cell: Cell, provenance: dict) -> bool:
        """Return whether another subject has the same provenance, so that their weights may be the same too."""
        kind = tuple(provenance.get(name) for name in SAME_FOR_EQUAL_WEIGHTS)
        return self.subjects.setdefault(kind, cell.subject) is not cell.subject

    def _measure_bundles(self, bundles: list[list[Cell]], provenance: dict[Cell, dict]) -> Outcomes:
        """Measure bundles of cells, and return their rows or failures; a row is written when its last part has arrived.

        If a bundle fails, each half of it is tried by itself.
        """
        parts = [
            self.engine.parts(len(bundle[0].subject.blocks), len(bundles))
            if bundle[0].metric.measurement.splits
            else [slice(0, len(bundle[0].subject.blocks))]
            for bundle in bundles
        ]
        tasks = [
            task
            for number, bundle in enumerate(bundles)
            for task in self.tasks(bundle, parts[number], provenance[bundle[0]], number)
        ]
        arrived: dict[int, dict] = defaultdict(dict)
        results: Outcomes = {}
        halves: list[list[Cell]] = []
        for task, result in self.engine.run(tasks):
            bundle, by_part = bundles[task.number], arrived[task.number]
            by_part[task.arguments[1].start] = result
            if len(by_part) < len(parts[task.number]):
                continue
            failure = next((result for result in by_part.values() if isinstance(result, MeasurementFailed)), None)
            if failure and len(bundle) > 1 and not isinstance(failure, BadWeights | EngineLost):
                halves += [bundle[: len(bundle) // 2], bundle[len(bundle) // 2 :]]
                continue
            ordered = [by_part[part.start] for part in parts[task.number]]
            new = dict.fromkeys(bundle, failure) if failure else self._rows(bundle, ordered, provenance)
            self._write(new)
            results |= new
        if halves:
            self._expect(list(chain.from_iterable(halves)))
            results |= self._measure_bundles(halves, provenance)
        return results

    def tasks(self, bundle: list[Cell], parts: list[slice], provenance: dict, number: int = 0) -> list[Task]:
        """Return the tasks that measure a bundle of cells of one subject, one for each part of its text.

        Args:
            number: index of the bundle among all that are measured now.
        """
        steps, blocks = self.steps(bundle), len(bundle[0].subject.blocks)
        ends = [(round(steps.count * part.start / blocks), round(steps.count * part.stop / blocks)) for part in parts]
        names = list(dict.fromkeys(cell.name for cell in bundle))
        named = ", ".join([*names[:NAMED], *([f"{len(names) - NAMED} more"] if len(names) > NAMED else [])])
        tasks, splits = [], bundle[0].metric.measurement.splits
        for part, (start, end) in zip(parts, ends, strict=True):
            several = "s" if part.stop - part.start > 1 else ""
            name = f"{named}, block{several} {span(part.start, part.stop - 1)}" if splits else named
            share, arguments = steps._replace(count=end - start), (bundle, part, provenance)
            tasks.append(Task(name, measure_cells, bundle[0].subject, arguments, share, number))
        return tasks

    def steps(self, bundle: list[Cell]) -> Steps:
        """Return the steps of the progress bar for a bundle of cells.

        Steps of another unit than blocks, such as tasks of lm-eval, take about as long for all models.
        """
        cell, measurement = bundle[0], bundle[0].metric.measurement
        size = self.sizes.get(cell.subject.name, 0) if measurement.unit == Measurement.unit else 0
        return Steps(measurement.steps(bundle), size, self.kinds.get(cell, ""), measurement.cost)

    def _estimate(self, plan: CellPlan, cells: list[Cell], passes: int = 0) -> None:
        """Make the bar expect the steps of a stage, and the rest of the plan's estimated passes for later stages."""
        before, kind = self.bar.total, f"later {id(plan.stages)}"
        self._expect(cells)
        steps = passes * len(plan.subject.blocks) if passes else self.bar.estimates[kind].count
        left = max(0, steps - self.bar.total + before) if cells else 0
        self.bar.estimate(Steps(left, self.sizes.get(plan.subject.name, 0), kind))

    def _expect(self, cells: list[Cell]) -> None:
        """Make the bar expect the steps of some cells."""
        for bundle in bundles_of(cells):
            kind = f"{type(bundle[0].metric.measurement).__module__} {bundle[0].variant.name}"
            self.kinds |= dict.fromkeys(bundle, kind)
            self.bar.expect(self.steps(bundle))

    def _trace_and_store(self, cell: Cell, provenance: dict) -> list[tuple]:
        """Trace a cell, store its traces beside its row, and return one part: traces, weights and cost.

        They are saved every half minute, and a run resumes from saved traces of its first blocks. At the end, the other
        requested files are saved, and an excerpt of the text beside each trace unless the model is streamed.
        """
        from outliers.runs.traces import TraceStore  # late, for few runs store one

        store, subject = TraceStore(self.rows.folder, cell, provenance), cell.subject
        with store.swap_in(self.force):
            with measuring(subject.experiment.device) as reading:
                if not self.force:
                    store.find()
            if store.traces and "weights_hash" not in provenance:
                ((_, weights),) = self._results([Task("its weights", _weights, subject, ())])
                store.check(weights)
            self.bar.skip(self.steps([cell])._replace(count=store.done))
            saved, costs = time.monotonic(), []
            tasks = self.tasks([store.missing], self._parts_after(subject, store.done), provenance)
            for task, ((part,), weights, spent) in self._results(tasks):
                store.add(task.arguments[1].start, part, weights)
                costs.append(spent)
                if store.traces and (asked_to_stop() or time.monotonic() - saved > SECONDS_BETWEEN_SAVES):
                    store.save()
                    saved = time.monotonic()
                    stop_if_asked()
            if costs:
                store.save()
        for task, path in store.derived():
            ((_, file),) = self._results([task])
            file.save(path)
        return [
            (
                [store.traces],
                {"weights_hash": store.labels["weights_hash"]},
                joined_provenance(costs or [reading.fields]),
            )
        ]

    def _parts_after(self, subject: Subject, done: int) -> list[slice]:
        """Return the parts of the text, after its first blocks, that are traced at once.

        A streamed model takes all blocks: each pass reads all its layers.
        """
        blocks = len(subject.blocks)
        if subject.experiment.engine == "local" and not subject.experiment.stream:
            return [slice(number, number + 1) for number in range(done, blocks)]
        parts = self.engine.parts(blocks - done, 1) if done < blocks else []
        return [slice(done + part.start, done + part.stop) for part in parts]

    def _results(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Any]]:
        """Yield each task with its result; raise MeasurementFailed as soon as one fails."""
        for task, result in self.engine.run(tasks):
            if isinstance(result, MeasurementFailed):
                raise result
            yield task, result

    def _rows(self, bundle: list[Cell], parts: list[tuple], provenance: dict[Cell, dict]) -> Outcomes:
        """Return the rows or failures of a bundle of cells; add the hash of streamed weights to the provenance.

        parts: of the text, what `measure_cells` returned: results by cell, weights and cost.
        """
        weights = [part_weights for _, part_weights, _ in parts]
        subject, known = bundle[0].subject, provenance[bundle[0]]
        of_parts = [known | part_weights for part_weights in (weights[0] | known, *weights)]
        if failure := tried(check_same_weights, subject.name, of_parts):
            return dict.fromkeys(bundle, failure)
        for cell in provenance:
            if cell.subject is subject:
                provenance[cell] = weights[0] | provenance[cell]
        return {
            cell: tried(self._row, cell, [([results[number]], *others) for results, *others in parts], provenance)
            for number, cell in enumerate(bundle)
        }

    def _row(self, cell: Cell, parts: list[tuple], provenance: dict[Cell, dict]) -> Row:
        results, _, spent = zip(*parts, strict=True)
        with naming(cell.subject.name, cell.variant.name):
            values = cell.metric.measurement.values(cell, [result for (result,) in results])
            for value in values:
                for name, number in value.items():
                    if isinstance(number, float) and not math.isfinite(number):
                        raise BrokenModel(f"'{name}' of {value['metric']} is {number}; expected finite numbers")
        run = {"experiment": self.experiment, **_run_part(cell, joined_provenance(list(spent)))}
        return Row(request=cell.request, provenance=provenance[cell], values=values, run=run)

    def _write(self, rows: Outcomes) -> None:
        if finished := [row for row in rows.values() if isinstance(row, Row)]:
            self.rows.add(*finished)

    def _add_duplicate(self, cell: Cell, duplicate: Row) -> Row:
        """Write and return the row of a cell that was measured with the same weights under another name."""
        self.bar.skip(self.steps([cell]))
        if duplicate.request == cell.request:
            return duplicate
        other = full_name(duplicate.request["subject"]["model"], duplicate.request["subject"].get("checkpoint"))
        row = replace(duplicate, request=cell.request, run=duplicate.run | {"same_weights_as": other})
        self._write({cell: row})
        return row


def estimated_steps(experiment: Experiment) -> Steps:
    """Estimate the steps of an experiment for its progress bar before anything is loaded.

    Return no steps if a model or text would have to be downloaded or is invalid; the run itself reports that.
    """
    steps = []
    with suppress(UserError):
        if is_here(experiment):
            plans = experiment.plans()
            for plan in plans:
                plan.subject.prepare()
            planner, stages = Planner(None, None, None, ""), [next(plan.stages) for plan in plans]
            planner.model_runs(plans, stages)
            steps = list(chain.from_iterable(map(planner.estimated_steps, plans, stages)))
    count = sum(part.count for part in steps)
    size = round(sum(part.work for part in steps) / count) - FIXED if count else 0
    return Steps(count, size)


def _shared_key(cell: Cell, provenance: dict) -> str:
    """Return a key that cells have in common if their rows differ in the name of the model alone.

    Timed cells never share a row between models.
    """
    request = cell.request
    names = {"model", "checkpoint"} if provenance.get("weights_hash") and not cell.metric.timed else set()
    subject = {name: value for name, value in request["subject"].items() if name not in names}
    return repr((subject, request["variant"], request["metric"], sorted(provenance.items())))


def _run_part(cell: Cell, spent: dict) -> dict:
    """Return the machine and cost of a measurement as fields of a row, without the fields of its provenance."""
    provenance = (CODE, *MACHINE) if cell.metric.timed else (CODE,)
    experiment = cell.subject.experiment
    streamed = {"streamed": True} if experiment.stream else {}
    fitted = {"minutes": experiment.minutes} if experiment.minutes else {}
    return {name: value for name, value in spent.items() if name not in provenance} | streamed | fitted


def _provenance_of(model_cache: ModelCache, subject: Subject, cells: list[Cell]) -> list[dict | MeasurementFailed]:
    """Return the provenance of cells of a subject, or the failures; a model that cannot be loaded is tried once."""
    outcomes: list[dict | MeasurementFailed] = []
    for cell in cells:
        lost = outcomes and isinstance(outcomes[-1], MeasurementFailed) and not model_cache.is_loaded
        outcomes.append(outcomes[-1] if lost else tried(_provenance, model_cache, subject, cell))
    if outcomes and isinstance(outcomes[-1], MeasurementFailed) and not model_cache.is_loaded:
        outcomes = [BadWeights(str(outcome)) for outcome in outcomes]
    return outcomes


def _provenance(model_cache: ModelCache, subject: Subject, cell: Cell) -> dict:
    here = environment(subject.experiment.device)
    return {
        **subject.provenance(model_cache, cell),
        **cell.metric.measurement.provenance(cell, model_cache),
        **cell.labels,
        **{name: here[name] for name in (CODE, *(MACHINE if cell.metric.timed else ())) if name in here},
    }


def _weights(model_cache: ModelCache, subject: Subject) -> dict:
    subject.load(model_cache)
    return subject.weights(model_cache)


def measure_cells(
    model_cache: ModelCache, _subject: Subject, cells: list[Cell], part: slice, provenance: dict
) -> tuple[list, dict, dict]:
    """Measure some cells, and return their results, the hash of the weights, and machine and cost."""
    with measuring(cells[0].subject.experiment.device) as spent:
        results: list[Any] = cells[0].metric.measurement.measure(model_cache, cells, part, provenance)
        weights = cells[0].subject.weights(model_cache)
    return results, weights, spent.fields
