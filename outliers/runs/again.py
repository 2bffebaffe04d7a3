"""A finished run that is asked for again: what it printed, while nothing changed that this follows from."""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import outlier_kernels
import typer

import outliers
from outliers.errors import UserError
from outliers.files import read_whole, write_whole
from outliers.models.names import PACKAGED, packaged_file
from outliers.models.source import local_place
from outliers.specification.kinds import Named
from outliers.text.documents import HUB

FILE = ".printed.json"  # what a run printed, beside its rows, tables, figures and page
MOST_BYTES = 2**26
OF_MODELS = ("model", "models", "candidates", "against")
VARIABLES = ("CUDA", "MKL", "OMP", "OUTLIER", "TRITON")  # beginnings of the names of those that change a run
CODE = [Path(package.__file__).parent for package in (outliers, outlier_kernels)]
INSTALLED = Path(typer.__file__).parent.parent  # a folder that changes with every package in it


def key_of(spec: Named, command: str) -> str | None:
    """A key of all that a run follows from: command, specification, code, files that are named, packages and machine.

    Files count by their sizes and times. None where something is of the hub, where it may have changed.
    """
    if not is_here(spec):
        return None
    words = set(_words(list(vars(spec).values()))) - {""}
    named = [packaged_file(word) if word in PACKAGED else Path(word) for word in sorted(words)]
    variables = sorted(pair for pair in os.environ.items() if pair[0].startswith(VARIABLES))
    here = [sys.version, platform.node(), os.cpu_count(), INSTALLED.stat().st_mtime_ns, variables]
    return hashlib.sha256(repr((command, spec, os.getcwd(), _stamps(*CODE, *named), here)).encode()).hexdigest()


def is_here(spec: Named) -> bool:
    """Whether no model and no text of a specification is of the hub."""
    models = _words([getattr(spec, field, ()) for field in OF_MODELS])
    return HUB.keys().isdisjoint(_words(list(vars(spec).values()))) and None not in map(local_place, models)


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
    """The texts of a value, and of what is in it."""
    if isinstance(value, (str, Path)):
        yield str(value)
    elif isinstance(value, (list, tuple, dict)):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _words(entry)


def _stamps(*places: Path) -> dict[str, list[int]]:
    """Sizes and times of change of files, and of those in folders but for hidden and compiled ones."""
    files = [place for place in places if place.is_file()]
    for folder in filter(Path.is_dir, places):
        inside = (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)
        files += [path for path in inside if not path.name.startswith(".")]
    return {str(file): [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
