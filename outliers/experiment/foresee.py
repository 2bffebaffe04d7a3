"""What a run will need, before it starts: memory, disk, download and time; what cannot fit is refused."""

import bisect
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE

from outliers.errors import UserError
from outliers.evaluation.calibration import Calibration, Cost, Passes, Sizes, calibrate, model_sizes
from outliers.experiment.job import Job, progress
from outliers.experiment.room import Room, room_of
from outliers.experiment.spec import Settings, parse_bytes
from outliers.models.load import DTYPES, SECONDS_FOR_THE_HUB, find_device, find_model

SAMPLE = 64_000_000  # bytes of a checkpoint that are read to see how fast that is
PROCESS = 360_000_000  # bytes of a process that has imported torch and transformers
WORKSPACES = 50_000_000  # bytes of the libraries that compute
# What allocators keep between tensors that come and go, as a share of these. glibc has a heap for those below 32 MB: in
# traces of a GPT-2-small shape it took 3.8 times as much more as was alive. Never more than the second number.
HOLES, MOST_HOLES = 3, 300_000_000
WORTH_FORESEEING = 0.5  # seconds that a run takes at least
# Seconds at least to pass a block through a layer, and for each byte of its weights and token of the block beside; and
# bytes a second at most with which weights are loaded.
LEAST_A_LAYER, LEAST_A_BYTE, FASTEST = 1e-3, 1e-12, 1e9
SHORTEST = 32  # tokens: no shorter block is proposed
NAME = 33  # characters of a model's name in the table
SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
TIMES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


logger = logging.getLogger(__name__)


class Need(NamedTuple):
    """What the run of one model needs; bytes, and seconds without the download.

    memory: of the process at the peak, on the device that computes. host: of the host's memory at the peak, where the
    device is a GPU. disk: of the file with a streamed model's hidden states. download: what is
    not in the hub's cache yet; None if nobody knows. seconds: None where nothing was calibrated, because not even one
    layer fits; memory is then the weights alone, and the least that the run needs.
    """

    model: str  # with its revision, if it has one
    memory: int
    host: int
    disk: int
    download: int | None
    seconds: float | None


class _Run(NamedTuple):
    """The run of one model. reading: seconds to read its files. known: what `_remembered` remembers."""

    job: Job
    settings: Settings
    passes: Passes
    left: float
    download: int | None
    reading: float
    known: dict[tuple, Any]

    def under(self, **changes) -> "_Run":
        """The same run with other settings."""
        return self._replace(settings=self.settings.model_copy(update=changes))


class Foreseen(NamedTuple):
    """What a run will need of the machine that foresaw it, what is free there, and why it cannot run, if it cannot."""

    needs: list[Need]
    room: Room
    refusal: str | None


def foresee(jobs: list[Job], settings: Settings, passes: Passes, left: float = 1.0) -> Foreseen:
    """Find out what a run will need of this machine.

    Nothing is loaded: the measurement is made on one block and one layer of random weights.

    Args:
        jobs: the models, which are measured one after the other.
        settings: of the experiment.
        passes: the parts of the measurement of a model, see `outliers.experiment.parts`.
        left: the share of the measurement that is not finished yet.

    Returns:
        Of a run that may take no longer than foreseeing it does, no needs.
    """
    known: dict[tuple, Any] = {}
    runs = [_run(job, settings, passes, left, known) for job in jobs if left]
    if sum(map(_least_seconds, runs)) < WORTH_FORESEEING:
        runs = []
    needs = []
    with progress(len(runs), "model") as bar:
        bar.leave = False
        for run in runs:
            bar.set_description(f"{run.job.name}: what it needs")
            needs.append(_need(run))
            bar.update()
    room = room_of(settings)
    refusals = (_refusal(run, needed, room) for run, needed in zip(runs, needs, strict=True))
    return Foreseen(needs, room, next(filter(None, refusals), None) or _refusal_of_downloads(needs, room))


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


def _refusal(run: _Run, needed: Need, room: Room) -> str | None:
    lack = _lack(needed, room, run.settings)
    return f"'{needed.model}' needs {lack}; {_remedy(run, needed, room)}" if lack else None


def _refusal_of_downloads(needs: list[Need], room: Room) -> str | None:
    downloads = sum(needed.download or 0 for needed in needs)
    if downloads <= room.cache:
        return None
    return (
        f"the models need {size(downloads)} for downloads and {size(room.cache)} are free in '{HF_HUB_CACHE}'; set "
        "HF_HOME to a folder with more room, or give fewer models"
    )


