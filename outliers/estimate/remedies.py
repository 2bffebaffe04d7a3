"""Why a run cannot fit, and the options that would make it fit, each computed."""

import bisect
import tempfile
from collections.abc import Callable, Iterator

import torch
from huggingface_hub.constants import HF_HUB_CACHE

from outliers.estimate.needs import Need, Run, need_of
from outliers.estimate.room import Room, room_of
from outliers.models.load import find_device
from outliers.specification.kinds import Settings
from outliers.terminal.amounts import parse_bytes, size

SHORTEST = 32  # tokens: no shorter block is proposed


def refusal_of(run: Run, needed: Need, room: Room) -> str | None:
    lack = _lack(needed, room, run.settings)
    return f"'{needed.model}' needs {lack}; {_remedy(run, needed, room)}" if lack else None


def refusal_of_downloads(needs: list[Need], room: Room) -> str | None:
    downloads = sum(needed.download or 0 for needed in needs)
    if downloads <= room.cache:
        return None
    return (
        f"the models need {size(downloads)} for downloads and {size(room.cache)} are free in '{HF_HUB_CACHE}'; set "
        "HF_HOME to a folder with more room, or give fewer models"
    )


def _lack(needed: Need, room: Room, settings: Settings) -> str | None:
    """What is needed and not there, with what is; None if all is."""
    least = "at least " if needed.seconds is None else ""
    kind = "memory" if find_device(settings.device).type == "cpu" else "GPU memory"
    checks = (
        (needed.memory, room.memory, f"of {kind} in {settings.dtype}", ""),
        (needed.host, room.host, "of the host's memory", ""),
        (needed.disk, room.temporary, "of disk for hidden states", f" in '{tempfile.gettempdir()}'"),
        (needed.download or 0, room.cache, "of disk for its download", f" in '{HF_HUB_CACHE}'"),
    )
    lacks = (f"{least}{size(n)} {what} and {size(has)} are free{where}" for n, has, what, where in checks if n > has)
    return next(lacks, None)


def _remedy(run: Run, needed: Need, room: Room) -> str:
    """What would make a run fit, each computed."""
    if (needed.download or 0) > room.cache:
        return "set HF_HOME to a folder with more room"
    options = _that_fit(run, _single_options) or _that_fit(run, _further_options)
    if needed.disk > room.temporary:
        options.insert(0, "set TMPDIR to a folder with more room")
    return ", ".join(options) or "no option makes it fit on this machine"


def _fits(run: Run, **changes) -> Need | None:
    """What a run with other settings needs, if that is there."""
    other = run.under(**changes)
    needed = need_of(other)
    return None if _lack(needed, room_of(other.settings), other.settings) else needed


def _that_fit(run: Run, options: Callable[[Run], Iterator[tuple[str, dict]]]) -> list[str]:
    found = [(option, _fits(run, **changes)) for option, changes in options(run)]
    return [f"with {option} it needs {_amount(needed)}" for option, needed in found if needed]


def _amount(needed: Need) -> str:
    return size(needed.memory) + (f" and {size(needed.disk)} of disk" if needed.disk else "")


def _single_options(run: Run) -> Iterator[tuple[str, dict]]:
    """Options, and what they change in the settings."""
    settings = run.settings
    if not settings.stream:
        yield _streamed(settings)
    if settings.dtype == "float32":
        yield "--dtype bfloat16", {"dtype": "bfloat16"}
    if settings.device.startswith("cuda") and torch.cuda.device_count() > 1 and not settings.stream:
        yield "--device auto", {"device": "auto"}


def _further_options(run: Run) -> Iterator[tuple[str, dict]]:
    """Where no single option is enough: those of a streamed run, each as large as fits."""
    settings = run.settings
    option, streamed = ("", {}) if settings.stream else _streamed(settings)
    run = run.under(**streamed)
    found = []
    if settings.dtype == "float32" and not settings.stream:
        found.append(("--dtype bfloat16", {"dtype": "bfloat16"}))
    if limit := _limit(run):
        found.append((f"--memory {limit}", {"memory": parse_bytes(limit)}))
    blocks = bisect.bisect_left(range(1, settings.blocks), True, key=lambda count: not _fits(run, blocks=count))
    if blocks:
        found.append((f"--blocks {blocks}", {"blocks": blocks}))
    else:
        halves = (settings.block >> halvings for halvings in range(1, settings.block.bit_length()))
        block = next((tokens for tokens in halves if tokens < SHORTEST or _fits(run, block=tokens)), 0)
        found += [(f"--block {block}", {"block": block})] * (block >= SHORTEST)
    yield from ((f"{option} {more}".lstrip(), streamed | changes) for more, changes in found)


def _streamed(settings: Settings) -> tuple[str, dict]:
    """The option to stream, and what it changes; a streamed model computes on one device."""
    if settings.device == "auto":
        device = find_device("auto").type
        return f"--stream --device {device}", {"stream": True, "device": device}
    return "--stream", {"stream": True}


def _limit(run: Run) -> str | None:
    """What a streamed run can have of memory for hidden states and puts them into a file: whole GB or MB."""
    in_file = run.under(memory=1)
    device = find_device(run.settings.device)
    room, needed = room_of(run.settings), need_of(in_file)
    free = room.memory - needed.memory if device.type == "cpu" else room.host - needed.host
    free = min(free, needed.disk - 1)  # less than all of them
    if needed.seconds is None or run.settings.memory is not None or free < 1e6:
        return None
    return f"{free // 10**9}GB" if free >= 1e9 else f"{free // 10**6}MB"
