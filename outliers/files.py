"""Files that are replaced as a whole, so that a killed run leaves the old one or the new one; folders of one run."""

import contextlib
import fcntl
import itertools
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from outliers.errors import UserError

LOCK = ".lock"


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file by `content` at once: a reader, and a killed writer, leaves the old file or the new one.

    Raises:
        UserError: it cannot be written, for example because the disk is full.
    """
    part = part_of(path)
    with writing(path.parent):
        try:
            part.write_bytes(content.encode() if isinstance(content, str) else content)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)


def part_of(path: Path) -> Path:
    """Where the new content of a file is until it is whole; a kill may leave it, and the next write replaces it."""
    return path.with_name(f".{path.name}.part")


@contextlib.contextmanager
def writing(folder: Path):
    """Turn what the system says of a folder that cannot be written into one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write to '{folder}' ({reason}); choose another folder with --out") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a folder, made if it is not there, to this process; leave no folder where nothing was written.

    Its file `.lock` says who has it. The system frees the lock when its owner ends, however it ends: a file that is
    left by a kill blocks nobody. A file system without locks (some network ones) has the file itself as the lock, and
    after a kill a person must delete it.

    Raises:
        UserError: the folder cannot be written, or another run has it.
    """
    path = folder / LOCK
    made = [folder, *itertools.takewhile(lambda parent: not parent.exists(), folder.parents)]
    try:
        with writing(folder):
            descriptor = _take(path)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                path.unlink()
            os.close(descriptor)  # not before the file is gone: whoever opened it meanwhile sees that it is no longer
    finally:
        with contextlib.suppress(OSError):
            for place in made:
                place.rmdir()


def _take(path: Path) -> int:
    """The descriptor of a lock file that is locked for this process and names it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except FileNotFoundError:  # its last owner has just removed the folder
            continue
        try:
            _claim(descriptor, path)
            if _is_at(descriptor, path):
                _sign(descriptor, path)
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its last owner removed it after it was opened here


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _claim(descriptor: int, path: Path) -> None:
    what_to_do = "wait until it ends"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    except BlockingIOError:
        pass
    except OSError:  # the file system has no locks
        if os.fstat(descriptor).st_size == 0:
            return
        what_to_do = f"wait until it ends, delete '{path}' if it has ended"
    owner = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "another run"
    raise UserError(f"'{path.parent}' is in use by {owner}; {what_to_do}, or choose another folder with --out")


def _sign(descriptor: int, path: Path) -> None:
    """Write who has the lock: process, host, since when, command."""
    command = " ".join(shlex.join(sys.orig_argv).split())[:300]
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {platform.node()} since {since} ({command})\n".encode(), 0)
    except OSError:
        path.unlink()
        raise
