"""Histories of tensors: the projections that each one was made of, followed through a pass on the meta device.

Nothing is computed: each tensor has a shape and a history, the set of projections that it was made of. A layer's input
starts with the residual stream as its only history. The output of an operation gets the histories of all its inputs;
the output of a projection starts anew, with this projection. The history of a projection's input therefore tells what
it reads, and the history of a layer's output tells which projections write to the residual stream.
"""

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outliers.models.anatomy.experts import call_by_projection, holds_experts, unfold

# A part of a projection's outputs: the number of equal groups of all outputs, the first one taken from each group, and
# how many are taken from each.
Outputs = tuple[int, int, int]
History = frozenset[str]  # paths of projections, and the marks below, each with a path
NOTHING: History = frozenset()
STREAM = "stream of "  # the residual stream as it enters a layer
MEMORY = "memory"  # the output of another stack
NORM = "norm "  # a norm since the last projection
SUM = "sum "  # a projection whose output was only added, moved and scaled since
MIXED = "mixed"  # positions were mixed since the last projection
ADDED = "added "  # an embedding, or a norm outside of the layers, whose output was only added and moved since

LENGTHS = (13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61)  # candidates for the number of positions
# Operations whose outputs are sums, parts or copies of what they read.
MOVES = frozenset(
    (
        *("add", "sub", "rsub", "cat", "stack", "clone", "copy", "view", "_unsafe_view", "reshape", "t", "transpose"),
        *("permute", "slice", "select", "split", "split_with_sizes", "unbind", "expand", "squeeze", "unsqueeze"),
        *("as_strided", "alias", "detach", "narrow", "chunk", "_to_copy", "contiguous", "index", "index_select"),
        *("index_add", "index_put", "scatter_add", "constant_pad_nd", "flatten", "unflatten", "sum", "mean", "neg"),
        *("lift_fresh", "native_dropout", "movedim", "repeat", "zeros_like", "new_zeros", "new_empty", "empty_like"),
        *("roll", "flip"),
    )
)
SCALES = frozenset(("mul", "div"))
COPIES = frozenset(("_to_copy", "clone"))
PRODUCTS = frozenset(("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "mv", "addmv"))
SCANS = frozenset(("cumsum", "cumprod", "logcumsumexp", "cummax", "roll"))
NORMALIZES = frozenset(
    ("rsqrt", "sqrt", "native_layer_norm", "_fused_rms_norm", "rms_norm", "linalg_vector_norm", "std", "var")
)


def _identity(tensor: torch.Tensor) -> int:
    """Return a number that tensors share if they share their storage."""
    return tensor.untyped_storage()._cdata


def unmistakable_lengths(model: nn.Module) -> tuple[int, ...]:
    """Return two numbers of positions, T, such that no dimension of the model's weights is T or T + 1: a dimension of
    these sizes can only be positions."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    return tuple(length for length in LENGTHS if not sizes & {length, length + 1})[:2]


def is_projection(module: nn.Module) -> bool:
    """Return whether a module multiplies its input with a matrix."""
    weight = module._parameters.get("weight")
    named = weight is not None and weight.ndim == 2 and type(module).__name__.endswith("Linear")
    return isinstance(module, (nn.Linear, Conv1D)) or named


@dataclass
class ProductCall:
    """The use of one matrix in a pass, as of its first multiplication.

    history: of its input. input: the identity (`_cdata`) of its storage. outputs: their number. uses: how often the
    pass multiplies by the matrix. later: histories of the inputs of later multiplications.
    """

    history: History
    input: int
    outputs: int = 0
    uses: int = 1
    later: History = NOTHING


class Flow(TorchDispatchMode):
    """A dispatch mode that records the history of every tensor.

    histories: by storage. modules: the paths of the running modules, outermost first. mixed: for each
    operation that mixes positions, the innermost module, how it mixes, and the history of its input. loose: weights
    used in products although their module is not called. whole: by storage, the projection whose outputs it holds, and
    their number. split: the parts into which operations split the outputs of a projection.
    """

    def __init__(self, lengths: tuple[int, ...], weights: Mapping[int, str], projections: Collection[str]):
        super().__init__()
        self.lengths, self.weights, self.projections = {*lengths}, weights, projections
        self.histories: dict[int, History] = {}
        self.kept: list = []  # storages, so that no later one gets the same identity
        self.modules: list[str] = []
        self.normalizes: set[str] = set()
        self.mixed: list[tuple[str, str, History]] = []
        self.loose: dict[str, ProductCall] = {}
        self.whole: dict[int, tuple[str, int]] = {}
        self.split: dict[str, list[Outputs | None]] = {}

    def history(self, tensor: torch.Tensor) -> History:
        return self.histories.get(_identity(tensor), NOTHING)

    def put(self, tensor: torch.Tensor, history: History) -> None:
        storage = tensor.untyped_storage()
        self.kept.append(storage)
        self.histories[storage._cdata] = history

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in MASKED:
            args = (args[0], [part for tensor in args[1] for part in _indices(tensor)], *args[2:])
        output = VALUES[name](args[0]) if name in VALUES and args[0].is_meta else func(*args, **kwargs)
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        outputs = [tensor for tensor in tree_leaves(output) if isinstance(tensor, torch.Tensor)]
        if not outputs:
            return output
        base = name.rstrip("_")
        if base in COPIES and (weight := self.weights.get(_identity(inputs[0]))):
            self.weights[_identity(outputs[0])] = weight  # such as a router's, in float32
            self.kept.append(outputs[0].untyped_storage())
        self._follow_outputs(inputs, outputs)
        histories = [self.history(tensor) for tensor in inputs]
        history = NOTHING.union(*histories)
        if (base in NORMALIZES or (base == "pow" and isinstance(args[1], float) and args[1] == -0.5)) and self.modules:
            self.normalizes.add(self.modules[-1])
        if history:
            if base not in MOVES:
                lost = (ADDED,) if base in SCALES and sum(map(bool, histories)) == 1 else (ADDED, SUM)
                history = frozenset(label for label in history if not label.startswith(lost))
            if mixing := self._mixes(base, inputs, outputs, args):
                self.mixed.append((self.modules[-1] if self.modules else "", mixing, history))
                if mixing in ("softmax", "product"):  # the output of attention is not normed
                    history = frozenset(label for label in history if not label.startswith(NORM))
                history |= {MIXED}
            if base in PRODUCTS and (weight := self._weight(inputs)):
                read = next(filter(self.history, inputs), inputs[0])  # not the bias, which comes first
                call = ProductCall(history, _identity(read), outputs[0].shape[-1])
                self.loose.setdefault(weight, call)
                history = frozenset((weight, SUM + weight))
        for tensor in outputs:
            self.put(tensor, history | self.history(tensor) if name.endswith("_") else history)
        return output

    def _follow_outputs(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Record which part of a projection's outputs an operation takes, or that its result replaces all of them."""
        source = inputs[0] if inputs else outputs[0]
        storage = source.untyped_storage()
        path, count = self.whole.get(storage._cdata, ("", 0))
        if not path or source.numel() * source.element_size() != storage.nbytes():
            return
        for output in outputs:
            if _identity(output) != storage._cdata:
                # such as clamped outputs
                if len(inputs) == 1 and output.shape[-1:] == (count,) and output.is_contiguous():
                    self.whole[_identity(output)] = path, count
            elif (
                output.dtype == source.dtype
                and 0 < output.numel() < source.numel()
                and (taken := _outputs_in(output, count)) != (1, 0, count)
            ):
                self.split.setdefault(path, []).append(taken)

    def _weight(self, inputs: list[torch.Tensor]) -> str | None:
        """Return the path of a weight that is used in a product outside of the call of its projection; None if there is
        none."""
        if self.modules and self.modules[-1] in self.projections:
            return None
        return next((self.weights[key] for tensor in inputs if (key := _identity(tensor)) in self.weights), None)

    def _mixes(self, base: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], args: tuple) -> str | None:
        """Return how an operation of torch, `base` its name, mixes positions: "softmax" for attention, "convolution",
        "scan", "product", or "part" if it takes some of them; None if it does not."""
        first, out = inputs[0], outputs[0]
        if base in ("_softmax", "softmax", "_safe_softmax"):
            of_keys = {length + more for length in self.lengths for more in (0, 1, *self.lengths)}  # of two stacks too
            return "softmax" if first.ndim >= 3 and first.shape[args[1]] in of_keys else None
        if "scaled_dot" in base:
            return "softmax"
        if base in ("convolution", "conv1d", "conv2d"):
            return "convolution" if max(inputs[1].shape[2:]) > 1 else None
        if base in SCANS:
            return "scan"
        if base in ("bmm", "mm", "baddbmm", "addmm"):
            return "product" if inputs[-2].shape[-1] in self.lengths else None
        if base in ("slice", "select") and first.ndim >= 2:
            axis = args[1] if len(args) > 1 else 0
            whole = first.shape[axis] in self.lengths
            return "part" if whole and (base == "select" or 1 <= out.shape[axis] < first.shape[axis]) else None
        return None


def _outputs_in(part: torch.Tensor, count: int) -> Outputs | None:
    """Return which of a projection's outputs a view holds, see `Outputs`; None if they are not the same ones of equal
    groups."""
    sizes = [1 if stride % count == 0 else size for size, stride in zip(part.shape, part.stride(), strict=True)]
    first = part.storage_offset() % count
    if first + sum((size - 1) * stride for size, stride in zip(sizes, part.stride(), strict=True)) >= count:
        return None  # such as of complex numbers
    columns = torch.arange(count).as_strided(sizes, part.stride(), first).flatten().sort()[0]
    starts = [0, *(1 + (columns.diff() != 1).nonzero()[:, 0]).tolist()]
    groups, first = len(starts), int(columns[0])
    length = len(columns) // groups
    regular = torch.arange(groups)[:, None] * (count // groups) + first + torch.arange(length)
    return (groups, first, length) if torch.equal(columns, regular.flatten()) else None


def _scalar(tensor: torch.Tensor) -> bool | float | int:
    """Return zero as a number of Python, in the place of the value that a tensor on the meta device lacks."""
    return False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0


VALUES = {  # results of operations that need values, which tensors on the meta device do not have
    "_local_scalar_dense": _scalar,
    "nonzero": lambda tensor: tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64),
}


MASKED = frozenset(("index", "index_put", "index_put_"))  # operations that take masks as indices


def _indices(index: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return the indices of all entries for a mask without values, as if it were true everywhere; any other index
    unchanged."""
    if index is None or not index.is_meta or index.dtype != torch.bool:
        return (index,)
    return VALUES["nonzero"](index).unbind(1)


class RecordedPass:
    """A pass of a model on the meta device, and everything that it records."""

    def __init__(self, model: nn.Module):
        self.model = model
        call_by_projection(model)
        for module in list(model.modules()):
            unfold(module, 1)  # all experts of a layer have the same anatomy, and some models have 29,000
        self.paths = {module: path for path, module in model.named_modules()}
        self.layers = _layers_of(self.paths)
        self.lengths = unmistakable_lengths(model)
        projections = {path for module, path in self.paths.items() if is_projection(module)}
        self.flow = Flow(self.lengths, self._weights(), projections)
        self.calls: dict[str, ProductCall] = {}
        self.norms: dict[str, tuple[History, History]] = {}  # the histories of a norm's input and output
        self.entered: Counter = Counter()
        self.widths: dict[str, int] = {}  # by the list of layers
        self.streams: dict[str, int] = {}  # at each position, by the list of layers
        self.parted: set[str] = set()  # projections that multiply parts of their inputs with parts of their weight
        self.left: dict[str, History] = {}
        self.chosen: dict[str, History] = {}  # by the path of experts: the history of the router's choice
        self.order: list[str] = []
        self.before: dict[str, History] = {}  # the history of the first layer's input, by the list of layers
        self.readers: list[str] = []  # modules without children that read what the whole model reads
        self.models: list[str] = []  # paths of models that read what the whole model reads

    def _weights(self) -> dict[int, str]:
        """Return the paths of all matrices by storage: the module's if it has only one, else the parameter's."""
        owners = {}
        for module, path in self.paths.items():
            matrices = {name: one for name, one in module._parameters.items() if one is not None and one.ndim >= 2}
            for name, matrix in matrices.items() if not isinstance(module, nn.Embedding) else ():
                single = len(matrices) == 1 and name == "weight"
                owners.setdefault(_identity(matrix), path if single else f"{path}.{name}")
        return owners

    def run(self, inputs: Mapping[str, object]) -> None:
        self.inputs = {_identity(tensor) for tensor in inputs.values() if isinstance(tensor, torch.Tensor)}
        with ExitStack() as stack:
            self._hook(stack)
            with torch.no_grad(), self.flow:
                self.model(**inputs)

    def _hook(self, stack: ExitStack) -> None:
        experts = _experts_of(self.paths, self.layers)
        for module, path in self.paths.items():
            if any(path.startswith(f"{expert}.") for expert in experts):
                continue
            if path in experts:
                module.forward = functools.partial(self._see_experts, path)
                stack.callback(vars(module).pop, "forward")
            enter = functools.partial(self._enter, path)
            leave = functools.partial(self._leave, path)
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True).remove)
            stack.callback(module.register_forward_hook(leave, with_kwargs=True).remove)

    def _enter(self, path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        flow = self.flow
        flow.modules.append(path)
        tensors = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, torch.Tensor)]
        if isinstance(module, PreTrainedModel) and any(_identity(tensor) in self.inputs for tensor in tensors):
            self.models.append(path)
        if not module._modules and any(_identity(tensor) in self.inputs for tensor in tensors):
            self.readers.append(path)
        if path in self.layers:
            self._enter_layer(path, tensors)
        elif is_projection(module):
            call = self.calls.get(path)
            history = flow.history(tensors[0])
            if call:
                call.uses += 1
                call.later |= history
            else:
                self.calls[path] = ProductCall(history, _identity(tensors[0]))
        elif len(tensors) == 1 and not module._modules:
            self.norms.setdefault(path, (flow.history(tensors[0]), NOTHING))

    def _enter_layer(self, path: str, tensors: list[torch.Tensor]) -> None:
        """Record the width, order and history of the hidden states among the inputs of a layer; they begin a stream."""
        states = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.ndim >= 3]
        if not states:
            return
        first, *others = states
        self.entered[path] += 1
        self.order.append(path)
        self.widths[self.layers[path][0]] = first.shape[-1]
        # behind positions there may be several streams, as hyper-connections have them
        positions = max((axis for axis in range(first.ndim - 1) if first.shape[axis] in self.lengths), default=-2)
        length = first.shape[positions]
        self.streams[self.layers[path][0]] = first.shape[positions:-1].numel() // length
        self.flow.lengths.add(length)
        self.before.setdefault(self.layers[path][0], self.flow.history(first))
        self.flow.put(first, frozenset((STREAM + path,)))
        for other in others:
            if other.ndim == 3 and {*other.shape[:2]} & {*self.lengths} - {length}:
                self.flow.put(other, frozenset((MEMORY,)))

    def _leave(self, path: str, module: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        flow = self.flow
        flow.modules.pop()
        tensors = [value for value in tree_leaves(output) if isinstance(value, torch.Tensor)]
        if not tensors:
            return
        if path in self.layers:
            self.left.setdefault(path, flow.history(tensors[0]))
        elif is_projection(module):
            self.calls[path].outputs = tensors[0].shape[-1]
            if tensors[0].shape[-1] not in module.weight.shape:
                self.parted.add(path)
            for tensor in tensors:
                flow.put(tensor, frozenset((path, SUM + path)))
            flow.whole[_identity(tensors[0])] = path, tensors[0].shape[-1]
        elif (path in flow.normalizes or _is_affine(module)) and path in self.norms:
            read = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            history = frozenset(label for label in flow.history(read) if not label.startswith(ADDED))
            if any(label.startswith(STREAM) for label in history):
                history -= {MIXED}  # an earlier branch mixed them, such as by a convolution behind its last projection
            history |= {NORM + path} | (NOTHING if self.inside(path) else {ADDED + path})
            if tensors[0].shape == read.shape:
                self.norms[path] = self.norms[path][0], history
                flow.put(tensors[0], history)
        elif not (module._modules or self.inside(path) or flow.history(tensors[0])):
            given = {_identity(value) for value in args if isinstance(value, torch.Tensor)}
            if _identity(tensors[0]) not in given:
                flow.put(tensors[0], frozenset((ADDED + path,)))  # an embedding

    def wide(self) -> dict[str, int]:
        """Return the lists of layers whose states hold several streams one behind the other, with the width of one
        stream."""
        embeddings = {path: self.model.get_submodule(path) for path in self.readers}
        widths = {
            top: embedding.embedding_dim
            for path, embedding in embeddings.items()
            for top, before in self.before.items()
            if isinstance(embedding, nn.Embedding) and before == {ADDED + path}
        }
        return {top: width for top, width in widths.items() if self.widths[top] in range(2 * width, 99 * width, width)}

    def inside(self, path: str) -> bool:
        """Return whether a module is part of a layer."""
        return any(owner in self.layers for owner in ancestors(path))

    def _see_experts(self, path: str, *args, **kwargs) -> torch.Tensor:
        """Replace the forward of experts, because tokens without values cannot choose any."""
        flow = self.flow
        x, *others = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        self.calls.setdefault(path, ProductCall(flow.history(x), _identity(x), x.shape[-1]))
        self.chosen[path] = NOTHING.union(*map(flow.history, others))
        output = torch.empty_like(x)
        flow.put(output, frozenset((path, SUM + path)))
        return output


def _is_affine(module: nn.Module) -> bool:
    """Return whether a module only has a factor and a summand for each feature, like MobileBERT's replacement for
    norms."""
    shapes = {name: parameter.shape for name, parameter in module._parameters.items() if parameter is not None}
    return shapes.keys() == {"weight", "bias"} and shapes["weight"] == shapes["bias"] and not module._modules


def _layers_of(paths: Mapping[nn.Module, str]) -> dict[str, tuple[str, int]]:
    """Return the members of all outermost module lists: by path, the list and the place in it."""
    lists = {path: module for module, path in paths.items() if isinstance(module, nn.ModuleList) and len(module)}
    tops = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    return {paths[member]: (top, place) for top in tops for place, member in enumerate(lists[top])}


def _experts_of(paths: Mapping[nn.Module, str], layers: Collection[str]) -> list[str]:
    """Return the paths of experts that cannot be unfolded: modules with 3-D weights, or lists of experts."""
    found: list[str] = []
    for module, path in paths.items():
        if path in layers or holds_experts(module) or not any(layer in layers for layer in ancestors(path)):
            continue
        shapes = [parameter.shape for parameter in module._parameters.values() if parameter is not None]
        matrices = [shape for shape in shapes if len(shape) == 3 and shape[0] > 1]
        lists = [name for name, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child)]
        is_expert_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and "Experts" in type(module).__name__
        # a recurrence may have a matrix for each head, too
        is_named_experts = "expert" in f"{path} {type(module).__name__}".lower()
        holds = (is_named_experts and len(matrices) >= 2) or is_expert_list or any("experts" in name for name in lists)
        if holds and not any(path.startswith(f"{other}.") for other in found):
            found.append(path)
    return found


def ancestors(path: str) -> Iterator[str]:
    """Yield the path of a module and those of the modules that contain it, innermost first, without the model."""
    while path:
        yield path
        path = path.rpartition(".")[0]
