"""Files that are replaced as a whole, so that a killed run leaves the old one or the new one; folders of one run.

Only files are read, and nothing is written through a link: links are replaced or refused, so that nothing outside of
the folder changes.
"""

import contextlib
import itertools
import math
import os
import platform
import re
import secrets
import shlex
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from outliers.errors import UserError

LOCK, OWNER = ".lock", ".owner"
PAGE = "report.html"
EARLIER = "earlier"  # subfolder of the files of earlier requests, a folder each
TIME = "%Y-%m-%d %H:%M:%S"
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
LEFT = re.compile(r"\..+\.[0-9a-f]{8}\.part")  # name of the part of a writer


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file by `content` at once: readers find, and killed writers leave, the old file or the new one.

    If several processes write the same file at the same time, the last one counts. A link is replaced, not its target.

    Raises:
        UserError: it cannot be written, for example because the disk is full or it is no file.
    """
    check_replaceable(path)
    with writing(path.parent), new_part(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)


def move(source: Path, target: Path, names: Iterable[str]) -> None:
    """Move the files that a folder has of some names into another one, replacing its files; remove empty folders."""
    with writing(target):
        for name in names:
            if os.path.lexists(source / name):
                check_replaceable(target / name)
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                os.replace(source / name, target / name)
        if source.parent.name == EARLIER and source.is_dir():
            for folder in (source, source.parent):
                with contextlib.suppress(OSError):  # not empty
                    folder.rmdir()


def check_replaceable(path: Path) -> None:
    """Raise UserError if something other than a file or a link is in the place of a file to be written."""
    with writing(path.parent):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise _in_the_way(path, mode)


def read_whole(path: Path, most: int) -> bytes:
    """Return the content of a file, following links; refuse one of more bytes, and pipes, which may not end."""
    check_file(path, most)
    return path.read_bytes()


def start_of(path: Path, most: int) -> bytes | None:
    """Return the first bytes of a file, following links; None if there is no file.

    Opening a pipe would wait for its other end, and a device may have no end.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(most)


def check_file(path: Path, most: float = math.inf) -> None:
    """Raise UserError if a path, whose links are followed, is no file of at most so many bytes."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise _in_the_way(path, status.st_mode)
    if status.st_size > most:
        raise UserError(f"'{path}' has {status.st_size:,} bytes; expected at most {most:,}: move it away")


def _in_the_way(path: Path, st_mode: int) -> UserError:
    kind = KINDS.get(stat.S_IFMT(st_mode), "another name of a file elsewhere")  # a hard link
    return UserError(f"'{path}' is {kind}; expected a file: move it away or choose another folder with --out")


@contextlib.contextmanager
def new_part(path: Path) -> Iterator[Path]:
    """Provide a new empty file beside another for its new content; remove it if it does not replace the other."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    part.touch(exist_ok=False)  # follows no link
    try:
        yield part
    finally:
        part.unlink(missing_ok=True)


def remove_left(folder: Path) -> None:
    """Remove the parts that killed writers left in a folder, which this process alone writes."""
    for part in (folder / name for name in os.listdir(folder) if LEFT.fullmatch(name)):
        with contextlib.suppress(OSError):  # it is a folder, or cannot be removed
            part.unlink()


@contextlib.contextmanager
def writing(folder: Path):
    """Turn an OSError, from a folder that cannot be written, into a UserError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write to '{folder}' ({reason}); choose another folder with --out") from None


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this process; make it if it is missing, and remove it again if nothing was written.

    The lock of a killed process blocks nobody; the file `.owner` beside it names the process that has the folder.

    Raises:
        UserError: the folder cannot be written, or another run has it.
    """
    lock, owner = FileLock(folder / LOCK, is_singleton=False), folder / OWNER
    with writing(folder):
        made = [folder, *itertools.takewhile(lambda parent: not parent.exists(), folder.parents)]
    try:
        with writing(folder):
            _take(lock, folder)
        try:
            command = " ".join(shlex.join(sys.orig_argv).split())[:300]
            write_whole(owner, f"process {os.getpid()} on {platform.node()} since {time.strftime(TIME)} ({command})\n")
            yield
        finally:
            with contextlib.suppress(OSError):
                owner.unlink(missing_ok=True)
                (folder / LOCK).unlink(missing_ok=True)  # a process that opened it meanwhile notices that it is gone
            lock.release()
    finally:
        with contextlib.suppress(OSError):
            for place in made:
                place.rmdir()


def _take(lock: FileLock, folder: Path) -> None:
    path = folder / LOCK
    while not lock.is_locked:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # its last owner has just removed it, or the folder
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise _in_the_way(path, status.st_mode)
        with contextlib.suppress(FileNotFoundError):
            try:
                lock.acquire(blocking=False)
            except Timeout:
                owner = folder / OWNER
                who = owner.read_text(errors="replace").strip() if owner.is_file() else "another run"
                raise UserError(
                    f"'{folder}' is in use by {who}; wait until it ends, or choose another folder with --out"
                ) from None
