"""Models larger than memory: a decoder layer is read when its turn comes, applied to all blocks, and dropped."""

import ctypes
import hashlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from outliers.errors import UserError, unknown_name
from outliers.models.anatomy import anatomy_of, check_block, decoder_layers
from outliers.models.checkpoint import dtype_of, parameters_on_meta, stored_tensors
from outliers.models.load import DTYPES, check_complete, check_finite, find_device, load_config
from outliers.progress import over

_C_LIBRARY = ctypes.CDLL(None) if sys.platform == "linux" else None
SAMPLE = 4096  # bytes of a tensor that its fingerprint looks at
STATES_ON_GPU = 0.5  # of what is free there, at most; a layer, its codes and what it computes need the rest

# What runs in the place of a layer: (model, number of the layer) to a context in which a module stands for it.
Variant = Callable[[PreTrainedModel, int], AbstractContextManager[nn.Module]]


def is_streamed(model: PreTrainedModel) -> bool:
    """Whether a model's decoder layers are read when their turn comes."""
    return getattr(model, "stream", None) is not None


@contextmanager
def one_variant(model: PreTrainedModel, number: int) -> Iterator[nn.Module]:
    """The variant that changes nothing."""
    yield decoder_layers(model)[number]


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
        memory: bytes of hidden states between layers that are held in the host's memory; more are in a file that is
            mapped into it. None for no limit. Up to half of what is free on a GPU they are there instead.

    Raises:
        UserError: as `load_model`.
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    check_one_device(device)
    device, config = find_device(device), load_config(name, revision)
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()
    stored = stored_tensors(name, revision, model, dict.fromkeys(model.state_dict(), 0))
    model.stream = Stream(name, model, stored, device, DTYPES[dtype], memory)
    model.stream.load_what_is_not_in_layers(model)
    return model


def check_one_device(device: str | torch.device) -> None:
    """Raise UserError if a streamed model cannot be on a device."""
    if device == "auto":
        raise UserError("device 'auto' with --stream: a streamed model computes on one device; expected cpu or cuda")