def need(job: Job, settings: Settings, passes: Passes, left: float = 1.0) -> Need:
    """What the run of one model will need on this machine; arguments as of `foresee`."""
    return _need(_run(job, settings, passes, left, {}))


def _run(job: Job, settings: Settings, passes: Passes, left: float, known: dict[tuple, Any]) -> _Run:
    return _Run(job, settings, passes, left, _download(job), _seconds_to_read(job), known)


def _need(run: _Run) -> Need:
    settings, device = run.settings, find_device(run.settings.device)
    sizes = _remembered(run, model_sizes, settings.dtype)
    at_once = sizes.outside + sizes.layer
    if at_once > room_of(settings).memory:
        return Need(run.job.name, at_once if settings.stream else sizes.weights, 0, 0, run.download, None)
    calibration = _remembered(run, calibrate, settings.dtype, device, settings.block, run.passes)
    states = _states(run) if settings.stream else 0
    in_file = settings.memory is not None and states > settings.memory
    on_host = 0 if in_file else states
    memory, host = WORKSPACES + _memory(sizes, calibration, settings), 0
    if device.type == "cpu":
        memory += PROCESS + on_host
    else:  # for one GPU all weights are on the host first, for several each tensor goes to its place
        host = PROCESS + on_host + (0 if settings.stream or settings.device == "auto" else sizes.weights)
    return Need(run.job.name, memory, host, states if in_file else 0, run.download, _seconds(run, sizes, calibration))


def _least_seconds(run: _Run) -> float:
    """What a run takes at the very least."""
    sizes, settings = _remembered(run, model_sizes, run.settings.dtype), run.settings
    a_layer = LEAST_A_LAYER + sizes.layer * settings.block * LEAST_A_BYTE
    times = sum(part.times for parts in run.passes for part in parts)
    return run.left * times * settings.blocks * sizes.layers * a_layer + sizes.weights / FASTEST


def _remembered(run: _Run, make: Callable, *arguments):
    """What is made of a model's configuration; models, such as revisions of one, may have the same."""
    key = make, run.job.config.to_json_string(), repr(arguments)
    if key not in run.known:
        run.known[key] = make(run.job.config, *arguments)
    return run.known[key]


def _states(run: _Run) -> int:
    """Bytes of the hidden states of all blocks between two layers, for each part of a pass."""
    of_block = run.settings.block * run.job.config.hidden_size * DTYPES[run.settings.dtype].itemsize
    return max(sum(part.times for part in parts) for parts in run.passes) * run.settings.blocks * of_block


def _memory(sizes: Sizes, calibration: Calibration, settings: Settings) -> int:
    """Bytes of tensors on the device and between them, but for hidden states between layers."""
    costs = [cost for of_pass in calibration.costs for cost in of_pass]
    others, blocks = sizes.layers - 1, settings.blocks

    def beside_weights(cost: Cost) -> int:
        passing = cost.peak + min(HOLES * cost.peak, MOST_HOLES)
        if settings.stream:  # what is kept of all blocks is kept until the last layer
            return passing + cost.added + (blocks - 1) * cost.first + blocks * others * cost.further
        return passing + sizes.layers * cost.added + others * cost.further

    weights = sizes.outside + sizes.layer if settings.stream else sizes.weights
    return weights + max(map(beside_weights, costs))


def _seconds(run: _Run, sizes: Sizes, calibration: Calibration) -> float:
    """To read, copy and compute; a streamed model reads a layer while the one before computes, in each pass."""
    blocks, layers = run.settings.blocks, sizes.layers

    def computing(part, cost: Cost) -> float:
        return part.times * (layers * cost.once + blocks * (cost.rest + layers * cost.layer))

    passes = [
        run.left * sum(computing(part, cost) for part, cost in zip(parts, costs, strict=True))
        for parts, costs in zip(run.passes, calibration.costs, strict=True)
    ]
    copying = sizes.weights * calibration.copying
    if not run.settings.stream:
        return run.reading + copying + sizes.weights * calibration.hashing + sum(passes)
    return sum(max(run.reading, seconds) + copying for seconds in passes)


