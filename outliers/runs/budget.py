"""Choose as many blocks as fit into a number of minutes, and preview the measurements of a run."""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch

from outliers.config.experiment import Experiment
from outliers.errors import NoOutlier, UserError, joined_names
from outliers.models.load import DTYPES, find_device
from outliers.quantization.schemes import BASELINE
from outliers.runs.forecast import FreeBytes, Need, need_of, room_of
from outliers.runs.planner import Planner
from outliers.runs.rows import part_key, read_rows
from outliers.show.value import grouped
from outliers.subjects.cell import Cell, CellPlan, Subject
from outliers.terminal.amounts import durations, size
from outliers.terminal.forecaster import RENDERING, Steps

TRIED = (1, 2, 4)  # blocks that are timed, one number after the other
MOST = 10**5  # blocks
SPARE = 0.9  # share of the remaining time that is planned
PRODUCT = 256, 1024, 1024  # tokens, features and outputs of the matrix product that times a machine
SECONDS = 0.2  # of timing
SLOWER = 1.4  # time of a weight in a pass, as a multiple of its time in the product: pocket models, SmolLM2-135M
UNSURE = 2.0  # factor by which a time may be off if no pass was timed
NAMED = 12  # variants
logger = logging.getLogger(__name__)


def fit_blocks(experiment: Experiment, folder: Path, force: bool, measure: Callable[[Experiment], None]) -> Experiment:
    """Return the experiment with as many blocks as fit into its minutes, at most those that it names.

    If an earlier run into the folder had the same minutes, its number of blocks is taken. Otherwise one block is timed,
    then two, and four if many fit.

    Args:
        experiment: with `minutes`.
        folder: of its results.
        force: ignore earlier runs.
        measure: function that runs an experiment, to time it; its rows are not kept.
    """
    blocks = None if force else _chosen(experiment, folder)
    if blocks is None:
        most = experiment.blocks if "blocks" in experiment.model_fields_set else MOST
        fitting = _fitting_blocks(experiment, measure, most)
        blocks = _in_text(experiment, fitting) if fitting > max(TRIED) else fitting
    logger.info(f"{blocks} block{'' if blocks == 1 else 's'} in {experiment.minutes:g} min")
    return experiment.with_fitted_blocks(blocks)


def _chosen(experiment: Experiment, folder: Path) -> int | None:
    """Return the number of blocks of an earlier run of the same request with the same minutes."""
    rows = [row for row in read_rows(folder) if row.run.get("minutes") == experiment.minutes]
    stored = {part_key(row.request) for row in rows}
    for blocks in dict.fromkeys(row.request["subject"].get("blocks", 0) for row in reversed(rows)):
        cells = chain.from_iterable(next(plan.stages) for plan in experiment.with_fitted_blocks(blocks).plans())
        if any(part_key(cell.request) in stored for cell in cells):
            return blocks
    return None


def _fitting_blocks(experiment: Experiment, measure: Callable[[Experiment], None], most: int) -> int:
    """Return the number of blocks that fit into the minutes of an experiment, from the times of a few blocks."""
    end, seconds = time.monotonic() + 60 * experiment.minutes - RENDERING.seconds, {}
    for blocks in TRIED:
        if blocks > most or (seconds and blocks * seconds[max(seconds)] / max(seconds) > (end - time.monotonic()) / 2):
            break
        begin = time.monotonic()
        try:
            measure(experiment.with_fitted_blocks(blocks))
        except NoOutlier:  # so few blocks have none
            return min(most, experiment.blocks)
        seconds[blocks] = time.monotonic() - begin
    *_, last = seconds
    before = max((blocks for blocks in seconds if 1 < blocks < last), default=0)  # the first one loaded the model
    a_block = (seconds[last] - seconds.get(before, 0.0)) / (last - before)
    overhead = max(0.0, seconds[last] - last * a_block)
    a_block = max(a_block, seconds[last] / last / 4)
    return max(1, min(most, math.floor((SPARE * (end - time.monotonic()) - overhead) / a_block)))


