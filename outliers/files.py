"""Files that are replaced as a whole, so that a killed run leaves the old one or the new one; folders of one run.

Nothing but files is read, and what stands in a folder is never written through: a link is replaced or refused, and so
nothing outside of the folder changes.
"""

import contextlib
import errno
import fcntl
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
from collections.abc import Iterator
from pathlib import Path

from outliers.errors import UserError

LOCK = ".lock"
KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
LEFT = re.compile(r"\..+\.[0-9a-f]{8}\.part")  # what a writer calls a part


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file by `content` at once: a reader, and a killed writer, leaves the old file or the new one.

    Of several that write the same file at the same time, each writes all of it, and the last one counts. A link is
    replaced, not what it leads to.

    Raises:
        UserError: it cannot be written, for example because the disk is full or it is no file.
    """
    check_replaceable(path)
    with writing(path.parent), new_part(path) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)


def check_replaceable(path: Path) -> None:
    """Raise UserError if something else than a file or a link stands where one is to be written."""
    with writing(path.parent):
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return
    if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
        raise _in_the_way(path, mode)


def read_whole(path: Path, most: int) -> bytes:
    """The content of a file of at most so many bytes, to which a link may lead; never of a pipe, which may not end."""
    check_file(path, most)
    return path.read_bytes()


def start_of(path: Path, most: int) -> bytes | None:
    """The first bytes of a file, to which a link may lead; None where no file is.

    Opening a pipe would wait for its other end, and a device may have no end.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return file.read(most)


def check_file(path: Path, most: float = math.inf) -> None:
    """Raise UserError if no file of at most so many bytes, to which a link may lead, stands where one is to be read."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise _in_the_way(path, status.st_mode)
    if status.st_size > most:
        raise UserError(f"'{path}' has {status.st_size:,} bytes; expected at most {most:,}: move it away")


def _in_the_way(path: Path, mode: int) -> UserError:
    kind = KINDS.get(stat.S_IFMT(mode), "another name of a file elsewhere")  # a hard link
    return UserError(f"'{path}' is {kind}; expected a file: move it away or choose another folder with --out")


@contextlib.contextmanager
def new_part(path: Path) -> Iterator[Path]:
    """A new empty file beside another, for its new content, of this writer alone; what fails is removed.

    It is locked while its writer lives, so that the next one can tell and remove what a killed one left.
    """
    remove_left(path.parent)
    part, descriptor = _new_part(path)
    try:
        yield part
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)  # and free the lock, not before the file is in its place or gone


def _new_part(path: Path) -> tuple[Path, int]:
    """A part that is locked, with its descriptor."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # follows no link
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(descriptor, part):
            return part, descriptor
        os.close(descriptor)  # another one took it for what a killed one left, before it was locked


def remove_left(folder: Path) -> None:
    """Remove the parts that killed writers left in a folder, but none whose writer lives, or may live."""
    for part in (folder / name for name in os.listdir(folder) if LEFT.fullmatch(name)):
        with contextlib.suppress(OSError):  # it is gone, a link, locked, or cannot be
            descriptor = os.open(part, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISREG(os.fstat(descriptor).st_mode) and _is_at(descriptor, part):
                    part.unlink()
            finally:
                os.close(descriptor)


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
        UserError: the folder cannot be written, another run has it, or its lock is no file of its own.
    """
    path = folder / LOCK
    with writing(folder):
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
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
        except FileNotFoundError:  # its last owner has just removed the folder
            continue
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):  # a folder, a link, a socket
                raise _in_the_way(path, path.lstat().st_mode) from None
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:  # its owner would be written into that
                raise _in_the_way(path, status.st_mode)
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
        return os.path.samestat(os.fstat(descriptor), path.lstat())
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
