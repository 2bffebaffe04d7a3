"""Models larger than memory: each decoder layer is read when it is needed, applied to all blocks, and dropped."""

import copy
import ctypes
import errno
import functools
import math
import mmap
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby, product
from types import MethodType

import torch
from torch import nn
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy import (
    check_positions,
    compiled_parts,
    decoder_layers,
    ids_of,
    inputs_of,
    layers_of,
    repeated,
    run_stack,
    shared_parts,
    stack_module,
    stacks_of,
)
from outliers.models.anatomy.examples import Block
from outliers.models.anatomy.experts import Pieces, is_of_experts
from outliers.models.anatomy.turns import Turns
from outliers.models.anatomy.weights import ACCELERATED
from outliers.models.checkpoint import Checkpoint
from outliers.models.hooks import FORWARD_HOOKS, hand_over_hooks
from outliers.models.internals import dtype_of
from outliers.models.load import HASHING, fill, find_device, hash_parameters, line_of, open_model, put, read_checked
from outliers.models.variant import AS_IT_IS, Variant
from outliers.terminal.progress import over

_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None  # of glibc
STATES_ON_GPU = 0.5  # largest share of free memory; a layer, its codes and activations need the rest


@dataclass(frozen=True)
class WatchedVariant(Variant):
    """A variant with hooks that observe the changed model.

    hooks: makes a context with hooks on all layers of a model, or on one.
    """

    variant: Variant
    hooks: Callable[[PreTrainedModel, int | None], AbstractContextManager]
    name = "watched"

    @contextmanager
    def on(self, model: PreTrainedModel, layer: int | None = None) -> Iterator[PreTrainedModel]:
        with self.variant.on(model, layer) as changed, self.hooks(changed, layer):
            yield changed


def is_streamed(model: PreTrainedModel) -> bool:
    """Return whether a model's decoder layers are read when they are needed."""
    return getattr(model, "stream", None) is not None


def stream_model(
    name: str,
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    memory: int | None = None,
) -> PreTrainedModel:
    """Load a causal language model without its decoder layers, which are read each time that blocks pass.

    The model has its layers on the meta device and a `stream`, through which `outliers.models.decoder.run_decoder`, and
    so `trace`, `perplexity` and `top1_softmax`, pass blocks.

    Args:
        name, dtype, device, revision: as for `load_model`.
        memory: bytes of hidden states between layers, and of what a trace keeps of each block, that are held in the
            host's memory; more go to a memory-mapped file. None for no limit. On a GPU they use up to half of its free
            memory instead. A layer with experts that alone is larger is read one expert at a time, again for each
            block.

    Raises:
        UserError: as `load_model`.
    """
    check_one_device(device)
    model, checkpoint = open_model(name, dtype, device, revision)
    model.requires_grad_(False).stream = Stream(name, model, checkpoint, find_device(device), memory)
    model.stream.load_what_is_not_in_layers(model)
    return model


def check_one_device(device: str | torch.device) -> None:
    if device == "auto":
        raise UserError("device 'auto' with --stream: a streamed model computes on one device; expected cpu or cuda")


