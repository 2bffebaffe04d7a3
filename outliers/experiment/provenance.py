"""What is reported with every number."""

import importlib.metadata
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch

import outliers


def environment(device: torch.device) -> dict:
    """Versions, commit, processor and threads of this process, as fields of a row."""
    return {
        "version": outliers.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "triton", "bitsandbytes") if _version(name)},
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
    }


def cost(start: float, device: torch.device) -> dict:
    """What a measurement since `start`, by `time.perf_counter`, has cost, as fields of a row."""
    return {"wall_seconds": round(time.perf_counter() - start, 3), "peak_memory_bytes": peak_memory(device)}


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch held on a GPU, or that this process had resident on a CPU, since it started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
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


def _processor() -> str:
    """The processor's model name and how many of its cores this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"
