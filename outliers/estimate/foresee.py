"""What a run will need, before it starts, beside what there is; what cannot fit is refused."""

import logging
from typing import NamedTuple

from outliers.errors import UserError
from outliers.estimate.needs import Need, Request, least_seconds, need_of
from outliers.estimate.remedies import refusal_of, refusal_of_downloads
from outliers.estimate.room import Room, room_of
from outliers.terminal.amounts import duration, size
from outliers.terminal.progress import Progress

WORTH_FORESEEING = 0.5  # seconds that a run takes at least
NAME = 33  # characters of a model's name in the table

logger = logging.getLogger(__name__)


class Foreseen(NamedTuple):
    """What a run will need of the machine that foresaw it, what is free there, and why it cannot run, if it cannot."""

    needs: list[Need]
    room: Room
    refusal: str | None


def foresee(runs: list[Request]) -> Foreseen:
    """Find out what a run will need of this machine.

    Nothing is loaded: the measurement is made on one block and one layer of random weights.

    Returns:
        Of a run that may take no longer than foreseeing it does, no needs.
    """
    settings = runs[0].settings
    if sum(map(least_seconds, runs)) < WORTH_FORESEEING:
        runs = []
    needs = []
    with Progress(len(runs), "model") as bar:
        bar.leave = False
        for run in runs:
            bar.set_description(f"{run.job.name}: what it needs")
            needs.append(need_of(run))
            bar.update()
    room = room_of(settings)
    refusals = (refusal_of(run, needed, room) for run, needed in zip(runs, needs, strict=True))
    return Foreseen(needs, room, next(filter(None, refusals), None) or refusal_of_downloads(needs, room))


def announce(foreseen: Foreseen, workers: int = 1) -> None:
    """Log what a run will need, which a command prints, shared by so many workers.

    Raises:
        UserError: it cannot fit; the message names the options that would make it fit.
    """
    if foreseen.needs:
        shared = [
            needed if needed.seconds is None else needed._replace(seconds=needed.seconds / workers)
            for needed in foreseen.needs
        ]
        logger.info(table(shared, foreseen.room))
    if foreseen.refusal:
        raise UserError(foreseen.refusal)


def table(needs: list[Need], room: Room) -> str:
    """A row a model, all together where there are several, and what there is."""
    rows = [_row(_short(needed.model), needed) for needed in needs]
    if len(needs) > 1:
        rows.append(_row("together", _together(needs)))
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


def _row(name: str, needed: Need) -> tuple[str, ...]:
    disk, download = needed.disk + (needed.download or 0), needed.download
    return (
        name,
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


def _short(name: str) -> str:
    return name if len(name) <= NAME else f"…{name[1 - NAME :]}"