def _seconds_to_read(job: Job) -> float:
    """Of a checkpoint's files, by the middle of the largest; 0 where they are not there or cannot be read."""
    sizes = {file: file.stat().st_size for file in _files(job)}
    if not any(sizes.values()):
        return 0.0
    largest = max(sizes, key=sizes.get)
    start = time.perf_counter()
    try:
        with largest.open("rb", buffering=0) as file:
            file.seek(max(0, sizes[largest] - SAMPLE) // 2)
            count = len(file.read(SAMPLE))
    except OSError:  # loading says what is wrong
        return 0.0
    return (time.perf_counter() - start) * sum(sizes.values()) / count


def _is_local(job: Job) -> bool:
    return job.model.startswith("pocket/") or Path(job.model).is_dir()


def _files(job: Job) -> list[Path]:
    """The safetensors files of a model that are on this machine."""
    if _is_local(job):
        return list(Path(find_model(job.model, job.revision).path).glob("*.safetensors"))
    config = try_to_load_from_cache(job.model, "config.json", revision=job.revision)
    return list(Path(config).parent.glob("*.safetensors")) if isinstance(config, str) else []


def _download(job: Job) -> int | None:
    """Bytes of weights that are not on this machine; None if the hub cannot be asked and its cache has none."""
    if _is_local(job):
        return 0
    cached = {file.name for file in _files(job)}
    try:
        asked = {"revision": job.revision, "files_metadata": True, "timeout": SECONDS_FOR_THE_HUB}
        sizes = {file.rfilename: file.size or 0 for file in HfApi().model_info(job.model, **asked).siblings}
    except Exception:  # each version of the hub's client raises its HTTP library's own errors when it has no network
        return 0 if cached else None
    for suffix in (".safetensors", ".bin"):  # pickled weights are converted by the hub, to files of their size
        wanted = {name: count for name, count in sizes.items() if name.endswith(suffix) and "/" not in name}
        if wanted:
            return sum(count for name, count in wanted.items() if name not in cached)
    return None


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


def _remedy(run: _Run, needed: Need, room: Room) -> str:
    """What would make a run fit, each computed."""
    if (needed.download or 0) > room.cache:
        return "set HF_HOME to a folder with more room"
    options = _that_fit(run, _single_options) or _that_fit(run, _further_options)
    if needed.disk > room.temporary:
        options.insert(0, "set TMPDIR to a folder with more room")
    return ", ".join(options) or "no option makes it fit on this machine"


def _fits(run: _Run, **changes) -> Need | None:
    """What a run with other settings needs, if that is there."""
    other = run.under(**changes)
    needed = _need(other)
    return None if _lack(needed, room_of(other.settings), other.settings) else needed


def _that_fit(run: _Run, options: Callable[[_Run], Iterator[tuple[str, dict]]]) -> list[str]:
    found = [(option, _fits(run, **changes)) for option, changes in options(run)]
    return [f"with {option} it needs {_amount(needed)}" for option, needed in found if needed]


def _amount(needed: Need) -> str:
    return size(needed.memory) + (f" and {size(needed.disk)} of disk" if needed.disk else "")


def _single_options(run: _Run) -> Iterator[tuple[str, dict]]:
    """Options, and what they change in the settings."""
    settings = run.settings
    if not settings.stream:
        yield _streamed(settings)
    if settings.dtype == "float32":
        yield "--dtype bfloat16", {"dtype": "bfloat16"}
    if settings.device.startswith("cuda") and torch.cuda.device_count() > 1 and not settings.stream:
        yield "--device auto", {"device": "auto"}


def _further_options(run: _Run) -> Iterator[tuple[str, dict]]:
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


def _limit(run: _Run) -> str | None:
    """What a streamed run can have of memory for hidden states and puts them into a file: whole GB or MB."""
    in_file = run.under(memory=1)
    device = find_device(run.settings.device)
    room, needed = room_of(run.settings), _need(in_file)
    free = room.memory - needed.memory if device.type == "cpu" else room.host - needed.host
    free = min(free, _states(in_file) - 1)
    if needed.seconds is None or run.settings.memory is not None or free < 1e6:
        return None
    return f"{free // 10**9}GB" if free >= 1e9 else f"{free // 10**6}MB"


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


def size(count: float) -> str:
    """Bytes for people, decimal: 54 MB, 27.1 GB, 265 GB."""
    unit, factor = next((one for one in SIZES if count >= one[1]), SIZES[-1])
    return f"{count / factor:.{1 if factor >= 1e9 and count < 100 * factor else 0}f} {unit}"


def duration(seconds: float) -> str:
    """Seconds for people: 8 s, 3 min, 2.5 h."""
    unit, factor = next((one for one in TIMES if seconds >= 1.5 * one[1]), TIMES[-1])
    return f"{max(seconds / factor, 1):.{1 if factor >= 3600 and seconds < 10 * factor else 0}f} {unit}"
