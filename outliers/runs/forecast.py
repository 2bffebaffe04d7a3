"""Forecast the memory and disk that a run needs from the sizes of its models, and compare them with what is free.

A run that cannot fit is refused with a message that names the options with which it would. The time of a run is
forecast while it runs, see `outliers.terminal.progress`.
"""

import logging
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from transformers import PretrainedConfig

from outliers.errors import UserError
from outliers.metrics.measurement import FLOAT, MemoryNeeds
from outliers.models.anatomy import anatomy_of, decoder_layers, experts_of, family_of, projections, width_of
from outliers.models.anatomy.row import config_of_stack
from outliers.models.load import DTYPES, find_device
from outliers.models.skeleton import skeleton
from outliers.models.source import missing_download
from outliers.models.stream import STATES_ON_GPU
from outliers.quantization.linear import stored_weight
from outliers.runs.free import free_memory
from outliers.subjects.causal import Pretrained
from outliers.terminal.amounts import size

PROCESS = 750_000_000  # bytes of a process with torch, transformers and compiled kernels, and of their files
WORKSPACES = 50_000_000  # bytes of workspace of a GPU's libraries
LEFT = 250_000_000  # bytes of heap that reading weights leaves unused, at most; half of the weights of a small model
SLACK = 2  # factor of the activations of a block, in float32, for what allocators keep of freed tensors
SHARE = 0.25  # of what is free: larger needs are logged
SHORTEST = 32  # tokens: no shorter block is proposed

logger = logging.getLogger(__name__)


class FreeBytes(NamedTuple):
    """Free bytes: memory of the device and of the host, and on the disks of temporary files and of the hub's cache.

    gpus: memory of all GPUs together, 0 if a CPU computes. limited: what limits the host's memory, a phrase for a
    message.
    """

    memory: int = 0
    host: int = 0
    temporary: int = 0
    cache: int = 0
    gpus: int = 0
    limited: str = ""

    def for_weights(self, device: str) -> int:
        """Return the free bytes of a device, given as in its option: under "auto" those of all GPUs."""
        return self.gpus if device == "auto" and self.gpus else self.memory


class Need(NamedTuple):
    """Bytes that the run of one model needs.

    memory: on the computing device; of the whole process if that is a CPU. host: of the host's memory if the device is
    a GPU. disk: of the file with a streamed model's hidden states. download: what is not in the hub's cache yet; None
    if unknown.
    """

    model: str
    memory: int
    host: int
    disk: int
    download: int | None


class ModelShape(NamedTuple):
    """Sizes of a model, as counts of numbers.

    outside: weights outside the decoder layers. layer: weights of the largest layer; of the same layer are projections,
    largest_projection: weights of all its projections, and of the largest one; largest_parameter: its largest
    parameter, which may hold the weights of all experts; experts, expert: weights of all experts, and of one;
    projection_features: input and output features of all projections. layers: number of layers. hidden: width of the
    residual stream. heads: attention heads. cached: keys and values of one token in one layer. vocabulary:
    tokens.
    """

    outside: int
    layer: int
    layers: int
    projections: int
    largest_projection: int
    largest_parameter: int
    experts: int
    expert: int
    projection_features: int
    hidden: int
    heads: int
    cached: int
    vocabulary: int

    @property
    def weights(self) -> int:
        return self.outside + self.layers * self.layer

    def by_expert(self) -> "ModelShape":
        """Return the sizes in memory at once if a layer is read one expert at a time."""
        less = self.experts - self.expert
        smaller = self._replace(layer=self.layer - less, projections=self.projections - less)
        return smaller._replace(largest_parameter=self.largest_projection)


class ModelRun(NamedTuple):
    """The run of one model: sizes, options of the user, and what the measurement keeps in memory."""

    name: str
    shape: ModelShape
    download: int | None
    memory_needs: MemoryNeeds
    dtype: str
    device: str
    stream: bool
    memory: int | None
    block: int
    blocks: int


def forecast(model_runs: list[ModelRun], room: FreeBytes) -> tuple[list[Need], dict[str, str]]:
    """Return the memory and disk that models need, measured one after the other, and which of them cannot fit.

    A need that takes a large share of what is free is logged in a line.

    Raises:
        UserError: no model can fit; the message names the options that would make the first one fit.

    Returns:
        The needs of models that fit; and for each model that cannot, by its name, such a message.
    """
    needs, refused, lines = [], {}, []
    for model_run in model_runs:
        needed = need_of(model_run, room)
        if lack := _shortage(model_run, needed, room, 1):
            refused.setdefault(model_run.name, f"{lack}; {_advice(model_run, needed, room)}")
        else:
            needs.append(needed)
            lines.append(_shortage(model_run, needed, room, SHARE))
    if len(refused) == len({model_run.name for model_run in model_runs}):
        raise UserError(next(iter(refused.values())))
    needs = [needed for needed in needs if needed.model not in refused]
    downloads = sum({needed.model: needed.download or 0 for needed in needs}.values())
    if downloads > room.cache:
        raise UserError(
            f"the models need {size(downloads)} for downloads and {size(room.cache)} are free in '{HF_HUB_CACHE}'; set "
            "HF_HOME to a folder with more room, or give fewer models"
        )
    for line in dict.fromkeys(filter(None, lines)):
        logger.info(line)
    return needs, refused


