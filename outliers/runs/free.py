"""The memory that this process can take, within the limits of the machine, its control groups and its own."""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from outliers.errors import UserError
from outliers.terminal.amounts import size

CGROUPS = Path("/sys/fs/cgroup")
# By the controller's name in /proc/self/cgroup: its folder, the file of its limit, that of the memory in use, and the
# prefix of the counters of file pages, which the system can evict. Version 2 has one controller, without a name.
GROUP_FILES = {
    "": (".", "memory.max", "memory.current", ""),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


class MemoryLimit(NamedTuple):
    """A limit of this process (`ulimit`).

    field: psutil's name of the memory that counts against the limit. option: the command that sets it. imports: bytes
    that torch, transformers, compiled kernels and a large tokenizer take of it, measured with the CPU build of torch;
    with less, an import fails or never returns, or a library aborts.
    """

    field: str
    option: str
    imports: int


LIMITS = {
    resource.RLIMIT_AS: MemoryLimit("vms", "ulimit -v", 1_500_000_000),
    resource.RLIMIT_DATA: MemoryLimit("data", "ulimit -d", 600_000_000),
}


def free_memory() -> tuple[int, str]:
    """Return the bytes of host memory that this process holds or can still take, and what limits them.

    The limit is a phrase for a message, empty if it is the machine's own memory.
    """
    groups_file = Path("/proc/self/cgroup")
    lines = groups_file.read_text().splitlines() if groups_file.exists() else []
    memory = psutil.Process().memory_info()
    files = getattr(memory, "shared", 0)  # these pages count as available, too
    free = [(psutil.virtual_memory().available, "")]
    free += [(amount, " in its control group") for amount in free_in_groups(CGROUPS, lines)]
    free += [(amount, f" under `{limit.option}`") for limit, amount in free_under_limits()]
    least, limited = min(free)
    return max(0, memory.rss - files + least), limited


def free_in_groups(root: Path, lines: list[str]) -> Iterator[int]:
    """Yield the free bytes of each control group that has a limit.

    Args:
        root: folder of the control groups.
        lines: of /proc/self/cgroup.
    """
    for _, controller, path in (line.split(":", 2) for line in lines):
        if controller not in GROUP_FILES:
            continue
        folder, limit, used, total = GROUP_FILES[controller]
        group = Path(path.lstrip("/"))
        for place in (root / folder / path_of_group for path_of_group in (group, *group.parents)):
            # "max" is no limit. In a container the path of the group may be missing, but its root exists.
            if (most := _text(place / limit).strip()).isdigit():
                numbers = dict(line.split() for line in _text(place / "memory.stat").splitlines())
                dropped = sum(int(numbers.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
                yield int(most) - int(_text(place / used) or 0) + dropped


def _text(file: Path) -> str:
    """Return the text of a file of a control group; empty if a container hides it."""
    try:
        return file.read_text()
    except OSError:
        return ""


def free_under_limits() -> Iterator[tuple[MemoryLimit, int]]:
    """Yield each limit of this process with the bytes that it leaves."""
    for name, limit in LIMITS.items():
        most, _ = resource.getrlimit(name)
        if most != resource.RLIM_INFINITY:
            yield limit, most - getattr(psutil.Process().memory_info(), limit.field)


def check_room_for_imports() -> None:
    """Raise UserError if a limit of this process leaves too little memory for importing torch and transformers."""
    for limit, amount in () if "torch" in sys.modules else free_under_limits():
        if amount < limit.imports:
            raise UserError(
                f"`{limit.option}` leaves {size(max(0, amount))}; expected at least {size(limit.imports)} for "
                "torch and transformers, and more for a model: set a higher limit"
            )