def _in_text(experiment: Experiment, most: int) -> int:
    """Return the number of blocks that the text has, at most `most`, by bisection."""

    def has(blocks: int) -> bool:
        try:
            for plan in experiment.with_fitted_blocks(blocks).plans():
                plan.subject.prepare()
                plan.subject.check(next(plan.stages))
        except UserError:
            return False
        return True

    least = 1
    while least < most and not has(most):
        least, most = (middle, most - 1) if has(middle := (least + most) // 2) else (least, middle - 1)
    return max(1, most)


def preview(runs: Sequence[tuple[Sequence[CellPlan], Path]]) -> str:
    """Describe what runs would measure: cells, how many of them have rows, time and memory.

    No weights are read: the time follows from the sizes of models and the speed of a matrix product.

    Args:
        runs: plans, with the folder of their results.
    """
    planner, plans = Planner(None, None, None, ""), list(chain.from_iterable(plans for plans, _ in runs))
    stages = [next(plan.stages) for plan in plans]
    for plan, cells in zip(plans, stages, strict=True):
        plan.subject.check(cells)
    model_runs = planner.model_runs(plans, stages)
    stored = {part_key(row.request) for _, folder in runs for row in read_rows(folder) if row.values}
    cells = list(chain.from_iterable(stages))
    finished = sum(part_key(cell.request) in stored for cell in cells)
    more = any(plan.passes() for plan in plans)
    lines = [
        "Nothing is measured. A run would measure",
        *(f"  {line}" for line in dict.fromkeys(chain.from_iterable(map(_lines_of, stages)))),
        *["  and what follows from these values"] * more,
        f"{finished} of {len(cells)} cells{' that come first' if more else ''} have rows.",
    ]
    if model_runs:  # of models, whose passes have sizes
        device = model_runs[0].device
        steps = zip(plans, map(planner.estimated_steps, plans, stages), strict=True)
        pace = _pace(find_device(device), DTYPES[model_runs[0].dtype])
        seconds = len(runs) * RENDERING.seconds + pace * sum(_work(plan.subject, of_plan) for plan, of_plan in steps)
        lines.append(f"All of it takes about {durations(seconds / UNSURE, UNSURE * seconds)} at the present load.")
        room, most = room_of(device), {}
        for need in (need_of(model_run, room) for model_run in model_runs):
            most[need.model] = max(need, most.get(need.model, need), key=lambda need: need.memory)
        lines += [_memory(need, room, device) for need in most.values()]
    return "\n".join(lines)


def _lines_of(cells: list[Cell]) -> Iterator[str]:
    """Yield one line per metric that lists the variants under which a plan measures it."""
    for metric, alike in grouped(cells, lambda cell: cell.metric.name).items():
        names = list(dict.fromkeys(cell.variant.name for cell in alike))
        under = f" under {joined_names(names, NAMED)}" if names != [BASELINE] else ""
        subject = alike[0].subject
        request = subject.request
        text = (
            f" on {request['text']}, {request['blocks']} blocks of {request['block']} tokens"
            if "blocks" in request
            else ""
        )
        yield f"{subject.name}{text}: {metric}{under}"


def _work(subject: Subject, steps: Iterable[Steps]) -> float:
    """Return the work of the steps of a subject, in multiply-adds: tokens times weights."""
    return subject.experiment.block * sum(part.work for part in steps)


def _pace(device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds that the product of one token with one weight takes, timed with a matrix product."""
    tokens, features, outputs = PRODUCT
    x = torch.randn(tokens, features, device=device, dtype=dtype)
    weight = torch.randn(outputs, features, device=device, dtype=dtype)
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < SECONDS or not count:
        count += 1
        float(torch.nn.functional.linear(x, weight)[0, 0])  # float() waits for a GPU
    return SLOWER * (time.perf_counter() - begin) / (count * math.prod(PRODUCT))


def _memory(need: Need, room: FreeBytes, device: str) -> str:
    kind = "GPU memory" if room.gpus else "memory"
    free = f"{size(room.for_weights(device))} are free"
    host = f", {size(need.host)} of the host's memory" * bool(need.host)
    disk = f", {size(need.disk)} of disk" * bool(need.disk)
    download = f", {size(need.download or 0)} to download" * bool(need.download)
    return f"{need.model} needs {size(need.memory)} of {kind}, of which {free}{host}{disk}{download}."
