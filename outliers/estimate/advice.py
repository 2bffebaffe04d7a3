"""What a run will need, said before it starts, beside what there is; what cannot fit is refused with what would."""

import bisect
import logging
import tempfile
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from huggingface_hub.constants import HF_HUB_CACHE

from outliers.errors import UserError
from outliers.estimate.needs import Need, Request, Room, least_seconds, need_of, room_of
from outliers.models.load import find_device
from outliers.terminal.amounts import duration, parse_bytes, size
from outliers.terminal.progress import Progress

WORTH_FORESEEING = 0.5  # seconds that a run takes at least
NAME = 33  # characters of a model's name in the table
SHORTEST = 32  # tokens: no shorter block is proposed
BFLOAT16 = ("--dtype bfloat16", {"dtype": "bfloat16"})

logger = logging.getLogger(__name__)


class Foreseen(NamedTuple):
    """What a run will need of the machine that foresaw it, what is free there, and why it cannot run, if it cannot."""

    needs: list[Need]
    room: Room = Room()
    refusal: str | None = None


def foresee(requests: list[Request]) -> Foreseen:
    """Find out what models, measured one after the other, will need of this machine.

    Nothing is loaded: the measurement is made on one block and one layer of random weights.

    Returns:
        Of what is finished, and of runs that may take no longer than foreseeing them does, no needs.
    """
    requests = [request for request in requests if request.left]
    if not requests or sum(map(least_seconds, requests)) < WORTH_FORESEEING:
        return Foreseen([])
    needs = []
    with Progress(len(requests), "model") as bar:
        bar.leave = False
        for request in requests:
            bar.set_description(f"{request.name}: what it needs")
            needs.append(need_of(request))
            bar.update()
    room = room_of(requests[0].device)
    refusals = map(_refusal, requests, needs)
    return Foreseen(needs, room, next(filter(None, refusals), None) or _refusal_of_downloads(needs, room))


def announce(foreseen: Foreseen, workers: int = 1) -> None:
    """Log what a run will need, which a command prints, shared by so many workers.

    Raises:
        UserError: it cannot fit; the message names the options that would make it fit.
    """
    if foreseen.needs:
        shared = [need._replace(seconds=need.seconds and need.seconds / workers) for need in foreseen.needs]
        logger.info(table(shared, foreseen.room))
    if foreseen.refusal:
        raise UserError(foreseen.refusal)


def table(needs: list[Need], room: Room) -> str:
    """A row a model, all together where there are several, and what there is."""
    rows = [_row(needed) for needed in (needs if len(needs) == 1 else [*needs, _together(needs)])]
    disk = size(min(room.temporary, room.cache))
    rows.append(("available", size(room.memory), size(room.host), disk, "", ""))
    titles = ("needs", "memory", "host", "disk", "download", "time")
    on_gpu = any(needed.host for needed in needs)
    columns = [column for column in zip(titles, *rows, strict=True) if column[0] != "host" or on_gpu]
    widths = [max(map(len, column)) for column in columns]
    lines = [*zip(*columns, strict=True)]
    lines.insert(1, tuple("-" * width for width in widths))
    places = [f"{{:<{widths[0]}}}", *(f"{{:>{width}}}" for width in widths[1:])]
    return "\n".join("  ".join(places).format(*line).rstrip() for line in lines)


def _row(needed: Need) -> tuple[str, ...]:
    name, disk, download = needed.model, needed.disk + (needed.download or 0), needed.download
    return (
        name if len(name) <= NAME else f"…{name[1 - NAME :]}",
        size(needed.memory),
        size(needed.host),
        size(disk) if disk else "-",
        "unknown" if download is None else size(download) if download else "-",
        "unknown" if needed.seconds is None else f"about {duration(needed.seconds)}",
    )


def _together(needs: list[Need]) -> Need:
    """Of models one after the other: the most of what is given back, the sum of what is not."""
    most = [max(values) for values in list(zip(*needs, strict=True))[1:4]]
    downloads, seconds = ([getattr(needed, field) for needed in needs] for field in ("download", "seconds"))
    return Need("together", *most, *(None if None in values else sum(values) for values in (downloads, seconds)))


def _refusal(request: Request, needed: Need) -> str | None:
    """Why a run cannot fit, and what would make it fit; None if it does."""
    lack = _lack(request, needed)
    return f"'{needed.model}' needs {lack}; {_remedy(request, needed)}" if lack else None


