"""The GPU memory of a model at inference, and whether hardware can hold it (Table 3)."""

import inspect
import itertools
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.pytorch_utils import Conv1D

from outliers.errors import UserError, reason_of
from outliers.metrics.measurement import Measurement
from outliers.metrics.records import BITS, GIB, Fits, MemoryMetric
from outliers.models.anatomy import anatomy_of, context_length, family_of
from outliers.models.anatomy.experts import holds_experts
from outliers.models.anatomy.row import config_of_stack
from outliers.models.anatomy.weights import device_of
from outliers.models.skeleton import skeleton
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache

ATTENTION = (
    torch.ops.aten.scaled_dot_product_attention.default,
    torch.ops.aten._scaled_dot_product_attention_math.default,
)


class Footprint(NamedTuple):
    """The memory that a model requires at inference, in bytes except for `parameters`, `decoder_layers` and `context`.

    embeddings, rest: weights outside the layers, which always have 16 bits: all embeddings (including a tied head), and
    all others. layers: by bits, the weights of each layer, an encoder's first. cache: keys and values, which the last
    `decoder_layers` layers share evenly. activations: the largest amount alive at once, beside weights and cache.
    context: tokens per sequence. loaded: by bits, all weights as transformers loads them, some of them in float32.
    """

    parameters: int
    embeddings: int
    layers: dict[int, list[int]]
    rest: int
    cache: int
    decoder_layers: int
    activations: int
    context: int
    loaded: dict[int, int]

    def weights(self, bits: int) -> int:
        """Return the bytes of all weights, with the projections of the layers in 16 or 8 bits."""
        return self.embeddings + sum(self.layers[bits]) + self.rest


def measure_footprint(config: PretrainedConfig, context: int, batch: int = 1) -> Footprint:
    """Measure the memory of a model on the meta device, by passing a prompt without values through it.

    In 16 bits all weights are bfloat16. In 8 bits a projection of a layer has a byte per weight and a float32 scale per
    output, as from `quantize(model, "llm.int8", keep="int8")`, and the rest stays in 16 bits. Tied weights count once;
    tables that a model computes from its configuration, such as GPT-J's of sines, count too. When it loads a model in
    float16, and so in 8 bits, transformers keeps the modules of `_keep_in_fp32_modules` in float32: T5's `wo`.

    Activations are those of the 16-bit model, with the attention function that transformers chooses for it, in the pass
    over a prompt of the whole context that ends in the logits of the last token: no later pass of a generation needs
    more. An encoder-decoder, such as T5, computes the logits of its whole target, a masked language model those of all
    tokens; masked language models and image classifiers have no cache.

    context: tokens per sequence; at most the model's own limit. With an encoder and a decoder, half of them are the
    source. A vision model has the number of tokens of a picture.

    Raises:
        UserError: transformers has no such model, or cannot run it on the meta device.
    """
    context = min(context, context_length(config) or context)
    with meta_errors(config):
        model = skeleton(config, torch.bfloat16)
        inputs = prompt(model, context, batch)
        cache, activations = measure_pass(model, inputs)
        lists = lists_of_layers(model)
        layers = [layer for layers in lists for layer in layers]
        context = family_of(config).vocabulary(config) if "pixel_values" in inputs else context
    sizes = {bits: _weights(model, layers, bits) for bits in BITS}
    loaded = {bits: _weights(model, layers, bits, kept_in_float32(model)) for bits in BITS}
    embeddings, _, rest = sizes[16]
    return Footprint(
        model.num_parameters(),
        embeddings,
        {bits: of_layers for bits, (_, of_layers, _) in sizes.items()},
        rest,
        cache,
        len(lists[-1]),
        activations,
        context,
        {bits: embeddings + sum(of_layers) + rest for bits, (embeddings, of_layers, rest) in loaded.items()},
    )


@contextmanager
def meta_errors(config: PretrainedConfig) -> Iterator[None]:
    """Raise errors of transformers with a model on the meta device as a `UserError` of one line."""
    try:
        yield
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        kind, reason = config.model_type, reason_of(error, 300)
        raise UserError(f"cannot run a model of type '{kind}' without its weights: {reason}") from None


@torch.inference_mode()
def measure_pass(model: PreTrainedModel, inputs: dict) -> tuple[int, int]:
    """Return the bytes of the cache, and the largest amount alive beside cache and weights, in a pass over inputs."""
    with Storages() as storages:
        output = model(**inputs)
    cache = list(_cached(getattr(output, "past_key_values", None)))
    return storages.size(cache), storages.peak(without=cache)


