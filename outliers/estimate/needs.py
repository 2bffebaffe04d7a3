"""What the run of a model needs: memory, disk, download and time; and what of these this machine has free."""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE
from transformers import PretrainedConfig

from outliers.errors import UserError
from outliers.estimate.probe import Cost, Costs, Passes, Sizes, find_costs, model_sizes
from outliers.models.load import DTYPES, find_device
from outliers.models.source import SECONDS_FOR_THE_HUB, ask_hub, local_files, local_place
from outliers.models.stream import STATES_ON_GPU
from outliers.models.weight_files import INDEX, WEIGHTS, is_there, listed_shards

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

CGROUPS = Path("/sys/fs/cgroup")
# By what /proc/self/cgroup calls the controller: its folder, the limit, what is used, and how the names of what of that
# are files begin, which the system drops when it needs their memory. Version 2 has one without a name.
GROUP_FILES = {
    "": (".", "memory.max", "memory.current", ""),
    "memory": ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}


class Need(NamedTuple):
    """What the run of one model needs; bytes, and seconds without the download.

    memory: of the process at the peak, on the device that computes. host: of the host's memory at the peak, where the
    device is a GPU. disk: of the file with a streamed model's hidden states. download: what is not in the hub's cache
    yet; None if nobody knows. seconds: None where nothing was tried, because not even one layer fits; memory is then
    the weights alone, and the least that the run needs.
    """

    model: str  # with its revision, if it has one
    memory: int
    host: int
    disk: int
    download: int | None
    seconds: float | None


class Request(NamedTuple):
    """The run of one model.

    dtype, device, stream, memory: as for `stream_model`; stream: whether it is streamed. passes: the parts of the
    measurement; block: tokens of what a part is called with, such as a block of text, a prompt or an example; blocks:
    how many of these there are. left: the share of the measurement that is not finished yet. known: what was found
    out, which requests that share it find out once. options: which of these fields the user may be told to change.
    """

    model: str
    revision: str | None
    config: PretrainedConfig
    dtype: str
    device: str
    block: int
    blocks: int
    stream: bool
    memory: int | None
    passes: Passes
    left: float
    known: dict[tuple, Any]
    options: tuple[str, ...] = ("dtype", "device", "block", "blocks", "stream", "memory")

    @property
    def name(self) -> str:
        """The model with its revision, if it has one."""
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    def under(self, **changes) -> "Request":
        """The same run with other values of some fields."""
        return self._replace(**changes)


def need_of(request: Request) -> Need:
    """What a run needs on this machine. No part of it is tried for which there is no memory."""
    name, device, streamed = request.name, find_device(request.device), request.stream
    free = room_of(request.device).memory
    sizes = _once(request, model_sizes, request.config, request.dtype)
    download = _once(request, _download, request.model, request.revision)
    at_once = sizes.outside + sizes.layer
    if at_once > free:
        return Need(name, at_once if streamed else sizes.weights, 0, 0, download, None)
    costs = _once(request, find_costs, request.config, request.dtype, device, request.block, request.passes)
    of_blocks = [states_of(request), _kept_of_blocks(costs, request)] if streamed else []
    states, limit = sum(of_blocks), math.inf if request.memory is None else request.memory
    on_gpu = device.type == "cuda" and states <= STATES_ON_GPU * (free - sizes.outside)
    on_host = 0
    for count in of_blocks if not on_gpu else ():
        on_host += count if on_host + count <= limit else 0
    memory, host = WORKSPACES + _memory(sizes, costs, request), 0
    if device.type == "cpu":
        memory += PROCESS + on_host
    else:  # for one GPU all weights are on the host first, for several each tensor goes to its place
        memory += states if on_gpu else 0
        host = PROCESS + on_host + (0 if streamed or request.device == "auto" else sizes.weights)
    in_file = 0 if on_gpu else states - on_host
    return Need(name, memory, host, in_file, download, _seconds(request, sizes, costs))


def least_seconds(request: Request) -> float:
    """What a run takes at the very least."""
    sizes = _once(request, model_sizes, request.config, request.dtype)
    a_layer = LEAST_A_LAYER + sizes.layer * request.block * LEAST_A_BYTE
    times = sum(part.times for parts in request.passes for part in parts)
    return request.left * times * request.blocks * sizes.layers * a_layer + sizes.weights / FASTEST


def states_of(request: Request) -> int:
    """Bytes of the hidden states of all blocks between two layers, for each part of a pass."""
    of_block = request.block * request.config.hidden_size * DTYPES[request.dtype].itemsize
    return max(sum(part.times for part in parts) for parts in request.passes) * request.blocks * of_block


def _once(request: Request, find_out: Callable, *arguments):
    """What is found out of a model's configuration, which others may share, such as its revisions; or of its files."""
    written = (a.to_json_string() if isinstance(a, PretrainedConfig) else repr(a) for a in arguments)
    key = find_out, *written
    if key not in request.known:
        request.known[key] = find_out(*arguments)
    return request.known[key]


def _kept_of_blocks(costs: Costs, request: Request) -> int:
    """Bytes that are kept, beside the hidden states, of all blocks of a streamed model until the last layer."""
    return request.blocks * max(cost.first for of_pass in costs.parts for cost in of_pass)


def _memory(sizes: Sizes, costs: Costs, request: Request) -> int:
    """Bytes of tensors on the device and between them, but for hidden states between layers."""
    at_once = 1 if request.stream else sizes.layers

    def beside_weights(cost: Cost) -> int:
        passing = cost.peak + min(HOLES * cost.peak, MOST_HOLES)
        return passing + at_once * cost.added + (sizes.layers - 1) * cost.further

    weights = sizes.outside + sizes.layer if request.stream else sizes.weights
    return weights + max(beside_weights(cost) for of_pass in costs.parts for cost in of_pass)


