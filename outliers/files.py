"""Files that are replaced as a whole, so that a killed run leaves the old one or the new one."""

import contextlib
import os
from pathlib import Path

from outliers.errors import UserError


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file by `content` at once: a reader, and a killed writer, leaves the old file or the new one.

    Raises:
        UserError: it cannot be written, for example because the disk is full.
    """
    part = path.with_name(f".{path.name}.part")
    with writing(path.parent):
        try:
            part.write_bytes(content.encode() if isinstance(content, str) else content)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(folder: Path):
    """Turn what the system says of a folder that cannot be written into one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write to '{folder}' ({reason}); choose another folder with --out") from None