class Stream:
    """A reader of the decoder layers of a model from its files, one at a time with the next one prefetched.

    The bytes of each layer are hashed while it computes for the first time, for the hash of all weights.
    """

    def __init__(
        self, name: str, model: PreTrainedModel, checkpoint: Checkpoint, device: torch.device, memory: int | None
    ):
        self.name, self.device, self.dtype, self.memory = name, device, model.dtype, memory
        for layer in layers_of(model):
            if layer.anatomy.shares:
                raise UserError(
                    f"layer {layer.number} of '{name}' reads what layer {layer.anatomy.shares[-1]} has made, "
                    "beside the residual stream, which is gone when its turn comes; run it without --stream"
                )
        for path, count in repeated(layers_of(model)).items():
            raise UserError(
                f"layer '{path}' of '{name}' runs {count} times in a pass, and its weights would be read again each "
                "time; run it without --stream"
            )
        self.numbers = {layer.path: layer.number for layer in layers_of(model)}
        self.stored, self.absent = checkpoint.tensors, checkpoint.absent(model)
        parameters = {name for name, _ in model.named_parameters()}
        self.to_hash = {name for name in self.stored if self._number(name) is not None and name in parameters}
        # such as the weights of a block that several layers share
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        self.stored = self.stored | {
            name: self.stored[first]
            for name, first in tied.items()
            if self._number(name) is not None and name in self.absent and first in self.stored
        }
        self.dtypes = {name: dtype_of(model, name) for name in self.stored}
        # Dtype of states between layers: T5's are float32 after the first layer of a float16 model, because its wo is.
        self.widest = functools.reduce(torch.promote_types, self.dtypes.values(), self.dtype)
        self.last = AS_IT_IS  # the variant of the last hidden states that were returned
        self.taken: Counter = Counter()  # bytes kept for blocks during a pass, by device
        self.lines: list[str] = []  # of hashed weights, see `outliers.models.load.line_of`

    def __deepcopy__(self, _memo) -> "Stream":
        return self  # a copy of the model, such as one under a scheme, reads the same files

    def load_what_is_not_in_layers(self, model: PreTrainedModel) -> None:
        """Load embeddings, final norm and head, which stay in memory."""
        outside = {name: lazy for name, lazy in self.stored.items() if self._number(name) is None}
        fill(model, outside, self.absent, self.name, self.device)
        with self._hashing([pair for pair in model.named_parameters() if self._number(pair[0]) is None]):
            pass

    @contextmanager
    def layer(self, model: PreTrainedModel, number: int) -> Iterator[nn.Module]:
        """Provide a decoder layer of the model with its weights within this context."""
        layer, names = decoder_layers(model)[number], self._names(number)
        by_expert = self._weights_by_expert(model, names)
        try:
            for name in (name for name in names if name not in by_expert):
                put(model, name, self.stored[name], self.name, self.device, self.dtypes[name])
            for owner in {name.rpartition(".")[0] for name in by_expert}:
                model.get_submodule(owner).pieces = Pieces(functools.partial(self._piece, owner))
            unread = (name for name, one in layer.named_parameters() if one.is_meta)
            if lacking := next((name for name in unread if not any(one.endswith(name) for one in by_expert)), None):
                raise UserError(
                    f"'{lacking}' of layer {number} is not in the files of '{self.name}', nor tied to what is; run it "
                    "without --stream"
                )
            for name in () if by_expert else self._names(number + 1):
                for file, start, end in self.stored[name].spans:
                    file.will_need(start, end)
            hashed = [name for name in names if name in self.to_hash]
            with self._hashing([(name, None if name in by_expert else model.get_parameter(name)) for name in hashed]):
                yield layer
            self.to_hash -= set(names)
        finally:
            for module in layer.modules():
                vars(module).pop("pieces", None)
                for part, parameter in module.named_parameters(recurse=False):
                    module._parameters[part] = nn.Parameter(parameter.to("meta"), requires_grad=False)

    def _names(self, number: int) -> list[str]:
        return [name for name in self.stored if self._number(name) == number]

    def _weights_by_expert(self, model: PreTrainedModel, names: list[str]) -> list[str]:
        """Return the weights of a layer to read one expert at a time: those of experts if the layer exceeds the memory,
        else none."""
        size = sum(math.prod(self.stored[name].shape) * self.dtypes[name].itemsize for name in names)
        if self.memory is None or size <= self.memory:
            return []
        return [name for name in names if self.stored[name].piece and is_of_experts(model, name)]

    def _piece(self, owner: str, part: str, expert: int) -> torch.Tensor:
        name = f"{owner}.{part}"
        lazy = self.stored[name].piece(expert)
        return read_checked(lazy, name, self.name, self.device, self.dtypes[name])[0]

    @contextmanager
    def _hashing(self, tensors: list[tuple[str, torch.Tensor | None]]) -> Iterator[None]:
        """Hash tensors in threads during this context, in which they must not change; a tensor that is None is read for
        it."""
        with ThreadPoolExecutor(HASHING) as pool:
            lines = pool.map(lambda named_tensor: self._hash_line(*named_tensor), tensors)
            yield
            self.lines += lines

    def _hash_line(self, name: str, tensor: torch.Tensor | None) -> str:
        """Return the line of a tensor in the hash of weights; a tensor that is None is read from its file."""
        if tensor is not None:
            return line_of(name, tensor)
        lazy, dtype = self.stored[name], self.dtypes[name]
        like = torch.empty(lazy.shape, dtype=dtype, device="meta")
        pieces = map(lazy.piece, range(lazy.shape[0])) if lazy.piece else [lazy]
        return line_of(name, like, (piece.read().to(dtype) for piece in pieces))

    def weights_hash(self) -> str:
        """Return the hash of the weights, equal to that of the resident model; weights not read yet are read for it."""
        for _, names in groupby(sorted(self.to_hash), key=self._number):
            names = list(names)
            with self._hashing([(name, None) for name in names]):
                pass
            self.to_hash -= set(names)
        return hash_parameters(self.lines)

    def _number(self, name: str) -> int | None:
        """Return the number of the layer of a tensor; None if it is in no layer."""
        paths = accumulate(name.split("."), "{}.{}".format)
        return next((self.numbers[path] for path in paths if path in self.numbers), None)

    def run(
        self,
        model: PreTrainedModel,
        blocks: Iterable[Block],
        variants: Sequence[Variant],
        begin: Callable[[int, int, tuple[torch.Tensor, ...]], None],
    ) -> Iterator[tuple[int, Block, torch.Tensor]]:
        """Pass blocks through the model under some variants; yield the number of the variant, the block, and its last
        hidden states (T, features).

        The order is variant by variant and block by block.

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
        last, encoded = len(inputs[0]) - 1, dict.fromkeys(turns)
        for number in range(last):
            ends = self._run_stack(model, number, inputs, ids, variants, encoded, begin)
            encoded = {turn: self._kept(next(ends)) for turn in turns}
        ends = self._run_stack(model, last, inputs, ids, variants, encoded, begin)
        yield from ((variant_number, examples[block_number], next(ends)) for variant_number, block_number in turns)

    def _kept(self, state: torch.Tensor) -> torch.Tensor:
        """Store the output (T, features) of a stack for the stack that reads it, as (1, T, features)."""
        return self.storage((1, *state.shape), state.dtype, state.device).copy_(state)

    def _run_stack(
        self,
        model: PreTrainedModel,
        index: int,
        inputs: list[tuple[torch.Tensor, ...]],
        ids: list[tuple[torch.Tensor, ...]],
        variants: Sequence[Variant],
        encoded: dict[tuple[int, int], torch.Tensor | None],
        begin: Callable[[int, int, tuple[torch.Tensor, ...]], None],
    ) -> Iterator[torch.Tensor]:
        """Pass blocks through one stack; yield the last hidden states (T, features), variant by variant and block by
        block.

        index: that of the stack in `stacks_of`. inputs, ids: for each block, what each stack reads, and the ids at its
        positions. encoded: by the numbers of variant and block, the output of the stack before, which cross-attention
        reads.
        """
        stack, layers = stacks_of(model.config)[index], [layer for layer in layers_of(model) if layer.stack == index]
        paths = [layer.path for layer in layers]
        keys = [tuple(map(len, block_ids)) for block_ids in ids]  # lengths determine a layer's other outputs
        shape = len(variants), len(keys), max(key[index] for key in keys), stack.width * stack.streams
        states = self.storage(shape, self.widest, self.device)
        outputs: dict[tuple[int, ...], object] = {}  # of the previous layer: the last output for each key

        def run(turn: tuple[int, int], modules: dict[str, nn.Module]) -> torch.Tensor:
            memory = None if encoded[turn] is None else encoded[turn].to(self.device)
            return run_stack(exchanged(model, modules), stack, inputs[turn[1]][index], memory)

        def known(variant_number: int, block_number: int) -> object:
            """Return the output of the previous layer."""
            key = keys[block_number]
            last, *others = outputs_of(outputs[key])
            state = states[variant_number, block_number, : key[index]].to(self.device, last.dtype).view(last.shape)
            return state if isinstance(outputs[key], torch.Tensor) else (state, *others)

        for number, layer in enumerate(over(layers, f"{self.name}, layers")):
            with self.layer(model, layer.number):
                now = {}
                for variant_number, variant in enumerate(variants):
                    with variant.on(model, layer.number) as changed:
                        module = decoder_layers(changed)[layer.number]
                        for block_number, key in enumerate(keys):
                            turn, once = (variant_number, block_number), Once(module)
                            before = dict.fromkeys(paths[:number], Once(module, known(*turn))) if number else {}
                            begin(*turn, ids[block_number])
                            run(turn, before | dict.fromkeys(paths[number:], once))
                            state = outputs_of(once.cached)[0]
                            check_positions(layer.number, state.numel() // shape[-1], key[index])
                            states[turn][: key[index]] = state.view(key[index], -1)
                            now[key] = once.cached
                            give_memory_back()
                changed = module = once = before = None  # they hold this layer's weights
                outputs = now
        for turn in product(range(len(variants)), range(len(keys))):
            self.last = variants[turn[0]]
            yield run(turn, dict.fromkeys(paths, Once(layers[0].module, known(*turn))))

    def storage(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return zeros for what is kept of all blocks during a pass.

        They are on the GPU that computes, if enough of its memory stays free, else in the host's memory within the
        limit, else in a file that is deleted when it is no longer used.
        """
        count = torch.Size(shape).numel()
        size = count * dtype.itemsize
        limits = {torch.device("cpu"): math.inf if self.memory is None else self.memory}
        if device.type != "cpu":
            limits = {device: STATES_ON_GPU * (torch.cuda.mem_get_info(device)[0] + self.taken[device])} | limits
        for kept_on, limit in limits.items():
            if self.taken[kept_on] + size <= limit:
                self.taken[kept_on] += size
                return torch.zeros(shape, dtype=dtype, device=kept_on)
        return torch.frombuffer(_mapped_file(size), dtype=dtype, count=count).view(shape)


