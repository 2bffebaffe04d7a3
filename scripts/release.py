"""A release: a wheel and a source distribution in `dist`, checked, and run where nothing of the clone is.

    make release

The source distribution is built of the clone, and the wheel of the source distribution. Both must hold what git tracks,
byte by byte, and nothing else. The wheel is installed into an empty environment in a temporary folder, in the versions
of constraints.txt from wherever pip is told to look, and `STEPS` run there; then the source distribution in its place.
Exits with 1 where anything differs or fails.
"""

import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from packaging.metadata import Metadata

import outliers
from outliers.subjects.provenance import code_hash

ROOT = Path(__file__).parent.parent
LARGEST = 100 * 10**6  # bytes of a file, which the Python Package Index takes unasked
# Where the wheel has the folders of the clone that come along.
PLACES = {
    "outliers/": "outliers/",
    "kernels/outlier_kernels/": "outlier_kernels/",
    "experiments/": "outliers/experiments/",
}
ADDED = {"PKG-INFO", "pyproject.toml", ".gitignore"}  # to a source distribution, by hatchling
MODEL = "pocket/gpt2-0.1m"
HELP, SWEEP = ("--help",), ("sweep", "--model", MODEL, "--block", "64", "--blocks", "2")
# Arguments of `outliers` to a file that they leave in `results`.
STEPS = {HELP: "", SWEEP: "sweep/report.html", ("report", "look", MODEL): "look/gpt2-0.1m/report.html"}

Sums = dict[str, int]  # path to CRC-32


def build(folder: Path, *options: str) -> tuple[Path, Path]:
    """Build the wheel and the source distribution of the clone in a folder."""
    subprocess.run([sys.executable, "-m", "build", *options, "--outdir", str(folder), str(ROOT)], check=True)
    name = f"outliers-{outliers.__version__}"
    return folder / f"{name}-py3-none-any.whl", folder / f"{name}.tar.gz"


def in_wheel(wheel: Path) -> Sums:
    """Return the files that a wheel installs, without its metadata."""
    with zipfile.ZipFile(wheel) as archive:
        return {one.filename: one.CRC for one in archive.infolist() if ".dist-info/" not in one.filename}


def in_sdist(sdist: Path) -> Sums:
    """Return the files of a source distribution that the clone has too."""
    with tarfile.open(sdist) as archive:
        contents = {one.name.partition("/")[2]: archive.extractfile(one).read() for one in archive if one.isfile()}
    return {path: zlib.crc32(content) for path, content in contents.items() if path not in ADDED}


def in_clone(*places: str) -> Sums:
    """Return the files that git tracks in some places."""
    listed = subprocess.run(["git", "ls-files", "-z", *places], cwd=ROOT, capture_output=True, text=True, check=True)
    return {path: zlib.crc32((ROOT / path).read_bytes()) for path in listed.stdout.split("\0") if path}


def expected_in_wheel() -> Sums:
    """Return the tracked files that a wheel must hold, at their places in it."""
    moved = ((place, folder, in_clone(folder)) for folder, place in PLACES.items())
    return {place + path.removeprefix(folder): crc for place, folder, files in moved for path, crc in files.items()}


def expected_in_sdist() -> Sums:
    """Return the tracked files in the places that pyproject.toml lists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    places = project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    return in_clone(*(place.removeprefix("/") for place in places))


def metadata(wheel: Path) -> Metadata:
    """Return the metadata of a wheel.

    Raises:
        ExceptionGroup: a field is missing, unknown or malformed.
    """
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name), validate=True)


def faults(wheel: Path, sdist: Path) -> list[str]:
    """Return what is wrong with the two files, a line each."""
    pairs = {wheel: (in_wheel(wheel), expected_in_wheel()), sdist: (in_sdist(sdist), expected_in_sdist())}
    return [
        *(f"{file.name} has more than {LARGEST:,} bytes" for file in pairs if file.stat().st_size > LARGEST),
        *(f"{file.name} lacks {path}" for file, (held, known) in pairs.items() for path in known.keys() - held.keys()),
        *(
            f"{file.name} holds {path}, unknown or changed"
            for file, (held, known) in pairs.items()
            for path, _ in held.items() - known.items()
        ),
    ]


def try_out(command: list[str], folder: Path, steps: Iterable[tuple[str, ...]] = STEPS, **variables: str) -> None:
    """Run steps in a new folder, outside of the clone.

    Raises:
        RuntimeError: a step failed, left no file, or ran other code than the clone's, or the clone itself.
    """
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    for step in steps:
        with timed(" ".join(["outliers", *step])):
            run([*command, *step], cwd=folder, env=environment)
        if not (folder / "results" / STEPS[step]).exists() and STEPS[step]:
            raise RuntimeError(f"outliers {' '.join(step)} left no results/{STEPS[step]}")
    for line in (folder / "results" / "sweep" / "rows.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        made = row["provenance"]["code"], row["run"]["version"], row["run"]["commit"]
        if made != (code_hash(), outliers.__version__, None):
            raise RuntimeError(
                f"a row says code, version and commit {made}, not those of an installation of this clone"
            )


def run(command: list[str], **options: object) -> None:
    """Run a command.

    Raises:
        RuntimeError: it failed; the message has what it printed.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}")


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Print how long the context takes."""
    start = time.perf_counter()
    yield
    print(f"{time.perf_counter() - start:8.1f} s  {name}", flush=True)


def main() -> int:
    """Build, check, install and run a release; return 1 if a file is wrong, otherwise 0."""
    with timed("built"):
        wheel, sdist = build(ROOT / "dist", "--quiet")
    print(*(f"{file.stat().st_size / 1e6:8.1f} MB {file.name}" for file in (wheel, sdist)), sep="\n")
    metadata(wheel)
    if found := faults(wheel, sdist):
        print(*found, sep="\n")
        return 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run([sys.executable, "-m", "venv", str(folder / "venv")])
        scripts = folder / "venv" / "bin"
        install = [str(scripts / "pip"), "install", "--constraint", str(ROOT / "constraints.txt")]
        for file, options in ((wheel, []), (sdist, ["--no-deps", "--force-reinstall"])):
            with timed(f"installed {file.name}"):
                run([*install, *options, str(file)], cwd=folder)
            try_out([str(scripts / "outliers")], folder / file.suffix.strip("."))
    return 0


if __name__ == "__main__":
    sys.exit(main())
