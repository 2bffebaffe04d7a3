"""Run an experiment: measure its plans on this machine or a cluster, and resume where an earlier run stopped."""

import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from outliers.config.experiment import Experiment
from outliers.config.fields import resolved
from outliers.errors import CellsFailed, EngineLost, UserError
from outliers.models.names import check_same_model
from outliers.runs.free import check_room_for_imports
from outliers.runs.rows import Row, Rows, index
from outliers.subjects.cell import CellPlan, next_cells
from outliers.terminal.forecaster import RENDERING, Steps

if TYPE_CHECKING:
    from outliers.show.section import Section
    from outliers.subjects.model_cache import ModelCache
    from outliers.terminal.progress import Progress

OF_ONE_MODEL = ("trace", "ablate", "origins", "damage")  # experiments whose folder holds results of one model only
NOT_MEASURED = {"failed": "not measured yet"}
logger = logging.getLogger(__name__)


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    force: bool = False,
    model_cache: "ModelCache | None" = None,
    bar: "Progress | None" = None,
) -> list[dict]:
    """Return the rows of an experiment, measured or read from its folder.

    Each finished row is on disk before the next one starts; rows found there are reused. Names, texts and sizes of all
    subjects are checked before the first one is measured. On a cluster a text may be measured in parts on several
    machines; its rows are written when the last part has arrived.

    Args:
        experiment: what to run.
        out: folder for `rows.jsonl` and stored traces; by default that of the experiment.
        force: measure again what is finished.
        model_cache: what an earlier run in this process has loaded, such as its model, for reuse.
        bar: progress bar shared by several runs; see `shared_bar`.

    Returns:
        A flat dictionary for each value, subject by subject, in the order of the request; for a failed cell one with
        NaN as `value` and the reason as `failed`.

    Raises:
        UserError: something in the experiment is unknown, unreachable or does not fit together; no model fits in
            memory; or the folder holds results of another model, and its tables are those of one model.

    Example:
        >>> rows = outliers.run(outliers.Cells(models=["pocket/gpt2-0.1m"], metrics=["top1"], block=64, blocks=2))
    """
    check_room_for_imports()
    from outliers.runs.engine import LocalEngine  # late: these import torch, which redrawing does not need
    from outliers.runs.planner import Planner
    from outliers.subjects.model_cache import ModelCache
    from outliers.terminal.progress import Progress

    model_cache = model_cache or ModelCache()
    experiment = fitted(experiment, out, force, model_cache)
    if bar is not None:  # a bar without steps is falsy
        bar.estimate(Steps(kind=of_all(experiment)))  # a better estimate replaces the first one
    plans = prepared_plans(experiment)
    if on_cluster := experiment.engine == "ray":
        from outliers.runs.cluster import Cluster
    with (
        Rows(Path(out or experiment.folder)) as rows,
        Progress(0) if bar is None else nullcontext(bar) as bar,
        Cluster(experiment, bar) if on_cluster else nullcontext(LocalEngine(bar, model_cache)) as engine,
    ):
        if experiment.model:
            _check_alone(experiment, rows)
        return records(Planner(rows, engine, bar, experiment.command or experiment.name, force).run(plans))


def show(experiment: Experiment, folder: str | Path, rows: list[dict]) -> "Section":
    """Return the tables, figures and findings of flat rows by the view of their experiment.

    Args:
        experiment: the experiment.
        folder: where its rows are kept.
        rows: as `run` returns them.

    Raises:
        UserError: the experiment has no view, because its field `shows` names what it shows.
    """
    from outliers.show.section import Context, section_of  # which imports pandas

    if experiment.view is None:
        raise UserError(
            f"{type(experiment).__name__} has no view: what an experiment of it shows, its field 'shows' names"
        )
    return section_of(resolved(type(experiment).view), rows, Context(experiment, Path(folder)))


def rows_or_error(
    experiment: Experiment, folder: Path, force: bool, model_cache: "ModelCache", bar: "Progress | None" = None
) -> tuple[list[dict], UserError | None]:
    """Run an experiment; return its rows, or no rows and the error."""
    try:
        return run(experiment, folder, force, model_cache, bar), None
    except UserError as error:
        return [], error


def stored_rows(experiment: Experiment, folder: Path) -> list[dict]:
    """Return the rows of an experiment that a folder has, as `rows_of`, without loading a model."""
    return records(rows_of(experiment, index(folder)))


def prepared_plans(experiment: Experiment) -> list[CellPlan]:
    """Return the plans of an experiment whose packages are installed, with prepared subjects.

    Mistakes in the plans show here, before a folder is made.

    Raises:
        UserError: no plan is left, because all compare with a library that is not installed; or as `Subject.prepare`.
    """
    plans, left_out = [], []
    for plan in experiment.plans():
        if plan.package is None or importlib.util.find_spec(plan.package):
            plan.subject.prepare()
            plans.append(plan)
        else:
            left_out.append(f"{plan.package} is not installed (pip install 'outliers[peers]')")
    if not plans:
        raise UserError(f"{left_out[0]}, and nothing else is measured; install it, or name other schemes")
    for reason in left_out:
        logger.info(f"{reason}; this run goes on without it")
    return plans