def outputs_of(output: torch.Tensor | tuple | list) -> tuple | list:
    """Return the outputs of a layer: hidden states (1, T, features), and what some architectures have beside them."""
    return output if isinstance(output, (tuple, list)) else (output,)


class Once(nn.Module):
    """A stand-in for a layer, in one or several places, that runs it once and returns the cached output on later calls.

    cached: the output, if it is known already and nothing is to be computed. A layer may have parts that are called
    `output`, which other code reads.
    """

    def __init__(self, layer: nn.Module, output: object = None):
        super().__init__()
        self.layer, self.cached = layer, output

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)  # such as the type of its attention

    def forward(self, *arguments, **keywords):
        if self.cached is None:
            self.cached = self.layer(*arguments, **keywords)
        return self.cached


def exchanged(module: nn.Module, others: Mapping[str, nn.Module]) -> nn.Module:
    """Return a copy of a module with other modules at some paths; it shares everything else, and the module is not
    changed."""
    if "" in others:
        return others[""]
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    if "_hf_hook" in vars(module):  # accelerate's hook runs the module that it belongs to
        for name in ACCELERATED:
            vars(copied).pop(name)
        hand_over_hooks(module, copied)
    elif isinstance(forward := vars(module).get("forward"), MethodType) and forward.__self__ is module:
        copied.forward = MethodType(forward.__func__, copied)  # such as accelerate's forward in mixed precision
    for head, paths in groupby(sorted(others), lambda path: path.partition(".")[0]):
        inner = {path.partition(".")[2]: others[path] for path in paths}
        copied._modules[head] = exchanged(module._modules[head], inner)
    return copied


