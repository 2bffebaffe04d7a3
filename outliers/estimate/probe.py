"""What a measurement costs, found by making it once on one block and a decoder layer of random weights."""

import copy
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from outliers.measurements.footprint import Storages
from outliers.measurements.measurement import LAYERS, Part, Passes
from outliers.models.anatomy import decoder_layers
from outliers.models.decoder import inference, run_decoder
from outliers.models.load import DTYPES, check_finite, weights_hash
from outliers.models.skeleton import skeleton
from outliers.models.stream import give_memory_back

PLACES = {"layer_idx", "layer_id"}  # what modules call the place of their layer in a cache of keys and values
STD = 0.02  # of random weights
OUTLIER = 20.0  # the weight of one feature in each norm: schemes that decompose then have something to do
ENOUGH = 0.05  # seconds of runs after which a part is not repeated any more
FEW = 2  # runs in any case,
LONG = 1.0  # but for those of so many seconds: what only the first run does is little beside it


class Cost(NamedTuple):
    """What a part costs.

    once: seconds a layer. layer: seconds a block and layer. rest: seconds a block, outside of the layers. added: bytes
    that stay of a layer after `once`, such as its codes. peak: bytes that are alive at most while a block passes one
    layer, beside these and the weights. first: bytes that are kept of a block until its last layer. further: bytes that
    are kept of each layer but one, of all blocks together.
    """

    once: float
    layer: float
    rest: float
    added: int
    peak: int
    first: int
    further: int


class Sizes(NamedTuple):
    """Bytes of the weights of a model: outside of its layers, and of its largest layer; how many layers it has."""

    outside: int
    layer: int
    layers: int

    @property
    def weights(self) -> int:
        """All of them."""
        return self.outside + self.layers * self.layer


class Costs(NamedTuple):
    """What the parts of a measurement cost, pass by pass, and seconds a byte of weights.

    copying: to bring them into memory and check them. hashing: to make their hash.
    """

    parts: list[list[Cost]]
    copying: float
    hashing: float


def model_sizes(config: PretrainedConfig, dtype: str) -> Sizes:
    """The sizes of a model's weights, from its configuration; what is tied counts once."""
    model = skeleton(config, DTYPES[dtype])
    layers = [_size(layer) for layer in decoder_layers(model)]
    return Sizes(_size(model) - sum(layers), max(layers), len(layers))


def find_costs(config: PretrainedConfig, dtype: str, device: torch.device, block: int, passes: Passes) -> Costs:
    """Make a measurement on one block of so many tokens and one layer of a model, of which nothing but this is built.

    Weights of the layer are random; of embeddings and head only as many rows as the block has tokens are, and the rest
    is zero and takes no memory on a CPU. Nothing of it stays.

    Args:
        config: of a causal language model.
        dtype, device: where the measurement will run.
        block: tokens.
        passes: the parts of the measurement, by passes over the text.
    """
    try:
        return _costs(
            _one_layer(skeleton(copy.deepcopy(config), DTYPES[dtype], buffers=True), device, block), block, passes
        )
    finally:
        give_memory_back()


def _costs(model: PreTrainedModel, block: int, passes: Passes) -> Costs:
    ids = torch.arange(block, device=model.device)[None] % model.config.vocab_size
    copying, hashing = _loading(model)
    plain = _run(Part(_through_the_decoder), model, ids, Storages())
    return Costs([[_cost(part, model, ids, plain) for part in parts] for parts in passes], copying, hashing)


