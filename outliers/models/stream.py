"""Models larger than memory: a decoder layer is read when its turn comes, applied to all blocks, and dropped."""

import ctypes
import errno
import functools
import math
import mmap
import os
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby, product
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from outliers.errors import UserError
from outliers.models.anatomy import Anatomy, decoder_layers, ids_of, inputs_of, layers_of, run_stack, stacks_of
from outliers.models.anatomy.examples import Block
from outliers.models.checkpoint import Checkpoint
from outliers.models.internals import dtype_of
from outliers.models.load import HASHING, fill, find_device, hash_of, line_of, open_model, put, read_weight
from outliers.models.variant import Variant
from outliers.terminal.progress import over

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # of glibc
STATES_ON_GPU = 0.5  # of what is free there, at most; a layer, its codes and what it computes need the rest


@dataclass(frozen=True)
class AsItIs(Variant):
    """The variant that changes nothing."""

    name = "fp32"

    def fields(self, _model: PreTrainedModel | None = None) -> dict:
        """Nothing."""
        return {}

    def first_layer(self, model: PreTrainedModel) -> int:
        """After the last one."""
        return len(decoder_layers(model))

    @contextmanager
    def on(self, model: PreTrainedModel, _layer: int | None = None) -> Iterator[PreTrainedModel]:
        """The model itself."""
        yield model


AS_IT_IS = AsItIs()


@dataclass(frozen=True)
class Watched(Variant):
    """A variant with hooks on what it makes, which see what flows through the model under it.

    hooks: a context with hooks on a model, those of all layers or of one.
    """

    variant: Variant
    hooks: Callable[[PreTrainedModel, int | None], AbstractContextManager]
    name = "watched"

    def fields(self, model: PreTrainedModel | None = None) -> dict:
        """Those of the variant."""
        return self.variant.fields(model)

    def first_layer(self, model: PreTrainedModel) -> int:
        """That of the variant."""
        return self.variant.first_layer(model)

    @contextmanager
    def on(self, model: PreTrainedModel, layer: int | None = None) -> Iterator[PreTrainedModel]:
        """The model under the variant."""
        with self.variant.on(model, layer) as changed, self.hooks(changed, layer):
            yield changed


def is_streamed(model: PreTrainedModel) -> bool:
    """Whether a model's decoder layers are read when their turn comes."""
    return getattr(model, "stream", None) is not None


class Call(NamedTuple):
    """The arguments of a layer beside the hidden states.

    memory: what of it the stack before has put out. carries: see `Anatomy`.
    """

    arguments: tuple
    keywords: dict
    memory: torch.Tensor | None
    carries: dict[int, int]

    def on(
        self,
        layer: nn.Module,
        hidden_states: torch.Tensor,
        memory: torch.Tensor | None = None,
        carried: Mapping[int, object] = MappingProxyType({}),
    ) -> "Output":
        """The output of a layer for hidden states (1, T, features).

        memory: what takes the place of the call's. carried: what the layer before carries.
        """

        def present(value: object) -> object:
            return memory if value is self.memory is not None else value

        arguments = [carried.get(place, present(value)) for place, value in enumerate(self.arguments)]
        output = layer(
            hidden_states, *arguments, **{name: present(argument) for name, argument in self.keywords.items()}
        )
        if not isinstance(output, tuple):  # as some architectures return it
            return Output(output, False, {})
        return Output(output[0], True, {place: output[number] for number, place in self.carries.items()})


class Output(NamedTuple):
    """The output of a layer.

    state: hidden states (1, T, features). in_tuple: whether they came in one. carried: what the next layer takes as
    arguments, by their places behind the hidden states.
    """

    state: torch.Tensor
    in_tuple: bool
    carried: dict[int, object]


def stream_model(
    name: str,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    memory: int | None = None,
) -> PreTrainedModel:
    """Load all of a causal language model but its decoder layers, which are read each time that blocks pass.

    The model has its layers on the meta device and a `stream`, through which `outliers.models.decoder.run_decoder`,
    and so `trace`, `perplexity` and `top1_softmax`, pass blocks.

    Args:
        name, dtype, device, revision: as `load_model`.
        memory: bytes of hidden states between layers, and of what a trace keeps of each block beside, that are held in
            the host's memory; more are in a file that is mapped into it. None for no limit. Up to half of what is free
            on a GPU they are there instead.

    Raises:
        UserError: as `load_model`.
    """
    check_one_device(device)
    model, checkpoint = open_model(name, dtype, device, revision)
    model.requires_grad_(False).stream = Stream(name, model, checkpoint, find_device(device), memory)
    model.stream.load_what_is_not_in_layers(model)
    return model