def _seconds(request: Request, sizes: Sizes, costs: Costs) -> float:
    """To read, copy and compute; a streamed model reads a layer while the one before computes, in each pass."""
    blocks, layers = request.blocks, sizes.layers

    def computing(part, cost: Cost) -> float:
        return part.times * (layers * cost.once + blocks * (cost.rest + layers * cost.layer))

    passes = [
        request.left * sum(computing(part, cost) for part, cost in zip(parts, of_parts, strict=True))
        for parts, of_parts in zip(request.passes, costs.parts, strict=True)
    ]
    reading, dequantizing = (
        _once(request, find_out, request.model, request.revision)
        for find_out in (_seconds_to_read, _seconds_to_dequantize)
    )
    copying, hashing = sizes.weights * costs.copying + dequantizing, sizes.weights * costs.hashing
    if not request.stream:
        return reading + copying + hashing + sum(passes)
    beside = [max(reading, hashing), *(reading for _ in passes[1:])]  # the first pass hashes what it computes with
    return sum(max(*pair) + copying for pair in zip(beside, passes, strict=True))


def _seconds_to_read(model: str, revision: str | None) -> float:
    """Of a checkpoint's files, by the middle of the largest; 0 where they are not there or cannot be read."""
    sizes = {file: file.stat().st_size for file in _files(model, revision)}
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


def _seconds_to_dequantize(model: str, revision: str | None) -> float:
    """Of a GGUF file's tensors, by some in their middle; 0 for other files."""
    files = _files(model, revision)
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


def _files(model: str, revision: str | None) -> list[Path]:
    """The files of a model's weights that are on this machine."""
    if local_place(model):
        with suppress(UserError):  # loading says what is wrong
            return local_files(model, revision)
        return []
    config = try_to_load_from_cache(model, "config.json", revision=revision)
    folder = Path(config).parent if isinstance(config, str) else None
    if folder is None or not (is_there(folder / WEIGHTS) or is_there(folder / INDEX)):
        return []
    names = [WEIGHTS] if is_there(folder / WEIGHTS) else listed_shards(folder)
    return [folder / name for name in names if (folder / name).is_file()]


def _download(model: str, revision: str | None) -> int | None:
    """Bytes of weights that are not on this machine; None if the hub cannot be asked and its cache has none."""
    if local_place(model):
        return 0
    cached = {file.name for file in _files(model, revision)}
    try:
        asked = {"revision": revision, "files_metadata": True, "timeout": SECONDS_FOR_THE_HUB}
        found = ask_hub(lambda hub: hub.model_info(model, **asked))
        sizes = {file.rfilename: file.size or 0 for file in found.siblings}
    except Exception:  # each version of the hub's client raises its HTTP library's own errors when it has no network
        return 0 if cached else None
    for suffix in (".safetensors", ".bin"):  # pickled weights are converted by the hub, to files of their size
        wanted = {name: count for name, count in sizes.items() if name.endswith(suffix) and "/" not in name}
        whole = {name: count for name, count in wanted.items() if name == WEIGHTS}  # or else shards, by any names
        if wanted:
            return sum(count for name, count in (whole or wanted).items() if name not in cached)
    return None


class Room(NamedTuple):
    """Free bytes: memory of the device and of the host, and on the disks of temporary files and of the hub's cache."""

    memory: int = 0
    host: int = 0
    temporary: int = 0
    cache: int = 0


def room_of(device: str) -> Room:
    """What is free for a run on a device, as its option names it."""
    host, home = free_memory(), find_device(device)
    gpus = range(torch.cuda.device_count()) if device == "auto" else [home]
    memory = host if home.type == "cpu" else sum(_free_on_gpu(gpu) for gpu in gpus)
    return Room(memory, host, _free_on_disk(Path(tempfile.gettempdir())), _free_on_disk(Path(HF_HUB_CACHE)))


def free_memory() -> int:
    """What this process can take of the host's memory, which its control groups may limit, with what it has taken."""
    own = Path("/proc/self/cgroup")
    lines = own.read_text().splitlines() if own.exists() else []
    taken = psutil.Process().memory_info()
    files = getattr(taken, "shared", 0)  # which count as available
    return taken.rss - files + min([psutil.virtual_memory().available, *free_in_groups(CGROUPS, lines)])


def free_in_groups(root: Path, lines: list[str]) -> Iterator[int]:
    """What is free in each control group that has a limit.

    root: where the groups' file system is. lines: of /proc/self/cgroup.
    """
    for _, controller, path in (line.split(":", 2) for line in lines):
        if controller not in GROUP_FILES:
            continue
        folder, limit, used, total = GROUP_FILES[controller]
        group = Path(path.lstrip("/"))
        for place in (root / folder / one for one in (group, *group.parents)):
            # "max" is none. In a container the group's own path may not be there, but its root is.
            if (place / limit).exists() and (place / limit).read_text().strip().isdigit():
                numbers = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
                dropped = sum(int(numbers[f"{total}{kind}_file"]) for kind in ("active", "inactive"))
                yield int((place / limit).read_text()) - int((place / used).read_text()) + dropped


def _free_on_gpu(gpu: int | torch.device) -> int:
    """What the driver has free, and what torch keeps in this process without using it."""
    return torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)


def _free_on_disk(folder: Path) -> int:
    """Of the disk on which a folder is or will be."""
    return shutil.disk_usage(next(place for place in (folder, *folder.absolute().parents) if place.exists())).free