def separate_layers(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model in which each layer, and each part of a layer, is a separate, uncompiled module, so that a hook
    sees one place.

    Weights are shared. A model that needs no change is returned itself.

    Raises:
        UserError: as `layers_of`; or something is wrapped by `torch.compile`.
    """
    if is_streamed(model):
        return model
    model = separate_turns(model)
    shared, compiled = shared_parts(layers_of(model)), compiled_parts(model)
    if not compiled and not shared:
        return model
    # a copy of a module is not compiled
    return exchanged(model, {path: _copied(model.get_submodule(path)) for path in (*compiled, *shared) if path})


def separate_turns(model: PreTrainedModel, own_weights: bool = False) -> PreTrainedModel:
    """Return a model in which a layer that runs several times in a pass has a module for each time, with the same
    weights or its own; a model without such layers is returned itself."""
    copied = copy.deepcopy if own_weights else _copied
    turns = {
        path: Turns(copied(model.get_submodule(path)) for _ in range(count))
        for path, count in repeated(layers_of(model)).items()
    }
    if not turns:
        return model
    model = exchanged(model, turns)
    for stack in stacks_of(model.config):
        runs = stack_module(model, stack)
        runs._forward_pre_hooks = copy.copy(runs._forward_pre_hooks)  # the given model keeps its own hooks
        for path in turns:
            runs.register_forward_pre_hook(turns[path].calls)
    return model


def _copied(module: nn.Module) -> nn.Module:
    """Return a copy of a module and its children, with the same weights and hooks."""
    copied = exchanged(module, {name: _copied(child) for name, child in module._modules.items() if child is not None})
    for name in FORWARD_HOOKS:
        setattr(copied, name, copy.copy(getattr(module, name)))
    return copied


def _mapped_file(size: int) -> mmap.mmap:
    """Return an unnamed file of `size` bytes, mapped into memory, with its disk space reserved.

    Without the reservation, a full disk would let the system kill the process when a page is written.
    """
    folder = os.environ.get("TMPDIR") or tempfile.gettempdir()  # gettempdir ignores an unusable TMPDIR
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
    """Give an empty file `size` bytes with their disk blocks; raise OSError if the disk is too full."""
    if hasattr(os, "posix_fallocate"):  # not on macOS
        try:
            os.posix_fallocate(descriptor, 0, size)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
    zeros = bytes(1 << 20)  # without support for reservations, write the bytes
    while size > 0:
        size -= os.write(descriptor, zeros[:size])


def give_memory_back() -> None:
    """Let the C library return free memory to the system.

    The small tensors that hooks keep lie between large ones, and glibc by itself only returns the end of its heap: 65
    MB more stayed with each layer and block of an OPT-6.7B.
    """
    if _TRIM:
        _TRIM(0)
