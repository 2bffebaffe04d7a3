"""What the run of a model needs: memory, disk, download and time, from a calibration of its measurement."""

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import try_to_load_from_cache

from outliers.errors import UserError
from outliers.estimate.probe import Calibration, Cost, Passes, Sizes, calibrate, model_sizes
from outliers.estimate.room import room_of
from outliers.experiment.job import Job
from outliers.models.load import DTYPES, find_device
from outliers.models.source import SECONDS_FOR_THE_HUB, ask_hub, local_files, local_place
from outliers.models.stream import STATES_ON_GPU
from outliers.models.weight_files import INDEX, WEIGHTS, is_there, listed_shards
from outliers.specification.kinds import Settings

SAMPLE = 64_000_000  # bytes of a checkpoint that are read to see how fast that is
DEQUANTIZED = 4_000_000  # bytes of a GGUF file that are dequantized to see how fast that is
PROCESS = 360_000_000  # bytes of a process that has imported torch and transformers
WORKSPACES = 50_000_000  # bytes of the libraries that compute
# What allocators keep between tensors that come and go, as a share of these. glibc has a heap for those below 32 MB: in
# traces of a GPT-2-small shape it took 3.8 times as much more as was alive. Never more than the second number.
HOLES, MOST_HOLES = 3, 300_000_000
# Seconds at least to pass a block through a layer, and for each byte of its weights and token of the block beside; and
# bytes a second at most with which weights are loaded.
LEAST_A_LAYER, LEAST_A_BYTE, FASTEST = 1e-3, 1e-12, 1e9


class Need(NamedTuple):
    """What the run of one model needs; bytes, and seconds without the download.

    memory: of the process at the peak, on the device that computes. host: of the host's memory at the peak, where the
    device is a GPU. disk: of the file with a streamed model's hidden states. download: what is not in the hub's cache
    yet; None if nobody knows. seconds: None where nothing was calibrated, because not even one layer fits; memory is
    then the weights alone, and the least that the run needs.
    """

    model: str  # with its revision, if it has one
    memory: int
    host: int
    disk: int
    download: int | None
    seconds: float | None


class Run(NamedTuple):
    """The run of one model.

    passes: see `outliers.experiment.parts`. left: the share of it that is not finished yet. known: what was found out,
    which runs that share it find out once.
    """

    job: Job
    settings: Settings
    passes: Passes
    left: float
    known: dict[tuple, Any]

    def under(self, **changes) -> "Run":
        """The same run with other settings."""
        return self._replace(settings=self.settings.model_copy(update=changes))


def need_of(run: Run) -> Need:
    """What a run needs on this machine. Nothing is calibrated for which there is no memory."""
    settings, device = run.settings, find_device(run.settings.device)
    free = room_of(settings).memory
    sizes, download = _of_config(run, model_sizes, settings.dtype), _of_job(run, _download)
    at_once = sizes.outside + sizes.layer
    if at_once > free:
        return Need(run.job.name, at_once if settings.stream else sizes.weights, 0, 0, download, None)
    calibration = _of_config(run, calibrate, settings.dtype, device, settings.block, run.passes)
    of_blocks = [states_of(run), _kept_of_blocks(calibration, settings)] if settings.stream else []
    states, limit = sum(of_blocks), math.inf if settings.memory is None else settings.memory
    on_gpu = device.type == "cuda" and states <= STATES_ON_GPU * (free - sizes.outside)
    on_host = 0
    for size in of_blocks if not on_gpu else ():
        on_host += size if on_host + size <= limit else 0
    memory, host = WORKSPACES + _memory(sizes, calibration, settings), 0
    if device.type == "cpu":
        memory += PROCESS + on_host
    else:  # for one GPU all weights are on the host first, for several each tensor goes to its place
        memory += states if on_gpu else 0
        host = PROCESS + on_host + (0 if settings.stream or settings.device == "auto" else sizes.weights)
    in_file = 0 if on_gpu else states - on_host
    return Need(run.job.name, memory, host, in_file, download, _seconds(run, sizes, calibration))


def least_seconds(run: Run) -> float:
    """What a run takes at the very least."""
    sizes, settings = _of_config(run, model_sizes, run.settings.dtype), run.settings
    a_layer = LEAST_A_LAYER + sizes.layer * settings.block * LEAST_A_BYTE
    times = sum(part.times for parts in run.passes for part in parts)
    return run.left * times * settings.blocks * sizes.layers * a_layer + sizes.weights / FASTEST


def _of_config(run: Run, find_out: Callable, *arguments):
    """What is found out of a model's configuration; models, such as revisions of one, may have the same."""
    key = find_out, run.job.config.to_json_string(), repr(arguments)
    if key not in run.known:
        run.known[key] = find_out(run.job.config, *arguments)
    return run.known[key]