def check_one_device(device: str | torch.device) -> None:
    """Raise UserError if a streamed model cannot be on a device."""
    if device == "auto":
        raise UserError("device 'auto' with --stream: a streamed model computes on one device; expected cpu or cuda")


class Stream:
    """Reads the decoder layers of a model from its files, one at a time and the next one ahead.

    The bytes of each layer are hashed while it computes for the first time, for the hash of all weights.
    """

    def __init__(
        self, name: str, model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device, memory: int | None
    ):
        self.name, self.device, self.dtype, self.memory = name, device, model.dtype, memory
        self.numbers = {layer.path: layer.number for layer in layers_of(model)}
        self.stored, self.absent = checkpoint.tensors, checkpoint.absent(model)
        self.dtypes = {name: dtype_of(model, name) for name in self.stored}
        # Of states between layers: T5's are float32 behind the first layer of a float16 model, because its wo is.
        self.widest = functools.reduce(torch.promote_types, self.dtypes.values(), self.dtype)
        self.bytes_read, self.last = 0, AS_IT_IS  # the variant whose last hidden states were put out last
        self.taken: Counter = Counter()  # bytes by device, of what is kept of blocks while they pass
        parameters = {name for name, _ in model.named_parameters()}
        self.to_hash = {name for name in self.stored if self._number(name) is not None and name in parameters}
        self.lines: list[str] = []  # of what was hashed, see `outliers.models.load.line_of`

    def __deepcopy__(self, _memo) -> "Stream":
        return self  # a copy of the model, such as one under a scheme, reads the same files

    def load_what_is_not_in_layers(self, model: PreTrainedModel) -> None:
        """Embeddings, final norm and head; they stay."""
        outside = {name: lazy for name, lazy in self.stored.items() if self._number(name) is None}
        fill(model, outside, self.absent, self.name, self.device)
        self.bytes_read += sum(lazy.size for lazy in outside.values())
        with self._hashing([pair for pair in model.named_parameters() if self._number(pair[0]) is None]):
            pass

    @contextmanager
    def layer(self, model: PreTrainedModel, number: int) -> Iterator[nn.Module]:
        """A decoder layer of the model, which has its weights within this context."""
        layer, names = decoder_layers(model)[number], self._names(number)
        try:
            for name in names:
                put(model, name, read_weight(self.stored[name], name, self.name, self.device, self.dtypes[name]))
                self.bytes_read += self.stored[name].size
            for name in self._names(number + 1):
                for file, start, end in self.stored[name].spans:
                    file.will_need(start, end)
            with self._hashing([(name, model.get_parameter(name)) for name in names if name in self.to_hash]):
                yield layer
            self.to_hash -= set(names)
        finally:
            for module in layer.modules():
                for part, parameter in module.named_parameters(recurse=False):
                    module._parameters[part] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    def _names(self, number: int) -> list[str]:
        return [name for name in self.stored if self._number(name) == number]

    @contextmanager
    def _hashing(self, tensors: list[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """Hash tensors beside what is done within this context; they must not change there."""
        with ThreadPoolExecutor(HASHING) as pool:
            lines = pool.map(lambda named_tensor: line_of(*named_tensor), tensors)
            yield
            self.lines += lines

    def weights_hash(self) -> str:
        """The hash of the weights, the same as that of the resident model; what was not read yet is read for it."""
        for _, names in groupby(sorted(self.to_hash), key=self._number):
            names = list(names)
            with self._hashing([(name, self.stored[name].read().to(self.dtypes[name])) for name in names]):
                self.bytes_read += sum(self.stored[name].size for name in names)
            self.to_hash -= set(names)
        return hash_of(self.lines)

    def _number(self, name: str) -> int | None:
        """The number of the layer of a tensor; None for one that is in no layer."""
        paths = accumulate(name.split("."), "{}.{}".format)
        return next((self.numbers[path] for path in paths if path in self.numbers), None)

    def run(
        self,
        model: PreTrainedModel,
        blocks: Iterable[Block],
        variants: Sequence[Variant],
        begin: Callable[[int, int, tuple[torch.Tensor, ...]], None],
    ) -> Iterator[tuple[int, Block, torch.Tensor]]:
        """Pass blocks through the model under some variants: the number of each variant, the block and its last hidden
        states (T, features), variant by variant and block by block, when all layers are done.

        begin: called with the numbers of variant and block, and the ids at the positions of the block, see `ids_of`,
            before a layer is applied.
        """
        examples = [block.to(self.device) for block in blocks]
        if not examples:
            return
        self.taken.clear()
        inputs = [inputs_of(model, example) for example in examples]
        ids = [ids_of(model, example) for example in examples]
        turns = list(product(range(len(variants)), range(len(examples))))
        *stacks, last = stacks_of(model.config)
        memory = dict.fromkeys(turns)

        def begin_turn(variant_number: int, block_number: int) -> None:
            begin(variant_number, block_number, ids[block_number])

        for place, stack in enumerate(stacks):
            ends = self._through(model, stack, place, inputs, variants, memory, begin_turn)
            memory = {turn: self._kept(next(ends)) for turn in turns}
        ends = self._through(model, last, len(stacks), inputs, variants, memory, begin_turn)
        yield from ((variant_number, examples[block_number], next(ends)) for variant_number, block_number in turns)

    def _kept(self, state: torch.Tensor) -> torch.Tensor:
        """Keep the output (T, features) of a stack for the one that reads it: (1, T, features)."""
        return self.storage((1, *state.shape), state.dtype, state.device).copy_(state)

    def _through(
        self,
        model: PreTrainedModel,
        stack: Anatomy,
        place: int,
        inputs: list[tuple[torch.Tensor, ...]],
        variants: Sequence[Variant],
        memory: dict[tuple[int, int], torch.Tensor | None],
        begin: Callable,
    ) -> Iterator[torch.Tensor]:
        """Pass blocks through a stack, the one at a place among all: the last hidden states (T, features), variant by
        variant and block by block.

        inputs: what each stack reads of each block. memory: of each variant and block what the stack before puts out.
        """
        read = [block_inputs[place] for block_inputs in inputs]
        # What layers are called with, and what they carry, by the lengths of what goes through them.
        keys, calls, carried = [], {}, defaultdict(dict)
        for number, ids in enumerate(read):
            state, block_calls = into_layers(model, stack, ids, self._there(memory[0, number]))
            if not number:
                shape = len(variants), len(read), max(len(state), *map(len, read)), state.shape[1]
                states, dtype = self.storage(shape, self.widest, self.device), state.dtype
            states[:, number, : len(state)] = state
            keys.append((len(state), *map(len, inputs[number])))
            calls.setdefault(keys[-1], block_calls)
        first, count = self.numbers[f"{stack.layers}.0"], len(next(iter(calls.values())))
        for number in over(range(count), "layer", f"{self.name}, layers"):
            with self.layer(model, first + number):
                outputs = {}
                for variant_number, variant in enumerate(variants):
                    with variant.on(model, first + number) as changed:
                        layer = decoder_layers(changed)[first + number]
                        for block_number, key in enumerate(keys):
                            begin(variant_number, block_number)
                            state = states[variant_number, block_number, : key[0]]
                            beside = self._there(memory[variant_number, block_number]), carried[key]
                            outputs[key] = calls[key][number].on(layer, state[None].to(self.device, dtype), *beside)
                            state.copy_(outputs[key].state[0])
                            give_memory_back()
                carried.update((key, output.carried) for key, output in outputs.items())
                dtype = next(iter(outputs.values())).state.dtype
        for variant_number, (block_number, key) in product(range(len(variants)), enumerate(keys)):
            state = states[variant_number, block_number, : key[0]].to(self.device, dtype)
            beside = outputs[key].in_tuple, self._there(memory[variant_number, block_number])
            self.last = variants[variant_number]
            yield out_of_layers(model, stack, read[block_number], state, *beside)

    def _there(self, memory: torch.Tensor | None) -> torch.Tensor | None:
        return None if memory is None else memory.to(self.device)

    def storage(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros, for what is kept of all blocks while they pass: on the GPU, which computes with them, if they leave
        enough of it, else in the host's memory within the limit, else in a file that is gone when nobody uses it."""
        count = torch.Size(shape).numel()
        size = count * dtype.itemsize
        limits = {torch.device("cpu"): math.inf if self.memory is None else self.memory}
        if device.type != "cpu":
            limits = {device: STATES_ON_GPU * (torch.cuda.mem_get_info(device)[0] + self.taken[device])} | limits
        for place, limit in limits.items():
            if self.taken[place] + size <= limit:
                self.taken[place] += size
                return torch.zeros(shape, dtype=dtype, device=place)
        return torch.frombuffer(_mapped_file(size), dtype=dtype, count=count).view(shape)


LAYERS_IN_PLACE = threading.Lock()  # held while they are not, and by who looks for them beside other threads


def into_layers(
    model: PreTrainedModel, stack: Anatomy, inputs: torch.Tensor, memory: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[Call]]:
    """The input (T, features) of the first layer of a stack for its part of a block, and what each layer is
    called with beside it; memory: what the stack before puts out, (1, T, features)."""
    with _in_the_place_of_layers(model, stack) as gates:
        run_stack(model, stack, inputs, memory)
    arguments, keywords = gates[0].call
    if any(isinstance(argument, Cache) for argument in (*arguments, *keywords.values())):
        raise UserError(
            "the layers of this model are called with a cache of keys and values, which all blocks would share; "
            "expected a Family with keywords={'use_cache': False}"
        )
    return gates[0].seen[0], [Call(*gate.call, memory, stack.carries) for gate in gates]


def out_of_layers(
    model: PreTrainedModel,
    stack: Anatomy,
    inputs: torch.Tensor,
    state: torch.Tensor,
    in_tuple: bool,
    memory: torch.Tensor | None = None,
) -> torch.Tensor:
    """The output of a stack whose last layer puts out a state (T, features), in a tuple or not."""
    with _in_the_place_of_layers(model, stack) as gates:
        gates[-1].output = state[None], in_tuple
        return run_stack(model, stack, inputs, memory)


def _mapped_file(size: int) -> mmap.mmap:
    """A file without a name, of so many bytes that are its own on the disk, mapped into memory.

    Where a page of a mapped file finds the disk full when it is written, the system kills the process.
    """
    folder = os.environ.get("TMPDIR") or tempfile.gettempdir()  # which takes another one where TMPDIR cannot be used
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            _reserve(file.fileno(), size)
            return mmap.mmap(file.fileno(), size)
    except OSError as error:
        raise UserError(
            f"no room for {size / 1e6:,.1f} MB of hidden states in '{folder}' ({error.strerror or error}); set TMPDIR "
            "to a folder on a disk with room, take fewer --blocks, or hold more of them in memory with a larger "
            "--memory"
        ) from None


def _reserve(descriptor: int, size: int) -> None:
    """Give an empty file so many bytes, and all the blocks on its disk that they need; OSError if there are too few."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    zeros = bytes(1 << 20)  # where the system cannot reserve, what is written is there
    while size > 0:
        size -= os.write(descriptor, zeros[:size])


def give_memory_back() -> None:
    """Let the C library return what is free to the system.

    What hooks keep of a layer is small, but lies between tensors that are not, and glibc gives back only the end of its
    heap by itself: 65 MB more stayed with each layer and block of an OPT-6.7B.
    """
    if _TRIM:
        _TRIM(0)


class _Gate(nn.Module):
    """Stands for a layer: notes what it is called with, and puts out what it is told to, or what it was given.

    Some models take a layer's output as it is, others the first of a tuple; `_Either` serves both.
    """

    def __init__(self, layer: nn.Module, carries: dict[int, int]):
        super().__init__()
        self.__dict__["layer"] = layer  # no submodule of it
        self.beside = (None,) * max(carries, default=0)
        self.output, self.seen, self.call = None, None, None

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)  # such as the kind of its attention

    def forward(self, hidden_states, *arguments, **keywords):
        self.seen = hidden_states.as_subclass(torch.Tensor)
        self.call = arguments, keywords
        if self.output is not None:
            state, in_tuple = self.output
            return (state, *self.beside) if in_tuple else state
        return (self.seen, *self.beside) if self.beside else self.seen.as_subclass(_Either)


class _Either(torch.Tensor):
    """A tensor (1, T, features) whose first entry is itself: a layer's output, in a tuple or not."""

    def __getitem__(self, index):
        return self.as_subclass(torch.Tensor) if index == 0 else super().__getitem__(index)


@contextmanager
def _in_the_place_of_layers(model: PreTrainedModel, stack: Anatomy) -> Iterator[list[_Gate]]:
    with LAYERS_IN_PLACE:
        layers = model.get_submodule(stack.layers)
        originals = dict(layers._modules)
        gates = {name: _Gate(layer, stack.carries) for name, layer in originals.items()}
        layers._modules.update(gates)
        try:
            yield list(gates.values())
        finally:
            layers._modules.update(originals)
