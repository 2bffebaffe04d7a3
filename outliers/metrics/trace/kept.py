"""The trace of a text on disk, from where a run goes on."""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from outliers.errors import UserError
from outliers.files import check_replaceable
from outliers.models.anatomy.views import view_names
from outliers.subjects.bench import Bench, check_same_weights
from outliers.subjects.cell import Cell, Subject, Task
from outliers.subjects.provenance import joined, measuring
from outliers.terminal.interrupt import asked_to_stop, stop_if_asked
from outliers.tracing.excerpt import Excerpt, excerpt, telling_features
from outliers.tracing.masks import Masks, masks
from outliers.tracing.result import Trace, merged

# In the folder of the rows.
STEM, EXCERPT, IMATRIX, MASKS = "trace", "excerpt.safetensors", "imatrix.gguf", "masks"
SECONDS_BETWEEN_SAVES = 30
logger = logging.getLogger(__name__)


def of_view(file: str, stack: str) -> str:
    """The name of a file of one view of a model, which a model with one stack has without the name of the view."""
    stem, dot, ending = file.partition(".")
    return f"{stem}.{stack}{dot}{ending}" if stack else file


def traced(cell: Cell, facts: dict, planner: Any) -> list[tuple]:
    """The trace of each view over all blocks, as the only part of an answer (see `outliers.runs.planner.answer`).

    They are on disk every half minute, as pairs `trace`.safetensors and .parquet; a run goes on from what is there, if
    that is the beginning of the same one. Their `about` says which weights they are of. At the end an excerpt of the
    text is kept beside each, but of a streamed model; and what else was asked for.
    """
    folder, metric = planner.rows.folder, cell.metric
    stems = [folder / of_view(STEM, stack) for stack in view_names(cell.subject.config)]
    about = cell.subject.asked | facts | {"roles": metric.roles}
    with measuring(cell.subject.settings.device) as reading:
        found = [] if planner.force else saved_traces(stems, about, metric.tokens)
    if found and "weights_hash" not in facts:
        about |= planner.weights(cell.subject)
        found = found if all(one.about == about for one in found) else []
    if found and found[0].names:  # it goes on as it began
        cell = replace(cell, metric=metric.model_copy(update={"tokens": True}))
    saved, costs = time.monotonic(), []
    for longer, spent in _going_on(cell, facts, planner, about, found):
        found = longer
        costs.append(spent)
        if found and (asked_to_stop() or time.monotonic() - saved > SECONDS_BETWEEN_SAVES):
            _save(found, stems)
            saved = time.monotonic()
            stop_if_asked()
    if costs:
        _save(found, stems)
    for one in found if metric.imatrix else ():
        one.save_imatrix(folder / of_view(IMATRIX, one.stack))
    if metric.masks:
        ((_, marked),) = planner.engine.run([Task("masks", _masks, cell.subject, (facts, found[0]), 0)])
        marked.save(folder / MASKS)
    if not cell.subject.settings.stream:  # which would read all layers once more for it
        for one in found:
            _keep_excerpt(cell.subject, facts, planner, one)
    return [([found], {"weights_hash": about["weights_hash"]}, joined(costs or [reading.fields]))]


def _save(found: list[Trace], stems: list[Path]) -> None:
    for one, stem in zip(found, stems, strict=True):
        one.save(stem)


def _going_on(
    cell: Cell, facts: dict, planner: Any, about: dict, found: list[Trace]
) -> Iterator[tuple[list[Trace], dict]]:
    """The traces of the first blocks, as they grow from what is found, each time with what that has cost."""
    done = found[0].sequences if found else 0
    planner.bar.skip(done)
    arrived = {}
    tasks = planner.tasks([cell], _parts(cell.subject, planner.engine, done), facts)
    for task, ((one,), weights, spent) in planner.engine.run(tasks):
        check_same_weights(cell.subject.name, [about | weights, weights | about])
        about |= weights
        arrived[task.arguments[1].start] = one
        while done in arrived:  # in the order of the text, so that what is saved is its beginning
            one = arrived.pop(done)
            found = merged([found, one]) if found else one
            done = found[0].sequences
            for of_view in found:
                of_view.about = about
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


def saved_traces(stems: list[Path], about: dict, tokens: bool) -> list[Trace]:
    """The saved traces of all views; nothing where they are not of as many blocks."""
    found = [one for one in (_saved_trace(stem, about, tokens) for stem in stems) if one]
    alike = len(found) == len(stems) and len({one.sequences for one in found}) == 1
    return found if alike else []


def _saved_trace(stem: Path, about: dict, tokens: bool) -> Trace | None:
    """The saved trace, as far as it is known of a streamed model to be the same.

    None where there is nothing of it, or where a kill came between its files; or where tokens are asked for that it has
    not. Raises UserError where something else than files stands where it is to be saved.
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
    path = planner.rows.folder / of_view(EXCERPT, of.stack)
    if saved_excerpt(path, of) is None:
        task = Task("excerpt", _excerpt, subject, (facts, telling_features(of), of.stack or None), 0)
        ((_, found),) = planner.engine.run([task])
        replace(found, about=of.about).save(path)


def _excerpt(bench: Bench, subject: Subject, facts: dict, features: dict[str, list[int]], stack: str | None) -> Excerpt:
    return excerpt(subject.load(bench, facts), subject.blocks[0], features, stack)


def _masks(bench: Bench, subject: Subject, facts: dict, of: Trace) -> Masks:
    return masks(subject.load(bench, facts), subject.blocks, of)


def saved_excerpt(path: Path, of: Trace) -> Excerpt | None:
    """The excerpt of a trace; None where it is not there, or another's, or damaged."""
    try:
        found = Excerpt.load(path)
    except UserError:
        return None
    return found if found.about == of.about else None