def _of_job(run: Run, find_out: Callable):
    """What is found out of a model's files."""
    key = find_out, run.job.name
    if key not in run.known:
        run.known[key] = find_out(run.job)
    return run.known[key]


def states_of(run: Run) -> int:
    """Bytes of the hidden states of all blocks between two layers, for each part of a pass."""
    of_block = run.settings.block * run.job.config.hidden_size * DTYPES[run.settings.dtype].itemsize
    return max(sum(part.times for part in parts) for parts in run.passes) * run.settings.blocks * of_block


def _kept_of_blocks(calibration: Calibration, settings: Settings) -> int:
    """Bytes that are kept, beside the hidden states, of all blocks of a streamed model until the last layer."""
    return settings.blocks * max(cost.first for of_pass in calibration.costs for cost in of_pass)


def _memory(sizes: Sizes, calibration: Calibration, settings: Settings) -> int:
    """Bytes of tensors on the device and between them, but for hidden states between layers."""
    costs = [cost for of_pass in calibration.costs for cost in of_pass]
    at_once = 1 if settings.stream else sizes.layers

    def beside_weights(cost: Cost) -> int:
        passing = cost.peak + min(HOLES * cost.peak, MOST_HOLES)
        return passing + at_once * cost.added + (sizes.layers - 1) * cost.further

    weights = sizes.outside + sizes.layer if settings.stream else sizes.weights
    return weights + max(map(beside_weights, costs))


def _seconds(run: Run, sizes: Sizes, calibration: Calibration) -> float:
    """To read, copy and compute; a streamed model reads a layer while the one before computes, in each pass."""
    blocks, layers = run.settings.blocks, sizes.layers

    def computing(part, cost: Cost) -> float:
        return part.times * (layers * cost.once + blocks * (cost.rest + layers * cost.layer))

    passes = [
        run.left * sum(computing(part, cost) for part, cost in zip(parts, costs, strict=True))
        for parts, costs in zip(run.passes, calibration.costs, strict=True)
    ]
    reading = _of_job(run, _seconds_to_read)
    copying = sizes.weights * calibration.copying + _of_job(run, _seconds_to_dequantize)
    hashing = sizes.weights * calibration.hashing
    if not run.settings.stream:
        return reading + copying + hashing + sum(passes)
    beside = [max(reading, hashing), *(reading for _ in passes[1:])]  # the first pass hashes what it computes with
    return sum(max(*pair) + copying for pair in zip(beside, passes, strict=True))


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


def _seconds_to_dequantize(job: Job) -> float:
    """Of a GGUF file's tensors, by some in their middle; 0 for other files."""
    files = _files(job)
    if not files or files[0].suffix == ".safetensors":
        return 0.0
    from outliers.models.gguf.reader import read_gguf

    tensors = list(read_gguf(files[0]).tensors.values())
    sizes = [sum(end - start for _, start, end in tensor.spans) for tensor in tensors]
    start, count = time.perf_counter(), 0
    for tensor, size in list(zip(tensors, sizes, strict=True))[len(tensors) // 2 :]:
        tensor.read()
        count += size
        if count >= DEQUANTIZED:
            break
    return (time.perf_counter() - start) * sum(sizes) / count


def _files(job: Job) -> list[Path]:
    """The files of a model's weights that are on this machine."""
    if local_place(job.model):
        with suppress(UserError):  # loading says what is wrong
            return local_files(job.model, job.revision)
        return []
    config = try_to_load_from_cache(job.model, "config.json", revision=job.revision)
    folder = Path(config).parent if isinstance(config, str) else None
    if folder is None or not (is_there(folder / WEIGHTS) or is_there(folder / INDEX)):
        return []
    names = [WEIGHTS] if is_there(folder / WEIGHTS) else listed_shards(folder)
    return [folder / name for name in names if (folder / name).is_file()]


def _download(job: Job) -> int | None:
    """Bytes of weights that are not on this machine; None if the hub cannot be asked and its cache has none."""
    if local_place(job.model):
        return 0
    cached = {file.name for file in _files(job)}
    try:
        asked = {"revision": job.revision, "files_metadata": True, "timeout": SECONDS_FOR_THE_HUB}
        found = ask_hub(lambda hub: hub.model_info(job.model, **asked))
        sizes = {file.rfilename: file.size or 0 for file in found.siblings}
    except Exception:  # each version of the hub's client raises its HTTP library's own errors when it has no network
        return 0 if cached else None
    for suffix in (".safetensors", ".bin"):  # pickled weights are converted by the hub, to files of their size
        wanted = {name: count for name, count in sizes.items() if name.endswith(suffix) and "/" not in name}
        whole = {name: count for name, count in wanted.items() if name == WEIGHTS}  # or else shards, by any names
        if wanted:
            return sum(count for name, count in (whole or wanted).items() if name not in cached)
    return None
