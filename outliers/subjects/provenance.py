"""The provenance of numbers: code, versions, machine, time and memory, reported with every row."""

import ast
import hashlib
import importlib.metadata
import os
import platform
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import cache_from_source
from itertools import chain
from pathlib import Path

import outlier_kernels
import psutil
import torch

import outliers
from outliers.errors import UserError
from outliers.files import write_whole

# Files and folders of `outliers` that determine numbers, as all of `outlier_kernels` does.
ROOMS = ("criterion.py", "models", "text", "tracing", "quantization", "variants", "trainer", "subjects", "metrics")
PARSED = Path(cache_from_source(__file__)).with_suffix(".code")  # cache of the last hash
SECONDS_BETWEEN_SAMPLES = 0.01  # if the high-water mark of the memory cannot be reset
CLEAR, RESIDENT = Path("/proc/self/clear_refs"), "5"  # resets the high-water mark of a process on Linux


def environment(device: str | torch.device) -> dict:
    """Return code, versions, commit, processor and threads of this process, as fields of a row.

    Args:
        device: as in its option: "cpu", "cuda", "cuda:1" or "auto".
    """
    gpus = Counter(map(torch.cuda.get_device_name, _gpus(device)))
    names = ", ".join(f"{count} × {name}" if count > 1 else name for name, count in gpus.items())  # 2 × NVIDIA H100
    return {
        "device": str(device),
        "version": outliers.__version__,
        "code": code_hash(),
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "triton", "bitsandbytes") if _version(name)},
        "device_name": names or processor(),
        "threads": torch.get_num_threads(),
    }


@cache
def code_hash() -> str:
    """Return 12 hex digits of the SHA-256 of the code that determines numbers, equal for a clone and an installation.

    It covers the parsed sources without docstrings, so that comments, docstrings and layout change nothing, and the
    tables beside them. Parsing takes half a second, and is skipped if no byte of the sources has changed.
    """
    package, kernels = (Path(module.__file__).parent for module in (outliers, outlier_kernels))
    places = [*(package / room for room in ROOMS), kernels]
    contents = hashlib.sha256(repr(list(_sources(places))).encode()).hexdigest()
    with suppress(OSError, ValueError):
        known, code = PARSED.read_text().split()
        if known == contents:
            return code
    code = hash_files(places)
    with suppress(UserError):  # the folder of the package is not writable
        write_whole(PARSED, f"{contents} {code}")
    return code


def hash_files(places: list[Path]) -> str:
    """Return the hash of files and folders that `code_hash` describes."""
    digest = hashlib.sha256()
    for name, content in _sources(places):
        digest.update(f"{name}\n".encode())
        digest.update("\n".join(_syntax(ast.parse(content), [])).encode() if name.endswith(".py") else content)
    return digest.hexdigest()[:12]


def _sources(places: list[Path]) -> Iterator[tuple[str, bytes]]:
    for place in places:
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.suffix in (".py", ".yaml"):
                yield path.relative_to(place.parent).as_posix(), path.read_bytes()


def _syntax(node: ast.AST, words: list[str]) -> list[str]:
    """Return a syntax tree as a list of words, without docstrings.

    `ast.dump` would depend on the version of Python, and keep docstrings.
    """
    words.append(type(node).__name__)
    for name in node._fields:
        value = getattr(node, name, None)
        for entry in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(entry, ast.AST):
                words += name, repr(entry)
            elif not (isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Constant)):
                words.append(name)
                _syntax(entry, words)
    words.append(".")
    return words


@dataclass(eq=False)
class Spent:
    """Time, memory and machine of a measurement, as fields of a row; see `measuring`."""

    device: str | torch.device
    sampled: bool
    peaks: list[int] = field(default_factory=list)  # bytes on each GPU, or of the process
    fields: dict = field(default_factory=dict)

    def update(self) -> None:
        """Update the peak memory with the high-water marks since their last reset."""
        if _gpus(self.device):  # a model that is spread over all names the first one as its device
            now = [torch.cuda.max_memory_allocated(number) for number in range(torch.cuda.device_count())]
        elif self.sampled:
            now = [psutil.Process().memory_info().rss]
        else:
            now = [int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024]
        self.peaks = list(map(max, now, self.peaks or now))


_measuring: list[Spent] = []  # running measurements of this process
_lock = threading.Lock()


@contextmanager
def measuring(device: str | torch.device) -> Iterator[Spent]:
    """Measure time and memory of this context: `with measuring("cpu") as spent: ...`, then `spent.fields`.

    The fields are `wall_seconds`; `peak_memory_bytes`, the most that torch held on each GPU meanwhile, added up, or on
    a CPU the most that this process had resident; and those of `environment`. What was in memory before counts: the
    model, torch itself, and memory that is freed but not returned to the system. Measurements may be nested, or run in
    several threads of a process: each has the peak of its own time, whichever thread caused it.

    On a CPU it is the high-water mark of Linux, which is reset. If it cannot be reset, the memory is sampled every 10
    milliseconds, and a shorter peak is missed.

    Args:
        device: as for `environment`.
    """
    start, over = time.perf_counter(), threading.Event()
    with _lock:
        for other in _measuring:
            other.update()
        spent = Spent(device, sampled=not _reset() and not _gpus(device))
        spent.update()
        _measuring.append(spent)
    if spent.sampled:
        threading.Thread(target=_sample, args=(spent, over), daemon=True).start()
    try:
        yield spent
    finally:
        over.set()
        with _lock:
            spent.update()
            _measuring.remove(spent)
    seconds = round(time.perf_counter() - start, 3)
    spent.fields = environment(device) | {"wall_seconds": seconds, "peak_memory_bytes": sum(spent.peaks)}


def joined_provenance(parts: list[dict]) -> dict:
    """Merge the provenance of parts of a measurement, perhaps of several machines, into the fields of its row.

    Seconds are added, and the largest memory counts. Other fields that differ list all values: "AMD EPYC, 2 cores,
    Intel Xeon, 4 cores", "2, 4".
    """
    fields = {}
    for name in dict.fromkeys(chain.from_iterable(parts)):
        values = list(dict.fromkeys(part[name] for part in parts if name in part))
        fields[name] = values[0] if len(values) == 1 else ", ".join(map(str, values))
    seconds = sum(part["wall_seconds"] for part in parts)
    memory = max(part["peak_memory_bytes"] for part in parts)
    return fields | {"wall_seconds": round(seconds, 3), "peak_memory_bytes": memory}


def _reset() -> bool:
    """Reset the high-water marks of all GPUs in use and of this process, and return whether the latter was possible."""
    for number in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        torch.cuda.reset_peak_memory_stats(number)
    try:
        CLEAR.write_text(RESIDENT)
    except OSError:  # not Linux, or forbidden in a container
        return False
    return True


def _sample(spent: Spent, over: threading.Event) -> None:
    while not over.wait(SECONDS_BETWEEN_SAMPLES):
        with _lock:
            spent.update()


@cache
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@cache
def _commit() -> str | None:
    """Return the git commit of the clone that this package runs from, with "+" if files differ from it."""
    clone = Path(outliers.__file__).parent.parent
    if not (clone / ".git").exists():
        return None
    try:
        described = ["git", "-C", str(clone), "describe", "--always", "--dirty=+", "--abbrev=10"]
        return subprocess.run(described, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _gpus(device: str | torch.device) -> list[str]:
    if str(device) == "auto":
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [str(device)] if str(device).startswith("cuda") else []


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"