def model_run_of(subject: Pretrained, memory_needs: MemoryNeeds) -> ModelRun:
    """Return the run of a subject that is a model."""
    experiment, family = subject.experiment, family_of(subject.config)
    return ModelRun(
        subject.name,
        model_shape(subject.config),
        missing_download(subject.model, subject.revision),
        memory_needs,
        experiment.dtype,
        experiment.device,
        experiment.stream,
        experiment.memory,
        memory_needs.block or (family.vocabulary(subject.config) if family.name_of else experiment.block),
        experiment.sequences,
    )


_shapes: dict[str, ModelShape] = {}  # by configuration as JSON, which revisions of a model share


def model_shape(config: PretrainedConfig) -> ModelShape:
    """Return the sizes of a model from its configuration; tied weights count once."""
    written = config.to_json_string()
    if written in _shapes:
        return _shapes[written]
    model, stack = skeleton(config), config_of_stack(config, anatomy_of(config))
    layers = [sum(map(torch.numel, (*layer.parameters(), *layer.buffers()))) for layer in decoder_layers(model)]
    number = layers.index(max(layers))
    weights = [stored_weight(part.module) for part in projections(model, number)]
    experts = experts_of(model).get(number)
    of_experts = [tensor for tensor in experts.parameters() if tensor.ndim == 3] if experts else []
    hidden, heads = width_of(config), getattr(stack, "num_attention_heads", None) or 0  # a recurrent model has none
    key_heads = getattr(stack, "num_key_value_heads", None) or heads
    _shapes[written] = ModelShape(
        sum(map(torch.numel, (*model.parameters(), *model.buffers()))) - sum(layers),
        max(layers),
        len(layers),
        sum(map(torch.numel, weights)),
        max(map(torch.numel, weights)),
        max(map(torch.numel, decoder_layers(model)[number].parameters())),
        sum(map(torch.numel, of_experts)),
        sum(tensor.numel() // len(tensor) for tensor in of_experts),
        sum(sum(weight.shape) for weight in weights),
        hidden,
        heads,
        2 * key_heads * (getattr(stack, "head_dim", None) or hidden // max(heads, 1)),
        getattr(config, "vocab_size", None) or config.num_labels,
    )
    return _shapes[written]


def need_of(model_run: ModelRun, room: FreeBytes) -> Need:
    """Return the memory and disk that a run needs on a machine with this free room."""
    shape, needs, itemsize = model_run.shape, model_run.memory_needs, DTYPES[model_run.dtype].itemsize
    layers, outside = 1 if model_run.stream else shape.layers, itemsize * shape.outside
    others = itemsize * needs.other_models * shape.weights
    if model_run.stream and itemsize * shape.layer > (model_run.memory or math.inf):
        shape = shape.by_expert()
    weights = outside + itemsize * layers * shape.layer + others
    most = max((codes + copies * itemsize for codes, copies in needs.per_weight), default=0)
    codes = layers * shape.projections * most
    tokens = needs.batch * model_run.block
    attention = needs.attention_matrices * shape.heads * model_run.block
    passing = tokens * (shape.projection_features + 2 * shape.hidden + attention)
    passing = max(passing, needs.logit_matrices * tokens * shape.vocabulary) + 2 * shape.largest_projection * any(
        map(any, needs.per_weight)
    )
    # Experts that a file stores one by one, or in another dtype, are joined.
    joined = FLOAT * (shape.largest_parameter - shape.largest_projection)
    memory = weights + joined + codes + itemsize * shape.layers * shape.cached * needs.cached + SLACK * FLOAT * passing
    # Hidden states and traced values of all blocks: each of the two is in one place as a whole.
    numbers = model_run.stream * model_run.block * model_run.blocks * shape.hidden
    states = [numbers * needs.variant_count * itemsize, numbers * needs.kept_states * FLOAT]
    on_gpu = sum(states) if room.gpus and sum(states) <= STATES_ON_GPU * (room.memory - outside) else 0
    on_host, limit = 0, math.inf if model_run.memory is None else model_run.memory
    for kept in () if on_gpu else states:
        on_host += kept if on_host + kept <= limit else 0
    disk = sum(states) - on_gpu - on_host
    if not room.gpus:
        return Need(model_run.name, PROCESS + min(weights // 2, LEFT) + memory + on_host, 0, disk, model_run.download)
    # For one GPU all weights are on the host first; for several each tensor goes straight to its GPU.
    host = PROCESS + on_host + (0 if model_run.stream or model_run.device == "auto" else itemsize * shape.weights)
    return Need(model_run.name, WORKSPACES + memory + on_gpu, host, disk, model_run.download)


def _shortage(model_run: ModelRun, needed: Need, room: FreeBytes, share: float) -> str | None:
    """Name the first memory or disk of which more than a share of what is free is needed; None if there is none."""
    kind, memory = "GPU memory" if room.gpus else "memory", room.for_weights(model_run.device)
    amounts = (
        (needed.memory, memory, f"of {kind} in {model_run.dtype}", "" if room.gpus else room.limited),
        (needed.host, room.host, "of the host's memory", room.limited),
        (needed.disk, room.temporary, "of disk for hidden states", f" in '{tempfile.gettempdir()}'"),
        (needed.download or 0, room.cache, "of disk for its download", f" in '{HF_HUB_CACHE}'"),
    )
    lacks = (f"{size(n)} {what} and {size(has)} are free{where}" for n, has, what, where in amounts if n > share * has)
    lack = next(lacks, None)
    return lack and f"'{needed.model}' needs {lack}"


def _advice(model_run: ModelRun, needed: Need, room: FreeBytes) -> str:
    """Return options that would make a run fit, with the memory and disk that it then needs.

    Each option that suffices alone is named; if none does, options of a streamed run are named.
    """
    if (needed.download or 0) > room.cache:
        return "set HF_HOME to a folder with more room"
    on_one = {"device": "cuda" if room.gpus else "cpu"} if model_run.device == "auto" else {}
    stream = {} if model_run.stream else {"stream": True} | on_one
    bfloat16 = {"dtype": "bfloat16"} if model_run.dtype == "float32" else {}
    several = model_run.device.startswith("cuda") and room.gpus > room.memory and not model_run.stream
    fewer: Iterable[dict] = ({"blocks": blocks} for blocks in range(model_run.blocks - 1, 0, -1))
    halves = [{"block": block} for halvings in range(1, 9) if (block := model_run.block >> halvings) >= SHORTEST]
    limit = _limit(model_run._replace(**stream), room)
    advice = list(_that_fit(model_run, room, [stream, bfloat16, {"device": "auto"} if several else {}]))
    for options in () if advice else ([bfloat16], [limit], chain(fewer, halves)):
        advice += islice(_that_fit(model_run, room, [stream | option for option in options]), 1)
    if needed.disk > room.temporary:
        advice.insert(0, "set TMPDIR to a folder with more room")
    return ", ".join(advice) or f"no option makes it fit{room.limited or ' on this machine'}"


def _that_fit(model_run: ModelRun, room: FreeBytes, options: Iterable[dict]) -> Iterator[str]:
    """Yield the options of the command with which a run fits, each with the memory and disk that it then needs."""
    for changes in options:
        changed = model_run._replace(**changes)
        needed = need_of(changed, room)
        if changes and set(changes) <= model_run.memory_needs.options and not _shortage(changed, needed, room, 1):
            memory = changes.get("memory", 0)
            amount = f"{memory // 10**9}GB" if memory >= 10**9 else f"{memory // 10**6}MB"
            written = {"stream": "--stream", "memory": f"--memory {amount}"}
            option = " ".join(written.get(name, f"--{name} {value}") for name, value in changes.items())
            disk = f" and {size(needed.disk)} of disk" if needed.disk else ""
            yield f"with {option} it needs {size(needed.memory)}{disk}"


def _limit(run: ModelRun, room: FreeBytes) -> dict:
    """Return the memory for hidden states that a streamed run can take, in whole GB or MB; the rest goes to a file."""
    least = need_of(run._replace(memory=1), room)
    free = min(room.host - least.host if room.gpus else room.memory - least.memory, least.disk - 1)  # not all of them
    unit = 10**9 if free >= 10**9 else 10**6
    return {"memory": free // unit * unit} if run.memory is None and free >= unit else {}


def room_of(device: str) -> FreeBytes:
    """Return the room that is free for a run on a device, given as in its option."""
    (host, limited), home = free_memory(), find_device(device)
    folders = [Path(folder) for folder in (tempfile.gettempdir(), HF_HUB_CACHE)]
    existing = [next(place for place in (folder, *folder.absolute().parents) if place.exists()) for folder in folders]
    disks = [shutil.disk_usage(folder).free for folder in existing]
    if home.type == "cpu":
        return FreeBytes(host, host, *disks, limited=limited)
    gpus = sum(map(_free_on_gpu, range(torch.cuda.device_count())))
    return FreeBytes(_free_on_gpu(home), host, *disks, gpus, limited)


def _free_on_gpu(gpu: int | torch.device) -> int:
    """Return the free memory of a GPU, with what torch has reserved in this process without using it."""
    return torch.cuda.mem_get_info(gpu)[0] + torch.cuda.memory_reserved(gpu) - torch.cuda.memory_allocated(gpu)