def prompt(model: PreTrainedModel, context: int, batch: int) -> dict:
    """Return the arguments of the first call of a generation, for ids (batch, context) without padding.

    For a model that generates nothing, return those of its only call.
    """
    if model.main_input_name == "pixel_values":
        tower = config_of_stack(model.config, anatomy_of(model.config))
        sizes = (batch, tower.num_channels, tower.image_size, tower.image_size)
        return {"pixel_values": torch.zeros(sizes, dtype=model.dtype, device=device_of(model))}
    ids = torch.zeros(batch, context, dtype=torch.int64, device=device_of(model))
    if not model.can_generate():
        return {"input_ids": ids}
    if model.config.is_encoder_decoder:
        return {"input_ids": ids[:, context // 2 :], "decoder_input_ids": ids[:, : context // 2], "use_cache": True}
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    return {"input_ids": ids, "use_cache": True, **last}


def _cached(part) -> Iterator[torch.Tensor]:
    """Yield the tensors of a cache, under any attribute of its layers."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, (list, tuple)):
        for item in part:
            yield from _cached(item)
    elif isinstance(part, (Cache, CacheLayerMixin)):
        yield from _cached(list(vars(part).values()))


class Storages(TorchDispatchMode):
    """A mode in which all storages that operators allocate are recorded, on any device, until they are freed.

    An operator counts by its outputs: fused attention has no matrix of scores. Views and earlier storages count
    nothing.
    """

    def __init__(self):
        super().__init__()
        self.changes: list[tuple[int, int]] = []  # number of a storage, bytes allocated (negative when freed)
        self.numbers: dict[int, int] = {}  # id of a living storage to its number
        self.count = itertools.count()

    def __torch_dispatch__(self, operator, _types, arguments=(), keywords=None):
        keywords = keywords or {}
        self._note((arguments, keywords), made=False)
        if operator in ATTENTION and not _can_be_fused(*arguments[:2], **keywords):
            with self:
                return operator.decompose(*arguments, **keywords)
        result = operator(*arguments, **keywords)
        self._note(result, made=True)
        return result

    def _note(self, tree, made: bool) -> None:
        for storage in _storages(tree_leaves(tree)):
            if id(storage) not in self.numbers:
                number, size = next(self.count), storage.nbytes() if made else 0
                self.numbers[id(storage)] = number
                self.changes.append((number, size))
                weakref.finalize(storage, self._gone, id(storage), number, size).atexit = False

    def _gone(self, identity: int, number: int, size: int) -> None:
        del self.numbers[identity]
        self.changes.append((number, -size))

    def alive(self) -> int:
        """Return the bytes that were allocated in this mode and are alive."""
        return sum(size for _, size in self.changes)

    def size(self, tensors: Iterable) -> int:
        """Return the bytes of the storages of tensors that were allocated in this mode and are alive."""
        numbers = self._numbers_of(tensors)
        return sum(size for number, size in self.changes if number in numbers)

    def peak(self, without: Iterable = ()) -> int:
        """Return the largest number of bytes alive at once, without the storages of some tensors."""
        ignored = self._numbers_of(without)
        sizes = (size for number, size in self.changes if number not in ignored)
        return max(itertools.accumulate(sizes, initial=0))

    def _numbers_of(self, tensors: Iterable) -> set[int]:
        return {self.numbers[id(storage)] for storage in _storages(tensors)}


def _can_be_fused(query: torch.Tensor, key: torch.Tensor, enable_gqa: bool = False, **_keywords) -> bool:
    """Return whether kernels attend without a matrix of scores: not if Falcon's one key head serves all queries."""
    return enable_gqa or query.shape[-3] == key.shape[-3]


def _storages(leaves: Iterable) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor))


