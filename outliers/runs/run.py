"""Run a specification: its plans to rows, going on where an earlier run stopped, here or on a cluster."""

import importlib.util
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from outliers.errors import CellsFailed, EngineLost, UserError
from outliers.models.names import check_alone
from outliers.runs.free import check_room_for_imports
from outliers.runs.rows import Row, Rows, key_of
from outliers.specification.kinds import Named, OfOneModel
from outliers.subjects.cell import Cell, Plan, following
from outliers.terminal.forecaster import DRAWN, Steps

if TYPE_CHECKING:
    from outliers.runs.cluster import Cluster
    from outliers.runs.engine import Here
    from outliers.subjects.bench import Bench
    from outliers.terminal.progress import Progress

OF_ONE_MODEL = ("trace", "ablate", "origins", "damage")  # experiments of which a folder holds those of one model
logger = logging.getLogger(__name__)


def run(
    spec: Named,
    out: str | Path | None = None,
    force: bool = False,
    bench: "Bench | None" = None,
    bar: "Progress | None" = None,
) -> list[dict]:
    """Return the rows of a specification, measured or read from its folder.

    Each finished row is on disk before the next one starts; rows found there are used again. Names, texts and sizes are
    checked for all subjects before the first one is measured. On a cluster a text may be measured in parts on several
    machines; its rows are written when the last part is there.

    Args:
        spec: what to run.
        out: folder for `rows.jsonl`, and for a trace that is kept; by default that of the specification.
        force: measure again what is finished.
        bench: what an earlier run in this process has left, such as its model, of which this one takes what it can.
        bar: that of several runs; see `foreseeing`.

    Returns:
        A flat dictionary for each value, subject by subject, in the order of what is asked; for a cell that failed one
        with NaN as `value`, and why as `failed`.

    Raises:
        UserError: something in the specification is unknown, unreachable or does not fit together; no model fits in
            memory; or the folder holds results of another model, where its tables are those of one.

    Example:
        >>> rows = outliers.run(outliers.Cells(models=["pocket/gpt2-0.1m"], metrics=["top1"], block=64, blocks=2))
    """
    check_room_for_imports()
    from outliers.runs.planner import Planner  # late, for it brings torch, which redrawing does without
    from outliers.subjects.bench import Bench
    from outliers.terminal.progress import Progress

    bench = bench or Bench()
    spec = fitted(spec, out, force, bench)
    if bar is not None:  # one of no steps is false
        bar.foresee(Steps(kind=of_all(spec)))  # which are known better from now on
    plans = prepared(spec)
    with (
        Rows(Path(out or spec.folder)) as rows,
        Progress(0) if bar is None else nullcontext(bar) as bar,
        _engine(spec, bar, bench) as engine,
    ):
        if isinstance(spec, OfOneModel):
            _check_alone(spec, rows)
        return records(Planner(rows, engine, bar, spec.experiment or spec.name, force).run(plans))


def prepared(spec: Named) -> list[Plan]:
    """The plans of a specification whose packages are here; mistakes show before a folder is made."""
    plans = [plan for plan in spec.plans() if _is_possible(plan)]
    for plan in plans:
        plan.subject.prepare()
    return plans


def fitted(spec: Named, out: str | Path | None, force: bool, bench: "Bench") -> Named:
    """The specification with as many blocks as fit into its minutes, if it has some; see `outliers.runs.budget`."""
    if getattr(spec, "minutes", None) is None or spec.is_fitted:
        return spec
    from outliers.runs.budget import fit  # late, as what few need

    def measure(short: Named) -> None:
        with TemporaryDirectory() as folder:
            run(short, folder, bench=bench)

    return fit(spec, Path(out or spec.folder), force, measure)


def _engine(spec: Named, bar: "Progress", bench: "Bench") -> "AbstractContextManager[Here | Cluster]":
    if getattr(spec, "engine", "local") == "ray":
        from outliers.runs.cluster import Cluster

        return Cluster(spec, bar)
    from outliers.runs.engine import Here

    return nullcontext(Here(bar, bench))