def _size(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def _one_layer(model: PreTrainedModel, device: torch.device, tokens: int) -> PreTrainedModel:
    """The model with its largest layer twice, if it has two, on the same weights."""
    layers = _with_largest_alone(model)
    generator = torch.Generator(device).manual_seed(0)
    in_layer = {id(parameter) for parameter in layers[0].parameters()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, meta in module.named_parameters(recurse=False):
            if id(meta) not in made:
                rows = len(meta) if id(meta) in in_layer else tokens
                made[id(meta)] = nn.Parameter(_weight(meta, name, rows, device, generator), requires_grad=False)
            module._parameters[name] = made[id(meta)]
    for first, second in zip(layers[0].modules(), layers[-1].modules(), strict=True):
        second._parameters.update(first._parameters)
    return model.to(device)


def _with_largest_alone(model: PreTrainedModel) -> nn.ModuleList:
    """The layers of a model, of which only the largest is left, twice; one that attends to all tokens, if there is."""
    layers, kinds = decoder_layers(model), getattr(model.config, "layer_types", None)
    ranks = [(_size(layer), bool(kinds) and kinds[n] == "full_attention") for n, layer in enumerate(layers)]
    number = ranks.index(max(ranks))
    largest = layers[number]
    if kinds:  # by which a cache of keys and values is made
        model.config.layer_types = kinds[number : number + 1] * len(kinds)
    del layers[LAYERS:]
    again = copy.deepcopy(largest, {id(model.config): model.config})  # says how to attend, to all layers
    layers[0], layers[-1] = largest, again
    for place, layer in enumerate(layers):
        for module in layer.modules():
            vars(module).update(dict.fromkeys(PLACES & vars(module).keys(), place))
    return layers


def _weight(meta: torch.Tensor, name: str, rows: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Something like a trained weight: norms that scale one feature up, and random numbers in the first rows."""
    weight = torch.zeros(meta.shape, dtype=meta.dtype, device=device)
    if meta.ndim == 1 and name == "weight":
        weight.fill_(1)[0] = OUTLIER
    elif meta.ndim > 1:
        weight[:rows].normal_(std=STD, generator=generator)
    return weight


def _loading(model: PreTrainedModel) -> tuple[float, float]:
    """Seconds a byte to copy and check weights, and to hash them."""
    layer, clock = decoder_layers(model)[0], _clock(model.device)
    size = sum(parameter.nbytes for parameter in layer.parameters())
    start = clock()
    for name, parameter in layer.named_parameters():
        check_finite(parameter.to(parameter.dtype, copy=True), name, "")
    copied = clock()
    weights_hash(layer)
    return copied.since(start) / size, clock().since(copied) / size


class Moment(NamedTuple):
    """Seconds that have passed, and that all threads of this process have computed."""

    passed: float
    computed: float

    def since(self, earlier: "Moment") -> float:
        """Seconds that what was done between takes on a processor that nobody else uses, at most.

        On a processor that others use too, a thread waits for its turn: with four other processes on two cores, a layer
        that takes 25 ms took 430 ms, and computed for 44 ms of them.
        """
        return min(self.passed - earlier.passed, self.computed - earlier.computed)


def _clock(device: torch.device) -> Callable[[], Moment]:
    """What time it is, when all that was asked of the device is done; a GPU's own computing is not seen."""

    def clock() -> Moment:
        if device.type == "cpu":
            return Moment(time.perf_counter(), time.process_time())
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return Moment(*2 * [time.perf_counter()])

    return clock


class _Seen(NamedTuple):
    """What a run of a part showed: as in `Cost`, but for seconds in all but `once`, the peak with all layers, and what
    is kept of the block in `first`, with what is kept of its first layer.

    between: bytes a layer that are kept from one pass to the next, such as keys and values.
    """

    once: float
    layer: float
    whole: float
    peak: int
    first: int
    further: int
    added: int
    between: int


@inference
def _through_the_decoder(model: PreTrainedModel, ids: torch.Tensor) -> None:
    for _ in run_decoder(model, ids):
        pass


def _cost(part: Part, model: PreTrainedModel, ids: torch.Tensor, plain: _Seen) -> Cost:
    """Bytes of one run, and the least seconds of as many others as take no time to speak of.

    plain: what a run through nothing but the decoder showed; some decoders hold the output of the layer before.
    """
    bytes_seen, layers = _run(part, model, ids, Storages()), len(decoder_layers(model))
    seen = [_run(part, model, ids)]  # whose storages nobody counts, which takes longer than many small operators
    while sum(run.whole for run in seen) < (ENOUGH if len(seen) >= FEW else LONG):
        seen.append(_run(part, model, ids))
    once, layer, whole = (min(values) for values in list(zip(*seen, strict=True))[:3])
    first, further = (
        max(0, kept - usual, bytes_seen.between)
        for kept, usual in ((bytes_seen.first, plain.first), (bytes_seen.further, plain.further))
    )
    peak, of_block = bytes_seen.peak - layers * bytes_seen.added - further, max(0, first - further)
    return Cost(once, layer, max(0.0, whole - layers * layer), bytes_seen.added, peak, of_block, further)


def _run(part: Part, model: PreTrainedModel, ids: torch.Tensor, storages: Storages | None = None) -> _Seen:
    clock, layers = _clock(ids.device), len(decoder_layers(model))
    changes = storages.changes if storages else []
    with storages or nullcontext():
        start = clock()
        changed = part.once(model)
        once, made = clock().since(start), len(changes)
        with _marks(changed, clock, changes) as (began, at_begin, at_end):
            start = clock()
            part.each(changed, ids)
            end = clock()
    spans = zip(began[::2], began[1::2], strict=True) if layers > 1 else [(began[0], end)]
    layer = sum(later.since(earlier) for earlier, later in spans)
    alive = list(itertools.accumulate((size for _, size in changes), initial=0))
    first, further = (
        max(alive[last] - alive[one] for one, last in zip(at[::layers], at[layers - 1 :: layers], strict=True))
        for at in (at_begin, at_end)
    )
    added, between = alive[made], max(alive[later] for later in (made, *at_begin[layers::layers])) - alive[made]
    sizes = (size // layers for size in (added, between))
    return _Seen(once / layers, layer, end.since(start), max(alive), first, further, *sizes)


@contextmanager
def _marks(model: PreTrainedModel, clock: Callable, changes: list) -> Iterator[tuple[list, list, list]]:
    """When each layer begins, and the count of changes of what is alive when it begins and when it ends."""
    began, at_begin, at_end = [], [], []

    def begin(_module, _arguments):
        at_begin.append(len(changes))
        began.append(clock())

    with ExitStack() as stack:
        for layer in decoder_layers(model):
            stack.callback(layer.register_forward_pre_hook(begin).remove)
            stack.callback(layer.register_forward_hook(lambda *_: at_end.append(len(changes))).remove)
        yield began, at_begin, at_end
