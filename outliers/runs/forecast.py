"""The memory and disk that a run needs, by the sizes of its models alone, beside what is free.

A run that cannot fit is refused, and the message says with which options it would. How long a run takes it finds out
itself, see `outliers.terminal.progress`.
"""

import bisect
import logging
import math
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from outlier_kernels.formats import FORMATS
from transformers import PretrainedConfig

from outliers.errors import UserError
from outliers.metrics.measurement import Keeps
from outliers.models.anatomy import anatomy_of, config_of_stack, decoder_layers, family_of, projections, width_of
from outliers.models.load import DTYPES
from outliers.models.skeleton import skeleton
from outliers.models.source import missing_download
from outliers.models.stream import STATES_ON_GPU
from outliers.quantization.linear import stored_weight
from outliers.quantization.schemes import Scheme
from outliers.runs.room import Room
from outliers.terminal.amounts import parse_bytes, size
from outliers.tracing.result import STREAM

PROCESS = 750_000_000  # bytes of a process with torch, transformers and compiled kernels, and of their files
WORKSPACES = 50_000_000  # bytes that a GPU's libraries compute in
LEFT = 250_000_000  # bytes at most that reading weights leaves of the heap; of small models it is half of the weights
FLOAT = 4  # bytes of the numbers that are made while a block passes: norms and products are in float32
SLACK = 2  # times these, for what allocators keep between tensors that come and go
SHARE = 0.25  # of what is free, from which on a need is worth a line
SHORTEST = 32  # tokens: no shorter block is proposed
BFLOAT16 = ("--dtype bfloat16", {"dtype": "bfloat16"})

logger = logging.getLogger(__name__)


class Shape(NamedTuple):
    """Counts of numbers in a model.

    outside, layer: weights outside of the layers, and of the largest layer. layers: how many there are. projections,
    largest: in that layer, weights of all projections and of the largest one. features: what its projections read and
    make of a token. read: what the first projection of each role reads. hidden, heads, keys, vocabulary: of the
    residual stream, of attention, of keys and values of a token and layer, and of tokens.
    """

    outside: int
    layer: int
    layers: int
    projections: int
    largest: int
    features: int
    read: dict[str, int]
    hidden: int
    heads: int
    keys: int
    vocabulary: int

    @property
    def weights(self) -> int:
        """All of them."""
        return self.outside + self.layers * self.layer


class Need(NamedTuple):
    """Bytes that the run of one model needs.

    memory: on the device that computes, of the process where that is a CPU. host: of the host's memory, where the
    device is a GPU. disk: of the file with a streamed model's hidden states. download: what is not in the hub's cache
    yet; None if nobody knows.
    """

    model: str
    memory: int
    host: int
    disk: int
    download: int | None


class Request(NamedTuple):
    """The run of one model: what is asked of it, by options of the user, and what the measurement keeps."""

    name: str
    shape: Shape
    download: int | None
    keeps: Keeps
    dtype: str
    device: str
    stream: bool
    memory: int | None
    block: int
    blocks: int


def forecast(requests: list[Request], room: Room) -> tuple[list[Need], dict[str, str]]:
    """The needs of models that are measured one after the other; said in a line where it is much of what is free.

    Raises:
        UserError: none can fit; the message names the options that would make the first one fit.

    Returns:
        The needs, and by the names of models that cannot fit such a message.
    """
    needs = [need_of(request, room) for request in requests]
    refused: dict[str, str] = {}
    for request, needed in zip(requests, needs, strict=True):
        if lack := _lack(request, needed, room, 1):
            refused.setdefault(request.name, f"{lack}; {_remedy(request, needed, room)}")
    if len(refused) == len({request.name for request in requests}):
        raise UserError(next(iter(refused.values())))
    needs = [needed for needed in needs if needed.model not in refused]
    requests = [request for request in requests if request.name not in refused]
    downloads = sum({needed.model: needed.download or 0 for needed in needs}.values())
    if downloads > room.cache:
        raise UserError(
            f"the models need {size(downloads)} for downloads and {size(room.cache)} are free in '{HF_HUB_CACHE}'; set "
            "HF_HOME to a folder with more room, or give fewer models"
        )
    lacks = (_lack(request, needed, room, SHARE) for request, needed in zip(requests, needs, strict=True))
    for line in dict.fromkeys(filter(None, lacks)):
        logger.info(line)
    return needs, refused


