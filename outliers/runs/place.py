"""The folder of the results of one model, where other models have its name."""

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from outliers.errors import UserError
from outliers.runs.rows import read
from outliers.specification.kinds import OfOneModel

LONGEST = 200  # bytes of a folder's name, so that systems take it
OF_ONE_MODEL = ("trace", "ablate", "origins", "damage")  # experiments of which a folder holds those of one model
Checkpoint = tuple[str, str | None]  # model and revision
logger = logging.getLogger(__name__)


def place_of(spec: OfOneModel, out: str | Path | None = None) -> Path:
    """The folder of one model's results, in which those of no other model are.

    out: the one that is asked for; None for that of its name in `results`. Where another model's results are in that,
    such as those of '/a/hf' where these are of '/b/hf', it is the first that is free of 'b-hf', …, 'hf-2', 'hf-3', …;
    which is said. Models are the same where their names are, or lead to the same folder or file.

    Raises:
        UserError: another model's results are in `out`; or rows that are there are damaged.
    """
    if out is not None:
        check_alone(spec, Path(out))
        return Path(out)
    folders = (spec.folder.with_name(name) for name in _names(spec))
    folder = next(folder for folder in folders if not _others(folder, spec))
    if folder != spec.folder:
        other, ours = _others(spec.folder, spec)[0], (spec.model, spec.revision)
        logger.info(f"'{spec.folder}' holds results of '{typed(other)}'; those of '{typed(ours)}' are in '{folder}'")
    return folder


def check_alone(spec: OfOneModel, folder: Path) -> None:
    """Raise UserError if a folder holds results of another model."""
    if others := _others(folder, spec):
        raise UserError(
            f"'{folder}' holds results of '{typed(others[0])}', whose tables and page those of "
            f"'{typed((spec.model, spec.revision))}' would replace; choose another folder with --out"
        )


def typed(checkpoint: Checkpoint) -> str:
    """A model as it was typed, with its revision."""
    model, revision = checkpoint
    return model if revision is None else f"{model}@{revision}"


def _names(spec: OfOneModel) -> Iterator[str]:
    """Names of folders: the model's, then with those of the folders that it is in before it, then with a number."""
    name = spec.folder.name
    yield name
    parents = [part for part in Path(spec.model).parts[:-1] if part.strip("./")]
    for start in range(len(parents) - 1, -1, -1):
        longer = "-".join([*parents[start:], name])
        if len(longer.encode()) <= LONGEST:
            yield longer
    yield from (f"{name}-{number}" for number in itertools.count(2))


def _others(folder: Path, spec: OfOneModel) -> list[Checkpoint]:
    """The other models whose results are in a folder, by its rows and by a trace that has no rows yet."""
    checkpoints = dict.fromkeys([*_measured(folder, spec.name), *_traced(folder / "trace")])
    return [checkpoint for checkpoint in checkpoints if not _same(checkpoint, (spec.model, spec.revision))]


def _measured(folder: Path, name: str) -> list[Checkpoint]:
    """The models of rows that an experiment of this name, or one of one model, has made."""
    rows = [row for row in read(folder) if row.made.get("experiment") in (name, *OF_ONE_MODEL)]
    subjects = [row.asked["subject"] for row in rows if "model" in row.asked["subject"]]
    return [(subject["model"], subject.get("checkpoint")) for subject in subjects]


def _traced(stem: Path) -> list[Checkpoint]:
    """The model of a trace, if one can be read."""
    path = stem.with_name(f"{stem.name}.safetensors")
    if not path.is_file():
        return []
    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["trace"])["about"]
        return [(about["model"], about.get("checkpoint"))]
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError, SafetensorError):
        return []  # its run begins again


def _same(first: Checkpoint, second: Checkpoint) -> bool:
    if first == second:
        return True
    try:
        return first[1] == second[1] and Path(first[0]).samefile(second[0])
    except OSError:  # one of them is not here
        return False
