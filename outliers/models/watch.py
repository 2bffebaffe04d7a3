"""Checkpoints on this machine, which must not change while they are measured."""

from collections.abc import Iterable
from pathlib import Path

from outliers.errors import UserError

_read: dict[tuple[str, str | None], dict[Path, tuple | None]] = {}


def watch(name: str, revision: str | None, files: Iterable[Path]) -> None:
    """Note the state of the files of a model's weights, just before they are read."""
    _read[name, revision] = {file: state_of(file) for file in files}


def check_unchanged(name: str, revision: str | None) -> None:
    """See that a model's files are those that were read last under its name.

    Raises:
        UserError: one was truncated, written, replaced or deleted.
    """
    for file, state in _read.get((name, revision), {}).items():
        if state_of(file) != state:
            raise UserError(
                f"the weights of '{name}' changed while they were measured ('{file}'); what was measured before is "
                "kept: run again once the file is whole"
            )


def state_of(file: Path) -> tuple | None:
    """What changes when a file does: which one it is, bytes, nanoseconds of the last write; None without a file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