@contextmanager
def foreseeing(specs: Iterable[Named]) -> "Iterator[Progress]":
    """The bar of the runs of some specifications, which expects the usual steps of all from the start."""
    from outliers.runs.planner import usual_steps  # late, as in `run`
    from outliers.terminal.progress import Progress

    with Progress(0) as bar:
        for spec in specs:
            bar.foresee(usual_steps(spec)._replace(kind=of_all(spec)))
        yield bar


@contextmanager
def drawing(bar: "Progress", what: str) -> Iterator[None]:
    """Let the bar of a run see that its tables, figures and page are made, which it was told to expect as `DRAWN`."""
    bar.enter(f"{what}, tables and figures", DRAWN)
    yield
    bar.update()


def of_all(spec: Named) -> str:
    """The kind of the steps of a specification that are foreseen."""
    return f"of {spec.name}"


def _check_alone(spec: OfOneModel, rows: Rows) -> None:
    """Raise UserError if a folder holds rows of another model that an experiment of one model made."""
    for experiment, *place in rows.subjects:
        if place[0] and experiment in (spec.name, *OF_ONE_MODEL):
            check_alone(rows.folder, place, (spec.model, spec.revision))


def _is_possible(plan: Plan) -> bool:
    if plan.package is None or importlib.util.find_spec(plan.package):
        return True
    logger.info(f"{plan.package} is not installed (pip install 'outliers[peers]'); this run goes on without it")
    return False


def records(rows: Iterable[Row]) -> list[dict]:
    """A flat dictionary for each value of rows."""
    from outliers.show.value import with_paired_errors  # which imports pandas

    return with_paired_errors([record for row in rows for record in row.records()])


def check_any_measured(rows: Sequence[dict]) -> None:
    """Raise CellsFailed where no cell of flat rows was measured, of which there is nothing to show."""
    if rows and all("failed" in row for row in rows):
        cells = "the cell" if len(rows) == 1 else f"all {len(rows)} cells"
        raise CellsFailed(f"nothing was measured, {cells} failed; run the same command again when that is mended")


def check_all_measured(rows: Iterable[dict]) -> None:
    """Raise CellsFailed where there are flat rows of cells that failed."""
    if failed := [row["failed"] for row in rows if "failed" in row]:
        count, them = ("1 cell", "it") if len(failed) == 1 else (f"{len(failed)} cells", "them")
        lost = next((reason for reason in failed if reason.startswith(EngineLost.BEGINNING)), None)
        raise CellsFailed(
            f"{f'{lost}: {count} are lost' if lost else f'{count} failed'}, all others are finished; run the same "
            f"command again to measure {them} once more"
        )


def rows_of(spec: Named, rows: Iterable[Row]) -> list[Row]:
    """Of rows those that a specification asks for, by what they ask, and what cells are about, alone, in its order;
    nothing is loaded.

    Of rows that ask the same, as of other weights or code, the last one counts, of those that were measured for it if
    there are such. Where the rows of a stage are not all there, what would follow from them is not known; where none of
    a later stage is, those before it are not shown.
    """
    by_cell: dict[bytes, list[Row]] = defaultdict(list)
    experiment = spec.experiment or spec.name
    for row in sorted(rows, key=lambda row: row.made.get("experiment") == experiment):
        by_cell[key_of(row.asked)].append(row)
    rows_in_order = []
    for plan in spec.plans():
        rows_of_plan, cells = [], next(plan.stages)
        while cells:
            stage_rows = [_last_of(cell, by_cell[key_of(cell.asked)]) for cell in cells]
            rows_of_plan = [*rows_of_plan, *filter(None, stage_rows)] if any(stage_rows) else []
            try:
                cells = following(plan.stages, stage_rows) if all(stage_rows) else []
            except UserError:  # nothing can be asked after what was measured
                rows_of_plan, cells = [], []
        rows_in_order += rows_of_plan
    return rows_in_order


def _last_of(cell: Cell, rows: list[Row]) -> Row | None:
    """Of rows that ask the same the last one that is of a cell, if that has what views need of it."""
    last = next((row for row in reversed(rows) if cell.about.items() <= row.facts.items()), None)
    needs = {*cell.subject.needs, *cell.metric.needs}
    return last if last and all(needs <= {*last.facts, *value} for value in last.values) else None
