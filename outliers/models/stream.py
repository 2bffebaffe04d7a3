"""Models larger than memory: a decoder layer is read when its turn comes, applied to all blocks, and dropped."""

import ctypes
import errno
import itertools
import math
import mmap
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy import anatomy_of, check_block, decoder_layers, family_of, read_ids
from outliers.models.checkpoint import Checkpoint, dtype_of
from outliers.models.load import HASHING, check_finite, find_device, hash_of, line_of, open_model
from outliers.terminal.progress import over

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # of glibc
STATES_ON_GPU = 0.5  # of what is free there, at most; a layer, its codes and what it computes need the rest


class Variant(Protocol):
    """What is done to a model while blocks pass; those that there are stand in `outliers.variants`.

    needs_trace: whether something must be known of the text first; `knowing(trace)` is then the variant that knows it.
    needs_calibration: the same of how large inputs are; `calibrated(calibration)` is then the variant that knows it.
    """

    needs_trace: bool = False
    needs_calibration: bool = False

    @property
    def name(self) -> str:
        """What to call it in rows and messages; `outliers.variant` reads the names of those that there are."""

    def fields(self, model: PreTrainedModel | None = None) -> dict:
        """What identifies it in a row, with what a model decides where one is given, such as which kernels run."""

    def first_layer(self, _model: PreTrainedModel) -> int:
        """From which decoder layer on it changes anything; 0 where that is not known, their number where nothing."""
        return 0

    def on(self, model: PreTrainedModel, layer: int | None = None) -> AbstractContextManager[PreTrainedModel]:
        """A context with the model under it; layer: the only one that is asked for and has its weights, or None."""