class Stream:
    """Reads the decoder layers of a model from its files, one at a time and the next one ahead.

    stored: where its tensors are, see `outliers.models.checkpoint.stored_tensors`.
    """

    def __init__(
        self,
        name: str,
        model: PreTrainedModel,
        stored: dict,
        device: torch.device,
        dtype: torch.dtype,
        memory: int | None,
    ):
        self.name, self.device, self.dtype, self.memory = name, device, dtype, memory
        self.prefix = f"{anatomy_of(model.config).layers}."
        self.stored = stored
        self.dtypes = {own: dtype_of(model, own) for own in stored}
        self.bytes_read = 0

    def __deepcopy__(self, _memo) -> "Stream":
        return self  # a copy of the model, such as one under a scheme, reads the same files

    def load_what_is_not_in_layers(self, model: PreTrainedModel) -> None:
        """Embeddings, final norm and head; they stay."""
        for own in self.stored:
            if not own.startswith(self.prefix):
                _assign(model, own, self._read(own))
        model.tie_weights()
        for module in model.modules():
            buffers = {part: buffer for part, buffer in module._buffers.items() if buffer is not None}
            module._buffers.update({part: buffer.to(self.device) for part, buffer in buffers.items()})
        meta = (own for own, parameter in model.named_parameters() if parameter.is_meta)
        missing = [own for own in meta if own not in self.stored]
        check_complete(missing, self.name)

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
        layer = decoder_layers(model)[number]
        try:
            for own in self._names(number):
                _assign(model, own, self._read(own))
            self._read_ahead(number + 1)
            yield layer
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

    def fingerprint(self) -> str:
        """SHA-256 over names, dtypes, shapes and the first bytes of all tensors: 16 hexadecimal digits.

        A hash of all weights would read all of them once more.
        """
        digest = hashlib.sha256()
        for own, stored in sorted(self.stored.items()):
            digest.update(f"{own} {stored.about}".encode())
            for path, start, end in stored.spans:
                with open(path, "rb", buffering=0) as file:
                    file.seek(start)
                    digest.update(file.read(min(SAMPLE, end - start)))
        return digest.hexdigest()[:16]

    def run(
        self,
        model: PreTrainedModel,
        blocks: Iterable[torch.Tensor],
        variants: Sequence[Variant],
        begin: Callable[[int, int, torch.Tensor], None],
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Pass blocks of one length through the decoder under some variants, each with hidden states of its own.

        begin: called with the numbers of variant and block, and its ids, before a layer is applied to it.

        Yields:
            The number of the variant, token ids (T,) and last hidden states (T, features); variant by variant, block by
            block, when all layers are done.
        """
        ids = [block.to(self.device) for block in blocks]
        if not ids:
            return
        if len({len(block) for block in ids}) > 1:
            raise UserError("blocks of several lengths; a streamed model takes blocks of one length")
        for block in ids:
            check_block(model.config, len(block), int(block.max()))
        first, calls = self._first(model, ids[0])
        states = self._storage((len(variants), len(ids), *first.shape))
        states[:, 0] = first
        for number, block in enumerate(ids[1:], 1):
            states[:, number], _ = self._first(model, block)
        layers = range(len(calls))
        for number in over(layers, "layer", f"{self.name}, layers"):
            with self.layer(model, number):
                for of_variant, variant in enumerate(variants):
                    with variant(model, number) as layer:
                        for of_block in range(len(ids)):
                            begin(of_variant, of_block, ids[of_block])
                            state = states[of_variant, of_block]
                            output = calls[number].on(layer, state[None].to(self.device))
                            state.copy_((output[0] if isinstance(output, tuple) else output)[0])
                            give_memory_back()
        for of_variant, of_block in itertools.product(range(len(variants)), range(len(ids))):
            state = states[of_variant, of_block].to(self.device)
            yield of_variant, ids[of_block], self._last(model, ids[of_block], state, isinstance(output, tuple))

    def _storage(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Room for hidden states: on the GPU if they leave enough of it, else in the host's memory within the limit,
        else in a file that is gone when nobody uses it."""
        count = torch.Size(shape).numel()
        size = count * self.dtype.itemsize
        if self.device.type != "cpu" and size <= STATES_ON_GPU * torch.cuda.mem_get_info(self.device)[0]:
            return torch.empty(shape, dtype=self.dtype, device=self.device)
        if self.memory is None or size <= self.memory:
            return torch.empty(shape, dtype=self.dtype)
        with tempfile.NamedTemporaryFile(prefix="hidden_states.") as file:
            return torch.from_file(file.name, shared=True, size=count, dtype=self.dtype).view(shape)

    def _first(self, model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, list[Call]]:
        """What goes into the first layer (T, features), and what each layer is called with beside it."""
        gates = [_Gate(layer) for layer in decoder_layers(model)]
        with _in_the_place_of_layers(model, gates):
            model.base_model(ids[None], use_cache=False)
        return gates[0].seen[0], [gate.call for gate in gates]

    def _last(self, model: PreTrainedModel, ids: torch.Tensor, state: torch.Tensor, in_tuple: bool) -> torch.Tensor:
        """What comes out of the decoder where its last layer puts out a state (T, features)."""
        gates = [_Gate(layer) for layer in decoder_layers(model)]
        gates[-1].output = (state[None],) if in_tuple else state[None]
        with _in_the_place_of_layers(model, gates):
            return model.base_model(ids[None], use_cache=False).last_hidden_state[0]


def give_memory_back() -> None:
    """Let the C library return what is free to the system.

    What hooks keep of a layer is small, but lies between tensors that are not, and glibc gives back only the end of its
    heap by itself: 65 MB more stayed with each layer and block of an OPT-6.7B.
    """
    if sys.platform == "linux" and hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)


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