def lists_of_layers(model: PreTrainedModel) -> list[nn.ModuleList]:
    """Return the outermost module lists: a decoder's layers, or an encoder's and a decoder's."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = {id(module) for outer in lists for module in outer.modules() if module is not outer}
    return [module for module in lists if id(module) not in inner]


def kept_in_float32(model: PreTrainedModel) -> set[int]:
    """Return the ids of the parameters that transformers keeps in float32 when it loads the model in float16."""
    fields = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    kept = [f".{part}." for field in fields for part in getattr(model, field, None) or ()]
    return {id(tensor) for name, tensor in model.named_parameters() if any(part in f".{name}." for part in kept)}


def _weights(
    model: PreTrainedModel, layers: list[nn.Module], bits: int, kept: Collection[int] = ()
) -> tuple[int, list[int], int]:
    """Return the bytes of the embeddings, of each layer, and of the rest; tied weights count where they come first.

    kept: ids of the parameters that are in float32.
    """
    numbers = {module: number for number, layer in enumerate(layers) for module in layer.modules()}
    sizes, counted = [0] * (len(layers) + 2), set()  # the rest before the last, the embeddings last

    def place(module: nn.Module) -> int:
        return numbers.get(module, -1 if isinstance(module, nn.Embedding) else len(layers))

    for module in sorted(model.modules(), key=place):
        codes = bits == 8 and module in numbers
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if id(tensor) in counted:
                continue
            counted.add(id(tensor))
            if id(tensor) in kept:
                sizes[place(module)] += 4 * tensor.numel()
            elif codes and (scales := _scales(module, name, tensor)):
                sizes[place(module)] += tensor.numel() + 4 * scales
            else:
                sizes[place(module)] += tensor.nbytes
    return sizes[-1], sizes[:-2], sizes[-2]


def _scales(module: nn.Module, name: str, tensor: torch.Tensor) -> int:
    """Return the number of outputs, each with a scale, of the projections of a weight; 0 for other tensors."""
    if holds_experts(module) and tensor.ndim == 3:
        return len(tensor) * tensor.shape[2 if module.is_transposed else 1]
    projects = isinstance(module, (nn.Linear, Conv1D)) and name == "weight"
    return tensor.shape[isinstance(module, Conv1D)] if projects else 0


def fits(footprint: Footprint, bits: int, gpus: int, gigabytes: float, headroom: float) -> bool:
    """Return whether equal GPUs can hold a model that is distributed like accelerate's `device_map="auto"`.

    Embeddings, every layer and the rest are placed in this order, each as a whole: on the current GPU if there is room
    for it and its share of the cache, else on the next. So embeddings are on the first GPU, and what follows the last
    layer is on the last.

    gigabytes: memory of one GPU, GiB. headroom: GiB that are kept free on each, beside activations, for what is not
    counted: the driver's context, workspaces of kernels, fragmentation.
    """
    room = (gigabytes - headroom) * GIB - footprint.activations
    without_cache = len(footprint.layers[bits]) - footprint.decoder_layers
    share = footprint.cache / footprint.decoder_layers
    layers = [size + share * (number >= without_cache) for number, size in enumerate(footprint.layers[bits])]
    used, free = 1, room
    for piece in (footprint.embeddings, *layers, footprint.rest):
        if piece > free:
            used, free = used + 1, room
        free -= piece
        if free < 0 or used > gpus:
            return False
    return True


class MemoryMeasurement(Measurement):
    """The measurement of memory: a footprint serves all metrics of a model with the same context and batch."""

    unit = "model"
    splits = False

    def provenance(self, cell: Cell, _model_cache: ModelCache) -> dict:
        """Return all parameters, including defaults, because tables show them."""
        return cell.metric.model_dump(exclude_none=True)

    def shared(self, _cell: Cell) -> None:
        """Return None, so that all cells of a model are answered together."""

    def steps(self, _cells: Sequence[Cell]) -> int:
        return 1

    def memory_needs(self, _cells: Sequence[Cell]) -> None:
        """Return None: memory is not forecast."""

    def measure(
        self, _model_cache: ModelCache, cells: Sequence[Cell], _part: slice, _provenance: dict
    ) -> list[Footprint]:
        config = cells[0].subject.config
        sizes = {(cell.metric.context, cell.metric.batch) for cell in cells}
        footprints = {size: measure_footprint(config, *size) for size in sizes}
        return [footprints[cell.metric.context, cell.metric.batch] for cell in cells]

    def values(self, cell: Cell, results: list[Footprint]) -> list[dict]:
        (footprint,) = results
        labels = {"parameters": footprint.parameters, "context_used": footprint.context}
        values_of = _fitting if isinstance(cell.metric, Fits) else _needed
        return [labels | value for value in values_of(cell.metric, footprint)]


def _fitting(metric: Fits, footprint: Footprint) -> list[dict]:
    place = metric.gpus, metric.gigabytes, metric.headroom
    return [{"metric": "fits", "bits": bits, "value": int(fits(footprint, bits, *place)), "unit": "1"} for bits in BITS]


def _needed(_metric: MemoryMetric, footprint: Footprint) -> list[dict]:
    return [
        {"metric": "parameters", "value": footprint.parameters, "unit": "1"},
        *({"metric": "weights", "bits": bits, "value": footprint.weights(bits), "unit": "bytes"} for bits in BITS),
        *(
            {"metric": "loaded", "bits": bits, "value": loaded, "unit": "bytes"}
            for bits, loaded in footprint.loaded.items()
            if loaded != footprint.weights(bits)
        ),
        *({"metric": name, "value": getattr(footprint, name), "unit": "bytes"} for name in ("cache", "activations")),
    ]


MEASUREMENT = MemoryMeasurement()