@dataclass(frozen=True)
class AsItIs(Variant):
    """The variant that changes nothing."""

    name = "fp32"

    def fields(self, _model: PreTrainedModel | None = None) -> dict:
        """Nothing."""
        return {}

    def first_layer(self, model: PreTrainedModel) -> int:
        """After the last one."""
        return model.config.num_hidden_layers

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
    """What a decoder calls a layer with beside the hidden states."""

    arguments: tuple
    keywords: dict

    def on(self, layer: nn.Module, hidden_states: torch.Tensor):
        """What a layer makes of hidden states (1, T, features)."""
        return layer(hidden_states, *self.arguments, **self.keywords)


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
    device = find_device(device)
    model, checkpoint = open_model(name, dtype, revision, buffers=True)
    model.ignored_tensors = checkpoint.ignored
    model.stream = Stream(name, model, checkpoint, device, memory)
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
        self.prefix = f"{anatomy_of(model.config).layers}."
        self.checkpoint, self.stored = checkpoint, checkpoint.tensors
        self.dtypes = {own: dtype_of(model, own) for own in self.stored}
        self.bytes_read = 0
        self.taken: Counter = Counter()  # bytes by device, of what is kept of blocks while they pass
        parameters = {own for own, _ in model.named_parameters()}
        self.to_hash = {own for own in self.stored if own.startswith(self.prefix) and own in parameters}
        self.lines: list[str] = []  # of what was hashed, see `outliers.models.load.line_of`

    def __deepcopy__(self, _memo) -> "Stream":
        return self  # a copy of the model, such as one under a scheme, reads the same files

    def load_what_is_not_in_layers(self, model: PreTrainedModel) -> None:
        """Embeddings, final norm and head; they stay."""
        for own in self.stored:
            if not own.startswith(self.prefix):
                _assign(model, own, self._read(own))
        model.tie_weights(missing_keys=self.checkpoint.absent(model), recompute_mapping=False)
        outside = [(own, tensor) for own, tensor in model.named_parameters() if not own.startswith(self.prefix)]
        with self._hashing(outside):
            pass
        for module in model.modules():
            buffers = {part: buffer for part, buffer in module._buffers.items() if buffer is not None}
            module._buffers.update({part: buffer.to(self.device) for part, buffer in buffers.items()})

    def _read(self, own: str) -> torch.Tensor:
        stored = self.stored[own]
        self.bytes_read += sum(end - start for _, start, end in stored.spans)
        # copied, for a tensor that shares the memory of the file would keep all of it in memory
        tensor = stored.read().to(self.device, self.dtypes[own], copy=True)
        check_finite(tensor, own, self.name)
        return tensor

    @contextmanager
    def layer(self, model: PreTrainedModel, number: int) -> Iterator[nn.Module]:
        """A decoder layer of the model, which has its weights within this context."""
        layer, names = decoder_layers(model)[number], self._names(number)
        try:
            for own in names:
                _assign(model, own, self._read(own))
            self._read_ahead(number + 1)
            with self._hashing([(own, model.get_parameter(own)) for own in names if own in self.to_hash]):
                yield layer
            self.to_hash -= set(names)
        finally:
            for module in layer.modules():
                for part, parameter in module.named_parameters(recurse=False):
                    module._parameters[part] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    def _names(self, number: int) -> list[str]:
        return [own for own in self.stored if own.startswith(f"{self.prefix}{number}.")]

    def _read_ahead(self, number: int) -> None:
        """Let the system read the files of a layer into its cache while something else is computed."""
        if not hasattr(os, "posix_fadvise"):  # not on macOS, which reads when asked
            return
        for path, start, end in (span for own in self._names(number) for span in self.stored[own].spans):
            with open(path, "rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_WILLNEED)

    @contextmanager
    def _hashing(self, tensors: list[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """Hash tensors beside what is done within this context; they must not change there."""
        with ThreadPoolExecutor(HASHING) as pool:
            lines = pool.map(lambda named: line_of(*named), tensors)
            yield
            self.lines += lines

    def weights_hash(self) -> str:
        """The hash of the weights, the same as that of the resident model; what was not read yet is read for it."""
        for _, names in itertools.groupby(sorted(self.to_hash), key=self._number):
            names = list(names)
            with self._hashing([(own, self.stored[own].read().to(self.dtypes[own])) for own in names]):
                self.bytes_read += sum(end - start for own in names for _, start, end in self.stored[own].spans)
            self.to_hash -= set(names)
        return hash_of(self.lines)

    def _number(self, own: str) -> str:
        """The number of the layer of a tensor."""
        return own.removeprefix(self.prefix).partition(".")[0]

    def run(
        self,
        model: PreTrainedModel,
        blocks: Iterable[torch.Tensor],
        variants: Sequence[Variant],
        begin: Callable[[int, int, torch.Tensor], None],
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Pass blocks through the decoder under some variants: the number of each variant, the block and its last
        hidden states (T, features), variant by variant and block by block, when all layers are done.

        begin: called with the numbers of variant and block, and its ids, before a layer is applied to it.
        """
        examples = [block.to(self.device) for block in blocks]
        if not examples:
            return
        ids = list(map(read_ids, examples))
        for block in ids:
            check_block(model.config, len(block), int(block.max()))
        first, of_first = into_layers(model, ids[0])
        calls = {len(first): of_first}  # by the length of what goes through the layers
        self.taken.clear()
        shape = len(variants), len(ids), max(map(len, ids)), first.shape[1]
        states = self.storage(shape, self.dtype, self.device)
        states[:, 0, : len(first)] = first
        for number, block in enumerate(ids[1:], 1):
            states[:, number, : len(block)], of_block = into_layers(model, block)
            calls.setdefault(len(block), of_block)
        layers = range(len(of_first))
        for number in over(layers, "layer", f"{self.name}, layers"):
            with self.layer(model, number):
                for of_variant, variant in enumerate(variants):
                    with variant.on(model, number) as changed:
                        layer = decoder_layers(changed)[number]
                        for of_block in range(len(ids)):
                            begin(of_variant, of_block, ids[of_block])
                            state = states[of_variant, of_block, : len(ids[of_block])]
                            output = calls[len(state)][number].on(layer, state[None].to(self.device))
                            state.copy_(state_in(output)[0])
                            give_memory_back()
        for of_variant, of_block in itertools.product(range(len(variants)), range(len(ids))):
            state = states[of_variant, of_block, : len(ids[of_block])].to(self.device)
            yield of_variant, examples[of_block], out_of_layers(model, ids[of_block], state, isinstance(output, tuple))

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


def into_layers(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, list[Call]]:
    """What goes into the first layer for ids (T,), (T, features), and what each layer is called with beside it."""
    gates = [_Gate(layer) for layer in decoder_layers(model)]
    with _in_the_place_of_layers(model, gates):
        model.base_model(ids[None], **family_of(model.config).keywords)
    return gates[0].seen[0], [gate.call for gate in gates]


def state_in(output: torch.Tensor | tuple) -> torch.Tensor:
    """The hidden states in what a layer puts out: some architectures return tuples, the others a tensor."""
    return output[0] if isinstance(output, tuple) else output


def out_of_layers(model: PreTrainedModel, ids: torch.Tensor, state: torch.Tensor, in_tuple: bool) -> torch.Tensor:
    """What comes out of the decoder where its last layer puts out a state (T, features), in a tuple or not."""
    gates = [_Gate(layer) for layer in decoder_layers(model)]
    gates[-1].output = (state[None],) if in_tuple else state[None]
    with _in_the_place_of_layers(model, gates):
        return model.base_model(ids[None], **family_of(model.config).keywords).last_hidden_state[0]


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

    Some decoders take a layer's output as it is, others the first of a tuple; `_Either` serves both.
    """

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.__dict__["layer"] = layer  # no submodule of it
        self.output, self.seen, self.call = None, None, None

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["layer"], name)  # such as the kind of its attention

    def forward(self, hidden_states, *arguments, **keywords):
        self.seen = hidden_states.as_subclass(torch.Tensor)
        self.call = Call(arguments, keywords)
        return self.seen.as_subclass(_Either) if self.output is None else self.output


class _Either(torch.Tensor):
    """A tensor (1, T, features) whose first entry is itself: a layer's output, in a tuple or not."""

    def __getitem__(self, index):
        return self.as_subclass(torch.Tensor) if index == 0 else super().__getitem__(index)


@contextmanager
def _in_the_place_of_layers(model: PreTrainedModel, gates: list[_Gate]) -> Iterator[None]:
    layers = decoder_layers(model)
    originals = dict(layers._modules)
    layers._modules.update(zip(originals, gates, strict=True))
    try:
        yield
    finally:
        layers._modules.update(originals)


def _assign(model: PreTrainedModel, own: str, tensor: torch.Tensor) -> None:
    path, _, part = own.rpartition(".")
    module = model.get_submodule(path)
    if part in module._parameters:
        module._parameters[part] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[part] = tensor
