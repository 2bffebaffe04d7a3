"""The trace of a text that comes before a measurement, kept on disk where it is asked for."""

import logging
import time
from dataclasses import replace
from pathlib import Path

from outliers.errors import UserError
from outliers.experiment.cell import Cell
from outliers.experiment.engine import Engine
from outliers.experiment.interrupt import asked_to_stop, stop_if_asked
from outliers.experiment.provenance import measuring
from outliers.experiment.rows import identifying
from outliers.files import check_replaceable
from outliers.measurements.bench import Bench, Job, check_same_weights
from outliers.measurements.measurement import First
from outliers.specification.kinds import OfOneModel
from outliers.tracing.excerpt import Excerpt, excerpt, telling_features
from outliers.tracing.result import Trace
from outliers.tracing.trace import trace

EXCERPT = "excerpt.safetensors"  # beside a trace
SECONDS_BETWEEN_SAVES = 30
logger = logging.getLogger(__name__)


def resumed_trace(
    engine: Engine, job: Job, spec: OfOneModel, first: First, fields: dict, stem: Path, force: bool
) -> tuple[Trace, list[dict]]:
    """The trace of all blocks, and what its parts have cost.

    It is on disk every half minute, as the pair `stem`.safetensors and .parquet, if it is to be kept; it then goes on
    from what is there, if that is the beginning of the same one. Its `about` says which weights it is of. At its end
    an excerpt of the text is kept beside it, but of a streamed model.

    Raises:
        UserError: a hidden state holds NaN or inf; or something else than files stands where it is to be saved.
    """
    about = identifying(fields)
    found = saved_trace(stem, about, first.tokens) if first.kept and not force else None
    first = first._replace(tokens=first.tokens or bool(found and found.names))  # it goes on as it began
    done = found.sequences if found else 0
    engine.bar.skip(done)
    saved, arrived, costs = time.monotonic(), {}, []
    cells = [
        Cell(f"trace, {said(part)}", _trace, job, (spec, first, fields, part), part.stop - part.start)
        for part in _parts(engine, spec, first, done)
    ]
    for cell, (one, weights, spent) in engine.run(cells):
        check_same_weights([fields | weights, fields | weights | about])
        about |= weights
        arrived[cell.arguments[-1].start] = one
        costs.append(spent)
        while done in arrived:  # in the order of the text, so that what is saved is its beginning
            one = arrived.pop(done)
            found = found.merge(one) if found else one
            found.about, done = about, found.sequences
        if first.kept and found and (asked_to_stop() or time.monotonic() - saved > SECONDS_BETWEEN_SAVES):
            found.save(stem)
            saved = time.monotonic()
            stop_if_asked()
    if first.kept and cells:
        found.save(stem)
    if first.kept and not spec.stream:  # which would read all layers once more for it
        _keep_excerpt(engine, job, spec, fields, stem.with_name(EXCERPT), found)
    return found, costs


def _keep_excerpt(engine: Engine, job: Job, spec: OfOneModel, fields: dict, path: Path, of: Trace) -> None:
    """Write the excerpt of a trace, unless it is there."""
    if saved_excerpt(path, of) is None:
        ((_, found),) = engine.run([Cell("excerpt", _excerpt, job, (spec, fields, telling_features(of)), 0)])
        replace(found, about=of.about).save(path)


def saved_excerpt(path: Path, of: Trace) -> Excerpt | None:
    """The excerpt of a trace; None where it is not there, or another's, or damaged."""
    try:
        found = Excerpt.load(path)
    except UserError:
        return None
    return found if found.about == of.about else None


def said(part: slice) -> str:
    """A part of a text."""
    return f"blocks {part.start} to {part.stop - 1}"


def _parts(engine: Engine, spec: OfOneModel, first: First, done: int) -> list[slice]:
    """The parts of the text after its first blocks that are traced at once.

    A streamed model takes all: each pass reads all its layers.
    """
    if spec.engine == "local" and not spec.stream and first.kept:
        return [slice(number, number + 1) for number in range(done, spec.blocks)]
    parts = engine.parts(spec.blocks - done, 1) if done < spec.blocks else []
    return [slice(done + part.start, done + part.stop) for part in parts]


def _trace(
    bench: Bench, job: Job, spec: OfOneModel, first: First, fields: dict, part: slice
) -> tuple[Trace, dict, dict]:
    """The trace of a part of the text, of which weights it is, and what it has cost."""
    model, _ = bench.load(job, spec, fields)
    blocks = bench.counted(job.blocks[part])
    with measuring(spec.device) as spent:
        how = {"roles": first.roles, "alpha": spec.alpha, "attention": first.attention}
        found = trace(model, blocks, **how, tokens=bench.tokenizer(job) if first.tokens else None)
        weights = bench.weights()
    return found, weights, spent.fields


def _excerpt(bench: Bench, job: Job, spec: OfOneModel, fields: dict, features: dict[str, list[int]]) -> Excerpt:
    model, _ = bench.load(job, spec, fields)
    return excerpt(model, job.blocks[0], features)


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
