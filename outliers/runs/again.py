"""A finished run that is asked for again: what it printed, while nothing changed that this follows from."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import outlier_kernels
import typer
from pydantic import BaseModel

import outliers
from outliers.errors import UserError
from outliers.files import read_whole, write_whole
from outliers.models.config_file import FILE as CONFIG
from outliers.models.pocket.ladder import LADDER
from outliers.models.source import local_place
from outliers.specification.fields import OF_A_FILE, OF_A_MODEL
from outliers.specification.kinds import Named
from outliers.text.documents import HUB
from outliers.variants.together import others_of

FILE = ".printed.json"  # what a run printed, beside its rows, tables, figures and page
MOST_BYTES = 2**26
VARIABLES = ("CUDA", "MKL", "OMP", "OUTLIER", "TRITON")  # beginnings of the names of those that change a run
CODE = [Path(package.__file__).parent for package in (outliers, outlier_kernels)]
INSTALLED = Path(typer.__file__).parent.parent  # a folder that changes with every package in it


def key_of(spec: Named, command: str) -> str | None:
    """A key of all that a run follows from: command, specification, code, files that are named, packages and machine.

    Files count by their sizes and times. None where something is of the hub, where it may have changed.
    """
    if not is_here(spec):
        return None
    files = [path for path in map(Path, named(spec, OF_A_FILE)) if path.exists()]
    files += [file for name in named(spec, OF_A_MODEL) for file in _files_of(local_place(name))]
    variables = sorted(pair for pair in os.environ.items() if pair[0].startswith(VARIABLES))
    here = [sys.version, platform.node(), os.cpu_count(), INSTALLED.stat().st_mtime_ns, variables]
    return hashlib.sha256(repr((command, spec, os.getcwd(), _stamps(*CODE, *files), here)).encode()).hexdigest()


def is_here(spec: Named) -> bool:
    """Whether no model and no text of a specification is of the hub."""
    models = [name for name in named(spec, OF_A_MODEL) if name not in LADDER]
    return HUB.keys().isdisjoint(named(spec, OF_A_FILE)) and None not in map(local_place, models)


def named(value: object, mark: str) -> Iterator[str]:
    """The models or files that fields with a mark name, in a specification and what is in it."""
    if isinstance(value, BaseModel):
        for name, field in type(value).model_fields.items():
            marked = mark in field.metadata or _is_marked(field.annotation, mark)
            yield from _words(getattr(value, name)) if marked else named(getattr(value, name), mark)
    elif isinstance(value, (list, tuple, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from named(entry, mark)
    elif mark == OF_A_MODEL:
        yield from (variant.other for variant in others_of(value) if isinstance(variant.other, str))


def _is_marked(annotation: object, mark: str) -> bool:
    return any(part == mark or _is_marked(part, mark) for part in get_args(annotation))


def printed(folder: Path, key: str | None) -> str | None:
    """The text that a run with this key printed, if it left the files of a folder as they are."""
    try:
        record = json.loads(read_whole(folder / FILE, MOST_BYTES))
        return record["printed"] if record["key"] == key and record["files"] == _stamps(folder) else None
    except (OSError, ValueError, LookupError, TypeError, UserError):
        return None


def keep(folder: Path, key: str | None, text: str) -> None:
    """Keep what a run with this key printed, beside the files that it wrote."""
    if key:
        record = {"key": key, "files": _stamps(folder), "printed": text}
        write_whole(folder / FILE, json.dumps(record))


def _words(value: object) -> Iterator[str]:
    """The texts of a value, or of those in a list."""
    for entry in value if isinstance(value, list) else [value]:
        if isinstance(entry, (str, Path)):
            yield str(entry)


def _files_of(place: Path | None) -> list[Path]:
    """The files of a model, and of its checkpoints, which are folders in it; results may stand in others there."""
    if place is None or place.is_file():
        return [place] if place else []
    folders = [place, *(config.parent for config in place.glob(f"*/{CONFIG}"))]
    return [file for folder in folders for file in folder.iterdir() if file.is_file()]


def _stamps(*places: Path) -> dict[str, list[int]]:
    """Sizes and times of change of files, and of those in folders but for hidden and compiled ones."""
    files = [place for place in places if place.is_file()]
    for folder in filter(Path.is_dir, places):
        inside = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
        files += [path for path in inside if not path.name.startswith(".")]
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
