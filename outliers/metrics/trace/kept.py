"""The trace of a text on disk, from where a run goes on."""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from outliers.errors import UserError
from outliers.files import check_replaceable
from outliers.subjects.bench import Bench, check_same_weights
from outliers.subjects.cell import Cell, Subject, Task
from outliers.subjects.provenance import joined, measuring
from outliers.terminal.interrupt import asked_to_stop, stop_if_asked
from outliers.tracing.excerpt import Excerpt, excerpt, telling_features
from outliers.tracing.result import Trace

STEM, EXCERPT = "trace", "excerpt.safetensors"  # in the folder of the rows
SECONDS_BETWEEN_SAVES = 30
logger = logging.getLogger(__name__)


def traced(cell: Cell, facts: dict, planner: Any) -> list[tuple]:
    """The trace of all blocks, as the only part of an answer (see `outliers.runs.planner.answer`).

    It is on disk every half minute, as the pair `trace`.safetensors and .parquet; a run goes on from what is there, if
    that is the beginning of the same one. Its `about` says which weights it is of. At its end an excerpt of the text is
    kept beside it, but of a streamed model.

    Raises:
        UserError: a hidden state holds NaN or inf; or something else than files stands where it is to be saved.
    """
    stem, metric = planner.rows.folder / STEM, cell.metric
    about = cell.subject.asked | facts | {"roles": metric.roles}
    with measuring(cell.subject.settings.device) as reading:
        found = None if planner.force else saved_trace(stem, about, metric.tokens)
    if found and "weights_hash" not in facts:
        about |= planner.weights(cell.subject)
        found = found if found.about == about else None
    if found and found.names:  # it goes on as it began
        cell = replace(cell, metric=metric.model_copy(update={"tokens": True}))
    saved, costs = time.monotonic(), []
    for longer, spent in _going_on(cell, facts, planner, about, found):
        found = longer
        costs.append(spent)
        if found and (asked_to_stop() or time.monotonic() - saved > SECONDS_BETWEEN_SAVES):
            found.save(stem)
            saved = time.monotonic()
            stop_if_asked()
    if costs:
        found.save(stem)
    if not cell.subject.settings.stream:  # which would read all layers once more for it
        _keep_excerpt(cell.subject, facts, planner, found)
    return [([found], {"weights_hash": about["weights_hash"]}, joined(costs or [reading.fields]))]


def _going_on(
    cell: Cell, facts: dict, planner: Any, about: dict, found: Trace | None
) -> Iterator[tuple[Trace | None, dict]]:
    """The trace of the first blocks, as it grows from what is found, each time with what that has cost."""
    done = found.sequences if found else 0
    planner.bar.skip(done)
    arrived = {}
    tasks = planner.tasks([cell], _parts(cell.subject, planner.engine, done), facts)
    for task, ((one,), weights, spent) in planner.engine.run(tasks):
        check_same_weights(cell.subject.name, [about | weights, weights | about])
        about |= weights
        arrived[task.arguments[1].start] = one
        while done in arrived:  # in the order of the text, so that what is saved is its beginning
            one = arrived.pop(done)
            found = found.merge(one) if found else one
            found.about, done = about, found.sequences
        yield found, spent


def _parts(subject: Subject, engine: Any, done: int) -> list[slice]:
    """The parts of the text after its first blocks that are traced at once.

    A streamed model takes all: each pass reads all its layers.
    """
    blocks = len(subject.blocks)
    if subject.settings.engine == "local" and not subject.settings.stream:
        return [slice(number, number + 1) for number in range(done, blocks)]
    parts = engine.parts(blocks - done, 1) if done < blocks else []
    return [slice(done + part.start, done + part.stop) for part in parts]


def saved_trace(stem: Path, about: dict, tokens: bool) -> Trace | None:
    """What is saved of the same trace, as far as that is known of a streamed model.

    None where there is nothing of it, or where a kill came between its files; or where tokens are asked for that it has
    not.

    Raises:
        UserError: something else than files stands where it is to be saved.
    """
    files = [stem.with_name(f"{stem.name}.{ending}") for ending in ("safetensors", "parquet")]
    for file in files:
        check_replaceable(file)
    if not any(file.exists() for file in files):
        return None
    try:
        found = Trace.load(stem)
    except UserError as error:
        logger.info(f"{error}; this run does")
        return None
    unknown = {"weights_hash"} - about.keys()
    same = {field: found.about[field] for field in found.about.keys() - unknown} == about
    whole = found.names or not tokens
    return found if same and whole and found.sequences <= about["blocks"] else None


def _keep_excerpt(subject: Subject, facts: dict, planner: Any, of: Trace) -> None:
    """Write the excerpt of a trace, unless it is there."""
    path = planner.rows.folder / EXCERPT
    if saved_excerpt(path, of) is None:
        task = Task("excerpt", _excerpt, subject, (facts, telling_features(of)), 0)
        ((_, found),) = planner.engine.run([task])
        replace(found, about=of.about).save(path)


def _excerpt(bench: Bench, subject: Subject, facts: dict, features: dict[str, list[int]]) -> Excerpt:
    return excerpt(subject.load(bench, facts), subject.blocks[0], features)


def saved_excerpt(path: Path, of: Trace) -> Excerpt | None:
    """The excerpt of a trace; None where it is not there, or another's, or damaged."""
    try:
        found = Excerpt.load(path)
    except UserError:
        return None
    return found if found.about == of.about else None