def fitted(experiment: Experiment, out: str | Path | None, force: bool, model_cache: "ModelCache") -> Experiment:
    """Return the experiment with as many blocks as fit into its `minutes`, see `outliers.runs.budget`."""
    if experiment.minutes is None or experiment.has_fitted_blocks:
        return experiment
    from outliers.runs.budget import fit_blocks  # late, for few runs need it

    def measure(short: Experiment) -> None:
        with TemporaryDirectory() as folder:
            run(short, folder, model_cache=model_cache)

    return fit_blocks(experiment, Path(out or experiment.folder), force, measure)


@contextmanager
def shared_bar(experiments: Iterable[Experiment]) -> "Iterator[Progress]":
    """Provide one progress bar for several runs, which expects the steps of all experiments from the start."""
    from outliers.runs.planner import estimated_steps  # late, as in `run`
    from outliers.terminal.progress import Progress

    with Progress(0) as bar:
        for experiment in experiments:
            bar.estimate(estimated_steps(experiment)._replace(kind=of_all(experiment)))
        yield bar


@contextmanager
def rendering(bar: "Progress", what: str) -> Iterator[None]:
    """Move the bar of a run by the step `RENDERING`, once tables, figures and page are made within this context."""
    bar.enter(f"{what}, tables and figures", RENDERING)
    yield
    bar.update()


def of_all(experiment: Experiment) -> str:
    """Return the kind of the steps that a bar expects of an experiment as a whole."""
    return f"of {experiment.name}"


def _check_alone(experiment: Experiment, rows: Rows) -> None:
    """Raise UserError if the folder holds rows of another model, made by an experiment of one model."""
    for command, *place in rows.subjects:
        if place[0] and command in (experiment.name, *OF_ONE_MODEL):
            check_same_model(rows.folder, place, (experiment.model, experiment.revision))


def records(rows: Iterable[Row]) -> list[dict]:
    """Return a flat dictionary for each value of rows."""
    from outliers.show.value import with_paired_errors  # which imports pandas

    return with_paired_errors([record for row in rows for record in row.records()])


def check_any_measured(rows: Sequence[dict]) -> None:
    """Raise CellsFailed if all cells of flat rows failed, so that there is nothing to show."""
    if rows and all("failed" in row for row in rows):
        cells = "the cell" if len(rows) == 1 else f"all {len(rows)} cells"
        raise CellsFailed(f"nothing was measured, {cells} failed; run the same command again when that is mended")


def check_all_measured(rows: Iterable[dict]) -> None:
    """Raise CellsFailed if some cells of flat rows failed."""
    if failed := [row["failed"] for row in rows if "failed" in row]:
        count, them = ("1 cell", "it") if len(failed) == 1 else (f"{len(failed)} cells", "them")
        lost = next((reason for reason in failed if reason.startswith(EngineLost.BEGINNING)), None)
        raise CellsFailed(
            f"{f'{lost}: {count} are lost' if lost else f'{count} failed'}, all others are finished; run the same "
            f"command again to measure {them} once more"
        )


def rows_of(experiment: Experiment, find: Callable[[dict], list[Row]]) -> list[Row]:
    """Return the stored rows of an experiment's cells, in its order, without loading anything.

    find: returns the rows of a request, see `outliers.runs.rows.index`.

    Cells are matched by request and labels. If several rows have the same request, measured with other weights or code,
    the last one counts, preferably one that was measured for this experiment. If an interrupted run left some rows of a
    stage, failed rows stand for its other cells, and later stages are unknown and left out; if a later stage has no
    rows at all, the earlier stages of its plan are left out too.
    """
    command = experiment.command or experiment.name
    rows_in_order = []
    for plan in experiment.plans():
        rows_of_plan, cells = [], next(plan.stages)
        while cells:
            stage_rows = []
            for cell in cells:
                rows = sorted(find(cell.request), key=lambda row: row.run.get("experiment") == command)
                last = next((row for row in reversed(rows) if cell.labels.items() <= row.provenance.items()), None)
                needs = {*cell.subject.needs, *cell.metric.needs}  # fields that views need, which old rows may lack
                whole = last and all(needs <= {*last.provenance, *value} for value in last.values)
                stage_rows.append(last if whole else None)
            known = [
                row or Row(cell.request, cell.labels, [], NOT_MEASURED)
                for cell, row in zip(cells, stage_rows, strict=True)
            ]
            rows_of_plan = [*rows_of_plan, *known] if any(stage_rows) else []
            try:
                cells = next_cells(plan.stages, stage_rows) if all(stage_rows) else []
            except UserError:  # no later stage follows from these rows
                rows_of_plan, cells = [], []
        rows_in_order += rows_of_plan
    return rows_in_order
