"""Free room on this machine: memory, which control groups may limit, and disk."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import torch
from huggingface_hub.constants import HF_HUB_CACHE

from outliers.models.load import find_device

CGROUPS = Path("/sys/fs/cgroup")
# By what /proc/self/cgroup calls the controller: its folder, the limit, what is used, and how the names of what of that
# are files begin, which the system drops when it needs their memory. Version 2 has one without a name.
GROUP_FILES = {
    "": (".", "memory.max", "memory.current", ""),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


class Room(NamedTuple):
    """Free bytes: memory of the device and of the host, and on the disks of temporary files and of the hub's cache.

    gpus: memory of all GPUs together, 0 where a CPU computes.
    """

    memory: int = 0
    host: int = 0
    temporary: int = 0
    cache: int = 0
    gpus: int = 0


def room_of(device: str) -> Room:
    """The room that is free for a run on a device, as its option names it."""
    host, home = free_memory(), find_device(device)
    disks = [shutil.disk_usage(_existing(Path(folder))).free for folder in (tempfile.gettempdir(), HF_HUB_CACHE)]
    if home.type == "cpu":
        return Room(host, host, *disks)
    return Room(_free_on_gpu(home), host, *disks, sum(map(_free_on_gpu, range(torch.cuda.device_count()))))


def free_memory() -> int:
    """The memory of the host that this process can take, which its control groups may limit, with what it has taken."""
    groups_file = Path("/proc/self/cgroup")
    lines = groups_file.read_text().splitlines() if groups_file.exists() else []
    taken = psutil.Process().memory_info()
    files = getattr(taken, "shared", 0)  # which count as available
    return taken.rss - files + min([psutil.virtual_memory().available, *free_in_groups(CGROUPS, lines)])


def free_in_groups(root: Path, lines: list[str]) -> Iterator[int]:
    """The memory that is free in each control group that has a limit. lines: of /proc/self/cgroup, below `root`."""
    for _, controller, path in (line.split(":", 2) for line in lines):
        if controller not in GROUP_FILES:
            continue
        folder, limit, used, total = GROUP_FILES[controller]
        group = Path(path.lstrip("/"))
        for place in (root / folder / path_of_group for path_of_group in (group, *group.parents)):
            # "max" is none. In a container the group's own path may not be there, but its root is.
            if (place / limit).exists() and (place / limit).read_text().strip().isdigit():
                numbers = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                dropped = sum(int(numbers[f"{total}{kind}_file"]) for kind in ("active", "inactive"))
                yield int((place / limit).read_text()) - int((place / used).read_text()) + dropped


def _free_on_gpu(gpu: int | torch.device) -> int:
    """The memory that the driver has free, with what torch keeps in this process without using it."""
    return torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)


def _existing(folder: Path) -> Path:
    """A folder, or the one in which it will be."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())