def request_of(subject: Any, keeps: Keeps) -> Request:
    """The run of a subject that is a model."""
    settings, family = subject.settings, family_of(subject.config)
    wanted = {name: getattr(settings, name, None) for name in ("dtype", "device", "memory")}
    return Request(
        subject.name,
        shape_of(subject.config),
        missing_download(subject.model, subject.revision),
        keeps,
        **wanted,
        stream=getattr(settings, "stream", False),
        block=keeps.block or (family.vocabulary(subject.config) if family.name_of else settings.block),
        blocks=getattr(settings, "sequences", 1),
    )


_shapes: dict[str, Shape] = {}  # by configuration, which revisions of a model share


def shape_of(config: PretrainedConfig) -> Shape:
    """The sizes of a model, from its configuration; what is tied counts once."""
    written = config.to_json_string()
    if written not in _shapes:
        _shapes[written] = _shape(config)
    return _shapes[written]


def _shape(config: PretrainedConfig) -> Shape:
    model, stack = skeleton(config), config_of_stack(config, anatomy_of(config))
    layers = [sum(map(torch.numel, (*layer.parameters(), *layer.buffers()))) for layer in decoder_layers(model)]
    number = layers.index(max(layers))
    weights = [(part.role, stored_weight(part.module)) for part in projections(model) if part.layer == number]
    hidden, heads = width_of(config), stack.num_attention_heads
    key_heads = getattr(stack, "num_key_value_heads", None) or heads
    return Shape(
        sum(map(torch.numel, (*model.parameters(), *model.buffers()))) - sum(layers),
        max(layers),
        len(layers),
        sum(weight.numel() for _, weight in weights),
        max(weight.numel() for _, weight in weights),
        sum(sum(weight.shape) for _, weight in weights),
        {role: weight.shape[1] for role, weight in reversed(weights)},
        hidden,
        heads,
        2 * key_heads * (getattr(stack, "head_dim", None) or hidden // heads),
        getattr(config, "vocab_size", None) or config.num_labels,
    )


def need_of(request: Request, room: Room) -> Need:
    """The needs of a run where so much is free."""
    shape, keeps, itemsize = request.shape, request.keeps, DTYPES[request.dtype].itemsize
    at_once = 1 if request.stream else shape.layers
    weights = itemsize * (shape.outside + at_once * shape.layer)
    if keeps.int8:
        weights -= (itemsize - 1) * at_once * shape.projections
    weights += keeps.others * itemsize * shape.weights
    codes = max((_codes(schemes, itemsize) for schemes in keeps.schemes), default=0)
    quantizing = 2 * FLOAT * shape.largest if codes or keeps.int8 else 0
    cache = itemsize * shape.layers * shape.keys * keeps.cached
    memory = weights + at_once * shape.projections * codes + cache + SLACK * (_passing(request) + quantizing)
    states = list(_of_blocks(request, itemsize)) if request.stream else []
    limit, on_host = math.inf if request.memory is None else request.memory, 0
    on_gpu = room.gpus and sum(states) <= STATES_ON_GPU * (room.memory - itemsize * shape.outside)
    for count in () if on_gpu else states:
        on_host += count if on_host + count <= limit else 0
    in_file = 0 if on_gpu else sum(states) - on_host
    if not room.gpus:
        memory += PROCESS + min(weights // 2, LEFT)
        return Need(request.name, memory + on_host, 0, in_file, request.download)
    # For one GPU all weights are on the host first, for several each tensor goes to its place.
    host = PROCESS + on_host + (0 if request.stream or request.device == "auto" else itemsize * shape.weights)
    return Need(request.name, WORKSPACES + memory + (sum(states) if on_gpu else 0), host, in_file, request.download)


def _codes(schemes: tuple[Scheme, ...], itemsize: int) -> int:
    """Bytes that schemes hold together of a weight beside itself; under transforms that is another one too."""
    kinds = dict.fromkeys(scheme.weight_operand for scheme in schemes if scheme.weights or scheme.transforms)
    return sum(
        (1 if weights and FORMATS[weights.format].integers else FLOAT) + (itemsize if transforms else 0)
        for weights, _, transforms, *_ in kinds
    )


def _passing(request: Request) -> int:
    """Bytes that are made while what is measured at once passes a layer, and the head."""
    shape, keeps = request.shape, request.keeps
    tokens, square = keeps.batch * request.block, keeps.batch * request.block**2
    layer = tokens * (shape.features + 2 * shape.hidden) + keeps.attention * shape.heads * square
    return FLOAT * max(layer, keeps.logits * tokens * shape.vocabulary)


def _of_blocks(request: Request, itemsize: int) -> Iterator[int]:
    """Bytes that are kept of all blocks of a streamed model between two layers: hidden states, and what is traced."""
    shape, keeps, tokens = request.shape, request.keeps, request.block * request.blocks
    yield keeps.variants * tokens * shape.hidden * itemsize
    yield tokens * sum(shape.read.get(role, shape.hidden) * (itemsize if role in STREAM else 1) for role in keeps.roles)


def _lack(request: Request, needed: Need, room: Room, share: float) -> str | None:
    """The first of what is needed that is more than a share of what is there, with that; None if nothing is."""
    kind = "GPU memory" if room.gpus else "memory"
    memory = room.gpus if request.device == "auto" and room.gpus else room.memory
    amounts = (
        (needed.memory, memory, f"of {kind} in {request.dtype}", ""),
        (needed.host, room.host, "of the host's memory", ""),
        (needed.disk, room.temporary, "of disk for hidden states", f" in '{tempfile.gettempdir()}'"),
        (needed.download or 0, room.cache, "of disk for its download", f" in '{HF_HUB_CACHE}'"),
    )
    lacks = (f"{size(n)} {what} and {size(has)} are free{where}" for n, has, what, where in amounts if n > share * has)
    lack = next(lacks, None)
    return lack and f"'{needed.model}' needs {lack}"


def _remedy(request: Request, needed: Need, room: Room) -> str:
    """The options that would make a run fit, each computed."""
    if (needed.download or 0) > room.cache:
        return "set HF_HOME to a folder with more room"
    options = _that_fit(request, room, _single_options) or _that_fit(request, room, _further_options)
    if needed.disk > room.temporary:
        options.insert(0, "set TMPDIR to a folder with more room")
    return ", ".join(options) or "no option makes it fit on this machine"


Options = Iterator[tuple[str, dict]]  # and what they change in a request


def _that_fit(request: Request, room: Room, options: Callable[[Request, Room], Options]) -> list[str]:
    """Of the options that the user has, those with which a run fits, and what it then needs."""
    fitting = []
    for option, changes in options(request, room):
        if set(changes) <= request.keeps.options and (needed := _fits(request._replace(**changes), room)):
            disk = f" and {size(needed.disk)} of disk" if needed.disk else ""
            fitting.append(f"with {option} it needs {size(needed.memory)}{disk}")
    return fitting


def _fits(request: Request, room: Room) -> Need | None:
    """The needs of a run, if that much is free."""
    needed = need_of(request, room)
    return None if _lack(request, needed, room, 1) else needed


def _single_options(request: Request, room: Room) -> Options:
    if not request.stream:
        yield _streamed(request, room)
    if request.dtype == "float32":
        yield BFLOAT16
    if request.device.startswith("cuda") and room.gpus > room.memory and not request.stream:
        yield "--device auto", {"device": "auto"}


def _further_options(request: Request, room: Room) -> Options:
    """Advice where no single option is enough: the options of a streamed run, each as large as fits."""
    option, streamed = ("", {}) if request.stream else _streamed(request, room)
    if not set(streamed) <= request.keeps.options:
        return
    run, options = request._replace(**streamed), []
    if request.dtype == "float32" and not request.stream:
        options.append(BFLOAT16)
    if limit := _limit(run, room):
        options.append((f"--memory {limit}", {"memory": parse_bytes(limit)}))
    counts = range(1, run.blocks)
    blocks = bisect.bisect_left(counts, True, key=lambda count: not _fits(run._replace(blocks=count), room))
    if blocks:
        options.append((f"--blocks {blocks}", {"blocks": blocks}))
    else:
        halves = (run.block >> halvings for halvings in range(1, run.block.bit_length()))
        block = next((tokens for tokens in halves if tokens < SHORTEST or _fits(run._replace(block=tokens), room)), 0)
        options += [(f"--block {block}", {"block": block})] * (block >= SHORTEST)
    yield from ((f"{option} {more}".lstrip(), streamed | changes) for more, changes in options)


def _streamed(request: Request, room: Room) -> tuple[str, dict]:
    """The option to stream, and what it changes; a streamed model computes on one device."""
    if request.device == "auto":
        device = "cuda" if room.gpus else "cpu"
        return f"--stream --device {device}", {"stream": True, "device": device}
    return "--stream", {"stream": True}


def _limit(run: Request, room: Room) -> str | None:
    """The memory that a streamed run can take for hidden states, others being in a file: whole GB or MB."""
    needed = need_of(run._replace(memory=1), room)
    free = room.host - needed.host if room.gpus else room.memory - needed.memory
    free = min(free, needed.disk - 1)  # less than all of them
    if run.memory is not None or free < 1e6:
        return None
    return f"{free // 10**9}GB" if free >= 1e9 else f"{free // 10**6}MB"