def _refusal_of_downloads(needs: list[Need], room: Room) -> str | None:
    downloads = sum(needed.download or 0 for needed in needs)
    if downloads <= room.cache:
        return None
    return (
        f"the models need {size(downloads)} for downloads and {size(room.cache)} are free in '{HF_HUB_CACHE}'; set "
        "HF_HOME to a folder with more room, or give fewer models"
    )


def _lack(request: Request, needed: Need) -> str | None:
    """What is needed and not there, with what is; None if all is."""
    least, room = "at least " if needed.seconds is None else "", room_of(request.device)
    kind = "memory" if find_device(request.device).type == "cpu" else "GPU memory"
    checks = (
        (needed.memory, room.memory, f"of {kind} in {request.dtype}", ""),
        (needed.host, room.host, "of the host's memory", ""),
        (needed.disk, room.temporary, "of disk for hidden states", f" in '{tempfile.gettempdir()}'"),
        (needed.download or 0, room.cache, "of disk for its download", f" in '{HF_HUB_CACHE}'"),
    )
    lacks = (f"{least}{size(n)} {what} and {size(has)} are free{where}" for n, has, what, where in checks if n > has)
    return next(lacks, None)


def _remedy(request: Request, needed: Need) -> str:
    """What would make a run fit, each computed."""
    room = room_of(request.device)
    if (needed.download or 0) > room.cache:
        return "set HF_HOME to a folder with more room"
    options = _that_fit(request, _single_options) or _that_fit(request, _further_options)
    if needed.disk > room.temporary:
        options.insert(0, "set TMPDIR to a folder with more room")
    return ", ".join(options) or "no option makes it fit on this machine"


def _that_fit(request: Request, options: Callable[[Request], Iterator[tuple[str, dict]]]) -> list[str]:
    """Of the options that the user has, those with which a run fits, and what it then needs."""
    ours = [(option, changes) for option, changes in options(request) if set(changes) <= set(request.options)]
    found = [(option, _fits(request, **changes)) for option, changes in ours]
    return [
        f"with {option} it needs {size(needed.memory)}" + (f" and {size(needed.disk)} of disk" if needed.disk else "")
        for option, needed in found
        if needed
    ]


def _fits(request: Request, **changes) -> Need | None:
    """What a run with other options needs, if that is there."""
    other = request.under(**changes)
    needed = need_of(other)
    return None if _lack(other, needed) else needed


def _single_options(request: Request) -> Iterator[tuple[str, dict]]:
    """Options, and what they change in a request."""
    if not request.stream:
        yield _streamed(request)
    if request.dtype == "float32":
        yield BFLOAT16
    if request.device.startswith("cuda") and torch.cuda.device_count() > 1 and not request.stream:
        yield "--device auto", {"device": "auto"}


def _further_options(request: Request) -> Iterator[tuple[str, dict]]:
    """Where no single option is enough: those of a streamed run, each as large as fits."""
    option, streamed = ("", {}) if request.stream else _streamed(request)
    if not set(streamed) <= set(request.options):
        return
    run = request.under(**streamed)
    found = []
    if request.dtype == "float32" and not request.stream:
        found.append(BFLOAT16)
    if limit := _limit(run):
        found.append((f"--memory {limit}", {"memory": parse_bytes(limit)}))
    blocks = bisect.bisect_left(range(1, run.blocks), True, key=lambda count: not _fits(run, blocks=count))
    if blocks:
        found.append((f"--blocks {blocks}", {"blocks": blocks}))
    else:
        halves = (run.block >> halvings for halvings in range(1, run.block.bit_length()))
        block = next((tokens for tokens in halves if tokens < SHORTEST or _fits(run, block=tokens)), 0)
        found += [(f"--block {block}", {"block": block})] * (block >= SHORTEST)
    yield from ((f"{option} {more}".lstrip(), streamed | changes) for more, changes in found)


def _streamed(request: Request) -> tuple[str, dict]:
    """The option to stream, and what it changes; a streamed model computes on one device."""
    if request.device == "auto":
        device = find_device("auto").type
        return f"--stream --device {device}", {"stream": True, "device": device}
    return "--stream", {"stream": True}


def _limit(run: Request) -> str | None:
    """What a streamed run can have of memory for hidden states and puts them into a file: whole GB or MB."""
    in_file = run.under(memory=1)
    room, needed = room_of(run.device), need_of(in_file)
    free = room.memory - needed.memory if find_device(run.device).type == "cpu" else room.host - needed.host
    free = min(free, needed.disk - 1)  # less than all of them
    if needed.seconds is None or run.memory is not None or free < 1e6:
        return None
    return f"{free // 10**9}GB" if free >= 1e9 else f"{free // 10**6}MB"
