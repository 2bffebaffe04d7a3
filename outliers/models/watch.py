"""Checkpoints in local folders, which must not change while they are measured."""

from pathlib import Path

from outliers.errors import UserError

_read: dict[tuple[str, str | None], dict[Path, tuple | None]] = {}


def watch(name: str, revision: str | None, folder: str | Path) -> None:
    """Note the state of a model's safetensors files, just before they are read; of none if `folder` is no folder."""
    _read[name, revision] = {file: _state(file) for file in sorted(Path(folder).glob("*.safetensors"))}


def check_unchanged(name: str, revision: str | None) -> None:
    """See that a model's files are those that were read last under its name.

    Raises:
        UserError: one was truncated, written, replaced or deleted.
    """
    for file, state in _read.get((name, revision), {}).items():
        if _state(file) != state:
            raise UserError(
                f"the weights of '{name}' changed while they were measured ('{file}'); what was measured before is "
                "kept: run again once the file is whole"
            )


def _state(file: Path) -> tuple | None:
    """What changes when a file does: which one it is, bytes, nanoseconds of the last write; None without a file."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
