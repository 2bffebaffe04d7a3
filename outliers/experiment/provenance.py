"""What is reported with every number."""

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import torch

import outliers


def environment(device: str | torch.device) -> dict:
    """Versions, commit, processor and threads of this process, as fields of a row.

    device: as it was asked for: "cpu", "cuda", "cuda:1" or "auto".
    """
    return {
        "version": outliers.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "triton", "bitsandbytes") if _version(name)},
        "device": str(device),
        "device_name": _names(_gpus(device)) or _processor(),
        "threads": torch.get_num_threads(),
    }


def cost(start: float, device: str | torch.device) -> dict:
    """What a measurement since `start`, by `time.perf_counter`, has cost, as fields of a row."""
    return {"wall_seconds": round(time.perf_counter() - start, 3), "peak_memory_bytes": peak_memory(device)}


def total_cost(costs: list[dict]) -> dict:
    """What parts of a measurement have cost together: seconds add up, the largest memory counts."""
    seconds = sum(cost["wall_seconds"] for cost in costs)
    return {"wall_seconds": round(seconds, 3), "peak_memory_bytes": max(cost["peak_memory_bytes"] for cost in costs)}


def peak_memory(device: str | torch.device) -> int:
    """Bytes: the most that torch held on each GPU, added up, or that this process had resident on a CPU, since it
    started."""
    if _gpus(device):  # a model that is spread over all names the first one as its device
        return sum(torch.cuda.max_memory_allocated(number) for number in range(torch.cuda.device_count()))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The git commit of the clone that this package runs from; "+" where files differ from it."""
    clone = Path(outliers.__file__).parent.parent
    if not (clone / ".git").exists():
        return None
    try:
        described = ["git", "-C", str(clone), "describe", "--always", "--dirty=+", "--abbrev=10"]
        return subprocess.run(described, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _gpus(device: str | torch.device) -> list[str]:
    """The GPUs that a device, as it was asked for, stands for."""
    if str(device) == "auto":
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return [str(device)] if str(device).startswith("cuda") else []


def _names(gpus: list[str]) -> str:
    """What GPUs are called, equal ones together: "2 × NVIDIA H100"."""
    names = Counter(map(torch.cuda.get_device_name, gpus))
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in names.items())


def _processor() -> str:
    """The processor's model name and how many of its cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"
