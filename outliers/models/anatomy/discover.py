"""Finds the anatomy of a model by following tensors through one forward pass on the meta device.

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

from outliers.errors import UserError
from outliers.models.anatomy.experts import Expert, call_by_projection, holds_experts, unfold

# A part of a projection's outputs: the number of equal groups of all outputs, the first one taken from each group, and
# how many are taken from each.
Outputs = tuple[int, int, int]
History = frozenset[str]  # paths of projections, and the marks below, each with a path
NOTHING: History = frozenset()
STREAM = "stream of "  # the residual stream as it enters a layer
MEMORY = "memory"  # what another stack has put out
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


def lengths_of(model: nn.Module) -> tuple[int, ...]:
    """Return two numbers of positions that no dimension of the model's weights equals or exceeds by one."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape}
    return tuple(length for length in LENGTHS if not sizes & {length, length + 1})[:2]


def is_projection(module: nn.Module) -> bool:
    """Return whether a module multiplies its input with a matrix."""
    weight = module._parameters.get("weight")
    named = weight is not None and weight.ndim == 2 and type(module).__name__.endswith("Linear")
    return isinstance(module, (nn.Linear, Conv1D)) or named


@dataclass
class Call:
    """The first product of a pass with a matrix.

    history: of its input. input: the identity of the input's storage. outputs: their number. uses: products of the pass
    with this matrix. later: of the inputs of the later products.
    """

    history: History
    input: int
    outputs: int = 0
    uses: int = 1
    later: History = NOTHING


class Flow(TorchDispatchMode):
    """A dispatch mode that records the history of every tensor.

    of: the history of each storage. modules: the paths of the running modules, outermost first. mixed: for each
    operation that mixes positions, the innermost module, how it mixes, and the history. loose: weights that are
    multiplied with although their module is not called. whole: the projection whose outputs a storage holds, and their
    number. split: the parts into which the outputs of a projection are taken apart.
    """

    def __init__(self, lengths: tuple[int, ...], weights: Mapping[int, str], projections: Collection[str]):
        super().__init__()
        self.lengths, self.weights, self.projections = {*lengths}, weights, projections
        self.of: dict[int, History] = {}
        self.kept: list = []  # storages, or others would be made in their place
        self.modules: list[str] = []
        self.normalizes: set[str] = set()
        self.mixed: list[tuple[str, str, History]] = []
        self.loose: dict[str, Call] = {}
        self.whole: dict[int, tuple[str, int]] = {}
        self.split: dict[str, list[Outputs | None]] = {}

    def history(self, tensor: torch.Tensor) -> History:
        return self.of.get(tensor.untyped_storage()._cdata, NOTHING)

    def put(self, tensor: torch.Tensor, history: History) -> None:
        storage = tensor.untyped_storage()
        self.kept.append(storage)
        self.of[storage._cdata] = history

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in MASKED:
            args = (args[0], [part for one in args[1] for part in _places(one)], *args[2:])
        output = VALUES[name](args[0]) if name in VALUES and args[0].is_meta else func(*args, **kwargs)
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        outputs = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]
        if not outputs:
            return output
        base = name.rstrip("_")
        if base in COPIES and (weight := self.weights.get(inputs[0].untyped_storage()._cdata)):
            self.weights[outputs[0].untyped_storage()._cdata] = weight  # such as of a router, in float32
            self.kept.append(outputs[0].untyped_storage())
        self._follow_outputs(inputs, outputs)
        histories = [self.history(one) for one in inputs]
        history = NOTHING.union(*histories)
        if (base in NORMALIZES or (base == "pow" and isinstance(args[1], float) and args[1] == -0.5)) and self.modules:
            self.normalizes.add(self.modules[-1])
        if history:
            if base not in MOVES:
                lost = (ADDED,) if base in SCALES and sum(map(bool, histories)) == 1 else (ADDED, SUM)
                history = frozenset(label for label in history if not label.startswith(lost))
            if how := self._mixes(base, inputs, outputs, args):
                self.mixed.append((self.modules[-1] if self.modules else "", how, history))
                if how in ("softmax", "product"):  # what attention puts out was not normed
                    history = frozenset(label for label in history if not label.startswith(NORM))
                history |= {MIXED}
            if base in PRODUCTS and (weight := self._weight(inputs)):
                read = next((one for one in inputs if self.history(one)), inputs[0])  # and not the bias before it
                call = Call(history, read.untyped_storage()._cdata, outputs[0].shape[-1])
                self.loose.setdefault(weight, call)
                history = frozenset((weight, SUM + weight))
        for one in outputs:
            self.put(one, history | self.history(one) if name.endswith("_") else history)
        return output

    def _follow_outputs(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Record which part of a projection's outputs an operation takes, or that its result stands for all of them."""
        source = inputs[0] if inputs else outputs[0]
        storage = source.untyped_storage()
        path, count = self.whole.get(storage._cdata, ("", 0))
        if not path or source.numel() * source.element_size() != storage.nbytes():
            return
        for one in outputs:
            if one.untyped_storage()._cdata != storage._cdata:
                if (
                    len(inputs) == 1 and one.shape[-1:] == (count,) and one.is_contiguous()
                ):  # such as a limit of the outputs
                    self.whole[one.untyped_storage()._cdata] = path, count
            elif (
                one.dtype == source.dtype
                and 0 < one.numel() < source.numel()
                and (taken := _taken(one, count)) != (1, 0, count)
            ):
                self.split.setdefault(path, []).append(taken)

    def _weight(self, inputs: list[torch.Tensor]) -> str | None:
        """Return the path of a weight that is multiplied with outside of the call of a projection, if there is one."""
        if self.modules and self.modules[-1] in self.projections:
            return None
        return next(
            (self.weights[key] for one in inputs if (key := one.untyped_storage()._cdata) in self.weights), None
        )

    def _mixes(self, base: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], args: tuple) -> str | None:
        """Return how an operation mixes positions, such as "softmax" for attention; None if it does not."""
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


def _taken(part: torch.Tensor, count: int) -> Outputs | None:
    """Return which of the outputs of a projection a view of them holds; None if they form no regular pattern."""
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
    return False if tensor.dtype == torch.bool else 0.0 if tensor.is_floating_point() else 0


VALUES = {  # results of operations that need values, which tensors on the meta device do not have
    "_local_scalar_dense": _scalar,
    "nonzero": lambda tensor: tensor.new_empty((tensor.numel(), tensor.ndim), dtype=torch.int64),
}


MASKED = frozenset(("index", "index_put", "index_put_"))  # operations that take masks as indices


def _places(index: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Return an index that stands for a mask without values, as if it were true everywhere; others as they are."""
    if index is None or not index.is_meta or index.dtype != torch.bool:
        return (index,)
    return VALUES["nonzero"](index).unbind(1)


@dataclass(frozen=True)
class Branch:
    """Connected projections: those that read the residual stream, those between, and those that write to it.

    mixes: whether the branch mixes positions. memory: the projections that read the output of another stack.
    """

    mixes: bool
    reads: tuple[str, ...]
    between: tuple[str, ...]
    writes: tuple[str, ...]
    memory: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kind:
    """The parts of one layer as a pass shows them; all paths are relative to the layer.

    Attributes:
        branches: in the order in which they run.
        norms: norms that read the residual stream, each with the projections that read its output.
        norms_of_sums: norms behind a branch through which the residual stream itself goes.
        norms_behind: norms that read the output of a single projection, each with that projection.
        norms_between: norms of sums and all others, each with the projections that read its output.
        routers: projections that read the residual stream and only choose or weigh the outputs of others.
        experts: modules that hold the weights of several experts and cannot be unfolded into projections.
        inputs: the number of the tensor that each projection reads.
        attention, cross_attention: the modules in which a softmax over positions runs.
        split: for a projection that alone reads the stream for its branch, the parts into which its outputs are taken
            apart; None for an irregular part.
        recurrent: whether something other than a softmax mixes positions.
        apart: other modules with weights, and the reason why they have no role.
        layers: the places of other layers whose states this one reads, beside the residual stream.
    """

    branches: tuple[Branch, ...] = ()
    norms: tuple[tuple[str, tuple[str, ...]], ...] = ()
    norms_of_sums: tuple[str, ...] = ()
    norms_behind: tuple[tuple[str, str], ...] = ()
    norms_between: tuple[tuple[str, tuple[str, ...]], ...] = ()
    routers: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    inputs: tuple[tuple[str, int], ...] = ()
    attention: tuple[str, ...] = ()
    cross_attention: tuple[str, ...] = ()
    split: tuple[tuple[str, tuple[Outputs | None, ...]], ...] = ()
    recurrent: bool = False
    apart: tuple[tuple[str, str], ...] = ()
    layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Stack:
    """Layers that run one after the other.

    Attributes:
        layers: the path of their list.
        kinds: the kind of each layer; None for one that never runs.
        turns: the places of the layers in the list, in the order in which they run.
        width: the number of features of the residual stream.
        module: the path of the innermost model that gets the inputs of the whole model and runs these layers.
        added: modules outside of the layers whose outputs are summed to the first layer's input.
        norms: the norms among `added`.
        readers: modules without children that get an input of the whole model, such as the embedding of tokens.
        streams: the number of residual streams at each position, more than one with hyper-connections.
        last_norm: the norm that reads the output of the last layer, if there is one.
    """

    layers: str
    kinds: tuple[Kind | None, ...]
    turns: tuple[int, ...]
    width: int
    module: str
    added: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    streams: int = 1
    last_norm: str | None = None


class _Pass:
    """A pass of a model with everything that it records."""

    def __init__(self, model: nn.Module):
        self.model = model
        call_by_projection(model)
        for module in list(model.modules()):
            unfold(module, 1)  # all experts of a layer have the same anatomy, and some models have 29,000
        self.paths = {module: path for path, module in model.named_modules()}
        self.layers = _layers_of(self.paths)
        self.lengths = lengths_of(model)
        projections = {path for module, path in self.paths.items() if is_projection(module)}
        self.flow = Flow(self.lengths, self._weights(), projections)
        self.calls: dict[str, Call] = {}
        self.norms: dict[str, tuple[History, History]] = {}  # what a norm reads, and what is behind it
        self.entered: Counter = Counter()
        self.widths: dict[str, int] = {}  # by the list of layers
        self.streams: dict[str, int] = {}  # at each position, by the list of layers
        self.parted: set[str] = set()  # projections that multiply parts of their inputs with parts of their weight
        self.left: dict[str, History] = {}
        self.chosen: dict[str, History] = {}  # of experts: the history of what chooses among them
        self.order: list[str] = []
        self.before: dict[str, History] = {}  # what enters the first layer, by the list of layers
        self.readers: list[str] = []  # modules without others that read what the whole model reads
        self.models: list[str] = []  # those that were called with what the whole model reads

    def _weights(self) -> dict[int, str]:
        """Return the paths of all matrices by storage: the module's if it has a single one, else the parameter's."""
        owners = {}
        for module, path in self.paths.items():
            matrices = {name: one for name, one in module._parameters.items() if one is not None and one.ndim >= 2}
            for name, one in matrices.items() if not isinstance(module, nn.Embedding) else ():
                alone = len(matrices) == 1 and name == "weight"
                owners.setdefault(one.untyped_storage()._cdata, path if alone else f"{path}.{name}")
        return owners

    def run(self, inputs: Mapping[str, object]) -> None:
        self.inputs = {one.untyped_storage()._cdata for one in inputs.values() if isinstance(one, torch.Tensor)}
        with ExitStack() as stack:
            self._hook(stack)
            with torch.no_grad(), self.flow:
                self.model(**inputs)

    def _hook(self, stack: ExitStack) -> None:
        experts = _experts_of(self.paths, self.layers)
        for module, path in self.paths.items():
            if any(path.startswith(f"{one}.") for one in experts):
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
        tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        if isinstance(module, PreTrainedModel) and any(one.untyped_storage()._cdata in self.inputs for one in tensors):
            self.models.append(path)
        if not module._modules and any(one.untyped_storage()._cdata in self.inputs for one in tensors):
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
                self.calls[path] = Call(history, tensors[0].untyped_storage()._cdata)
        elif len(tensors) == 1 and not module._modules:
            self.norms.setdefault(path, (flow.history(tensors[0]), NOTHING))

    def _enter_layer(self, path: str, tensors: list[torch.Tensor]) -> None:
        states = [one for one in tensors if one.is_floating_point() and one.ndim >= 3]
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
        tensors = [one for one in tree_leaves(output) if isinstance(one, torch.Tensor)]
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
            flow.whole[tensors[0].untyped_storage()._cdata] = path, tensors[0].shape[-1]
        elif (path in flow.normalizes or _is_affine(module)) and path in self.norms:
            read = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
            history = frozenset(label for label in flow.history(read) if not label.startswith(ADDED))
            if any(label.startswith(STREAM) for label in history):
                history -= {MIXED}  # by a branch before, such as its convolution behind the last projection
            history |= {NORM + path} | (NOTHING if self._inside(path) else {ADDED + path})
            if tensors[0].shape == read.shape:
                self.norms[path] = self.norms[path][0], history
                flow.put(tensors[0], history)
        elif not (module._modules or self._inside(path) or flow.history(tensors[0])):
            given = {one.untyped_storage()._cdata for one in args if isinstance(one, torch.Tensor)}
            if tensors[0].untyped_storage()._cdata not in given:
                flow.put(tensors[0], frozenset((ADDED + path,)))  # of an embedding

    def wide(self) -> dict[str, int]:
        """Return the lists of layers with several streams one behind the other, and the width of one of them."""
        embeddings = {path: self.model.get_submodule(path) for path in self.readers}
        widths = {
            top: embedding.embedding_dim
            for path, embedding in embeddings.items()
            for top, before in self.before.items()
            if isinstance(embedding, nn.Embedding) and before == {ADDED + path}
        }
        return {top: width for top, width in widths.items() if self.widths[top] in range(2 * width, 99 * width, width)}

    def _inside(self, path: str) -> bool:
        """Return whether a module is part of a layer."""
        return any(one in self.layers for one in ancestors(path))

    def _see_experts(self, path: str, *args, **kwargs) -> torch.Tensor:
        """Replace the forward of experts, because tokens without values cannot choose any."""
        flow = self.flow
        x, *others = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        self.calls.setdefault(path, Call(flow.history(x), x.untyped_storage()._cdata, x.shape[-1]))
        self.chosen[path] = NOTHING.union(*map(flow.history, others))
        output = torch.empty_like(x)
        flow.put(output, frozenset((path, SUM + path)))
        return output


def _is_affine(module: nn.Module) -> bool:
    """Return whether a module has a factor and a summand for each feature and nothing else, as MobileBERT's in the
    place of norms."""
    shapes = {name: one.shape for name, one in module._parameters.items() if one is not None}
    return shapes.keys() == {"weight", "bias"} and shapes["weight"] == shapes["bias"] and not module._modules


def _layers_of(paths: Mapping[nn.Module, str]) -> dict[str, tuple[str, int]]:
    """Return the members of all module lists that are in no other list: by path, the list and the place in it."""
    lists = {path: module for module, path in paths.items() if isinstance(module, nn.ModuleList) and len(module)}
    tops = [path for path in lists if not any(path.startswith(f"{other}.") for other in lists)]
    return {paths[one]: (top, place) for top in tops for place, one in enumerate(lists[top])}


def _experts_of(paths: Mapping[nn.Module, str], layers: Collection[str]) -> list[str]:
    """Return the paths of experts that cannot be unfolded: modules with 3-D weights, or lists of experts."""
    found: list[str] = []
    for module, path in paths.items():
        if path in layers or holds_experts(module) or not any(one in layers for one in ancestors(path)):
            continue
        shapes = [parameter.shape for parameter in module._parameters.values() if parameter is not None]
        matrices = [shape for shape in shapes if len(shape) == 3 and shape[0] > 1]
        lists = [name for name, child in module.named_children() if isinstance(child, nn.ModuleList) and len(child)]
        of_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and "Experts" in type(module).__name__
        called_so = "expert" in f"{path} {type(module).__name__}".lower()  # and no recurrence with a matrix a head
        holds = (called_so and len(matrices) >= 2) or of_list or any("experts" in name for name in lists)
        if holds and not any(path.startswith(f"{other}.") for other in found):
            found.append(path)
    return found


def find_stacks(model: nn.Module, inputs: Mapping[str, object]) -> list[Stack]:
    """Return the stacks of layers of a model on the meta device, in the order in which they run.

    inputs: the arguments of the model's call.

    Raises:
        UserError: no list of layers is called with hidden states.
    """
    seen = _Pass(model)
    seen.run(inputs)
    counts = Counter(seen.layers[path][0] for path in dict.fromkeys(seen.order))
    if not counts:
        raise UserError("no layers were called; expected a list of layers that pass hidden states (tokens, features)")
    return [_stack(seen, top) for top in _main(seen, counts)]


def _main(seen: _Pass, counts: Counter) -> list[str]:
    """Return the lists of layers that are stacks: the longest one, or both of an encoder-decoder."""
    (longest, _), *_ = counts.most_common()
    crossed = [path for path, call in seen.calls.items() if MEMORY in call.history | call.later]
    if crossed:
        reading = next(top for path, (top, _) in seen.layers.items() if crossed[0].startswith(f"{path}."))
        before = [top for top in dict.fromkeys(seen.layers[path][0] for path in seen.order) if top != reading]
        return [max(before, key=counts.get), reading] if before else [reading]
    often = [top for top in counts if any(seen.entered[path] > 1 for path, (of, _) in seen.layers.items() if of == top)]
    if longest in often and len(often) > 1:
        raise UserError(
            f"unknown architecture '{seen.model.config.model_type}': layers of {' and '.join(map(repr, often))} run in "
            "turns; expected layers of a single list, in which each passes its output on to the next"
        )
    return [longest]


def _stack(seen: _Pass, top: str) -> Stack:
    members = sorted((place, path) for path, (of, place) in seen.layers.items() if of == top)
    kinds: dict[Kind, Kind] = {}
    found = []
    for _, path in members:
        kind = _Layer(seen, path).kind() if path in seen.left else None
        found.append(kinds.setdefault(kind, kind) if kind else None)
    module = next((one for one in ancestors(top) if one in seen.models), "")
    added = sorted(label.removeprefix(ADDED) for label in seen.before[top] if label.startswith(ADDED))
    norms = tuple(path for path in added if path in seen.flow.normalizes)
    last = [
        path
        for path, (before, behind) in seen.norms.items()
        if behind and not seen._inside(path) and any(label.startswith(f"{STREAM}{top}.") for label in before)
    ]
    turns = tuple(seen.layers[path][1] for path in seen.order if path in seen.left and seen.layers[path][0] == top)
    width, streams = seen.widths[top], seen.streams[top]
    if narrow := seen.wide().get(top):
        width, streams = narrow, width // narrow
    return Stack(
        top,
        tuple(found),
        turns,
        width,
        module,
        tuple(added),
        norms,
        tuple(seen.readers),
        streams,
        next(iter(last), None),
    )


class _Layer:
    """Derives the kind of one layer from a pass; all paths are relative to the layer."""

    def __init__(self, seen: _Pass, path: str):
        self.seen, self.prefix, self.stream = seen, f"{path}.", STREAM + path
        self.calls = self._of_layer(seen.calls) | self._of_layer(seen.flow.loose)
        self.left = seen.left[path]
        self.experts = tuple(one for one in self._of_layer(seen.chosen))
        written, chosen = self.own(self.left), self.own(NOTHING.union(*self._of_layer(seen.chosen).values()))
        into = [one for one, call in self.calls.items() if self.stream in call.history]
        owners = {one: seen.model.get_submodule((self.prefix + one).rpartition(".")[0]) for one in into}
        # what experts read may be weighted already
        self.weighted = {*self.experts, *(one for one, owner in owners.items() if isinstance(owner, Expert))}
        for one in self.weighted:
            of = self.calls[one].history
            chosen |= {other for other in into if self.prefix + other in of and SUM + self.prefix + other not in of}
        # hyper-connections add what a layer puts out to several streams, each as wide as an embedding
        top = seen.layers[path][0]
        widths = {seen.widths[top], seen.wide().get(top)}
        weighs = {
            one
            for one, call in self.calls.items()
            if one in written
            and SUM + self.prefix + one not in self.left
            and (one in into or call.outputs not in widths)
        }
        routers: set[str] = set()
        for one in reversed(self.calls):  # behind its readers
            others = self._readers(one)
            if one not in self.weighted and others <= routers and (others or one in chosen | weighs):
                routers.add(one)
        routers |= self._mixes_of_streams(written - {*into}) if top in seen.wide() else set()
        self.routers = tuple(one for one in self.calls if one in routers)
        self.reads = [one for one in into if one not in self.routers]
        self.memory = [one for one, call in self.calls.items() if MEMORY in call.history and one not in into]
        self.writes = [one for one in self.calls if one in written and one not in (*into, *self.memory)]

    def _of_layer(self, found: Mapping[str, object]) -> dict:
        size = len(self.prefix)
        return {path[size:]: one for path, one in found.items() if path.startswith(self.prefix)}

    def own(self, history: History) -> set[str]:
        """Return the projections of this layer that are in a history."""
        return {label[len(self.prefix) :] for label in history if label.startswith(self.prefix)}

    def _readers(self, projection: str) -> set[str]:
        """Return the other projections that read a projection's output, but not the stream to which it is added."""
        behind = {one for one, call in self.calls.items() if self.stream not in call.history and one != projection}
        return {one for one in behind - self.weighted if projection in self.own(self.calls[one].history)}

    def _mixes_of_streams(self, writes: set[str]) -> set[str]:
        """Return the projections from which no other projection makes what is written: they weigh streams."""
        fed, left = {*writes, *self.weighted}, [*writes]
        while left:
            call = self.calls[left.pop()]
            more = self.own(call.history) - fed if self.stream not in call.history else set()
            fed |= more
            left += more
        return {one for one in self.calls if one not in fed}

    def branches(self) -> Iterator[Branch]:
        """Yield the branches of the layer, in the order of their first call."""
        members = [one for one in self.calls if one not in self.routers]
        first = {one: one for one in members}

        def root(one: str) -> str:
            while first[one] != one:
                one = first[one]
            return one

        for one in members:
            for other in self.own(self.calls[one].history) & first.keys() if one not in self.reads else ():
                roots = sorted((root(one), root(other)), key=members.index)
                first[roots[1]] = roots[0]
        mixing = [self.own(history) for _, _, history in self.seen.flow.mixed]
        attending = {path.partition(".")[0] for path in self._softmaxes()}
        for start in dict.fromkeys(map(root, members)):
            of = [one for one in members if root(one) == start]
            before = {*of} - {*self.writes}
            mixes = any(MIXED in self.calls[one].history for one in of) or any(before & mixed for mixed in mixing)
            parts = (self.reads, self._between(of), self.writes, self.memory)
            reads, between, writes, memory = (tuple(one for one in of if one in part) for part in parts)
            if reads or memory:
                # what writes nothing in this pass, such as a summary of more positions, is of the module that it is in
                inside = not writes and {one.partition(".")[0] for one in reads} & attending
                yield Branch(mixes or bool(inside), reads, between, writes, memory)

    def _softmaxes(self) -> dict[str, set[str]]:
        """Return the modules in which a softmax over positions runs, with the projections whose outputs it reads."""
        return {
            self._holder(path): self.own(history)
            for path, how, history in self.seen.flow.mixed
            if how == "softmax" and path.startswith(self.prefix)
        }

    def _between(self, members: list[str]) -> list[str]:
        return [one for one in members if one not in (*self.reads, *self.writes, *self.memory)]

    def norms(self) -> dict[str, History]:
        """Return the norms of the layer with the histories of their inputs."""
        return {path: before for path, (before, behind) in self._of_layer(self.seen.norms).items() if behind}

    def kind(self) -> Kind:
        norms, branches = self.norms(), tuple(self.branches())
        in_front = {norm: self._reading(norm) for norm, before in norms.items() if self.stream in before}
        kept = [norm for norm in in_front if NORM + self.prefix + norm in self.left]
        rescaling = [norm for norm in kept if self.own(norms[norm]) - {*self.routers}]
        behind = {
            norm: (*sorted(own),)
            for norm, before in norms.items()
            if self.stream not in before
            and (own := self.own(before) - {*self.routers})
            and own <= {*self.writes, *self.experts}
        }
        front = {norm: of for norm, of in in_front.items() if norm not in kept and of}
        crossed = {one for branch in branches if branch.memory for one in (*branch.reads, *branch.memory)}
        softmaxes = {path: bool(own & crossed) for path, own in self._softmaxes().items()}
        split = self._of_layer(self.seen.flow.split)
        alone = [branch.reads[0] for branch in branches if len(branch.reads) == 1]
        convolved = any(how == "convolution" and path.startswith(self.prefix) for path, how, _ in self.seen.flow.mixed)
        tensors = list(dict.fromkeys(call.input for call in self.calls.values()))
        return Kind(
            branches,
            tuple(front.items()),
            tuple(rescaling),
            tuple((norm, one) for norm, of in behind.items() for one in of),
            tuple((norm, self._reading(norm)) for norm in norms if norm not in {*front, *behind}),
            tuple(one for one in self.routers if self._is_module(one)),
            self.experts,
            tuple((one, tensors.index(call.input)) for one, call in self.calls.items()),
            tuple(path for path, cross in softmaxes.items() if not cross),
            tuple(path for path, cross in softmaxes.items() if cross),
            tuple((one, tuple(dict.fromkeys(split[one]))) for one in alone if one in split),
            convolved or sum(branch.mixes for branch in branches) > len(softmaxes),
            tuple(self._apart(branches)),
            self._other_layers(),
        )

    def _reading(self, norm: str) -> tuple[str, ...]:
        """Return the projections and norms that read the output of a norm, and not only that of a norm behind it."""
        label, norms = NORM + self.prefix + norm, self.norms()
        behind = {other for other, before in norms.items() if label in before}
        hidden = {NORM + self.prefix + other for other in behind}
        histories = {one: call.history for one, call in self.calls.items()} | {one: norms[one] for one in behind}
        return tuple(one for one, history in histories.items() if label in history and not hidden & history)

    def _is_module(self, path: str) -> bool:
        return self.prefix + path in self.seen.paths.values()

    def _holder(self, path: str) -> str:
        """Return the path of the innermost module with children that is this module or contains it."""
        module = self.seen.model.get_submodule(path)
        while not module._modules:
            path = path.rpartition(".")[0]
            module = self.seen.model.get_submodule(path)
        return path[len(self.prefix) :]

    def _apart(self, branches: tuple[Branch, ...]) -> Iterator[tuple[str, str]]:
        """Yield the matrices without a role, each with the reason."""
        roles = {*self.routers, *self.experts}
        for branch in branches:
            roles |= {*branch.reads, *branch.between, *branch.writes, *branch.memory}
        modules = self._of_layer({path: module for module, path in self.seen.paths.items()})
        for path, call in self.calls.items():
            if self.prefix + path in self.seen.parted:
                yield path, "parts of its input are multiplied with parts of its weight"
            elif path not in self.routers and call.uses > self.seen.entered[self.prefix[:-1]]:
                yield path, f"it runs {call.uses} times in a pass"
            elif self.prefix + path in self.seen.flow.loose:
                if path not in self.routers or not self._is_module(path):
                    yield path, "its weight is multiplied with, and no module is called for that"
            elif path not in roles:
                yield path, "it reads no hidden state of this layer"
        for path, module in modules.items():
            inside = any(path.startswith(f"{one}.") for one in self.experts)
            if path in self.calls or inside or holds_experts(module):
                continue
            for name, one in module._parameters.items():
                if one is None or one.ndim < 2 or f"{path}.{name}" in self.calls:
                    continue
                if is_projection(module):
                    yield path, "it is never called"
                elif "Conv" in type(module).__name__:
                    yield path, "it is a convolution"
                elif isinstance(module, nn.Embedding):
                    yield path, "it is an embedding"
                else:
                    yield f"{path}.{name}", "its weight is no matrix that hidden states are multiplied with"

    def _other_layers(self) -> tuple[int, ...]:
        """Return the places of other layers from which this one reads something beside the residual stream."""
        labels = NOTHING.union(*(call.history | call.later for call in self.calls.values()), self.left)
        labels |= NOTHING.union(*(of for path, _, of in self.seen.flow.mixed if path.startswith(self.prefix)))
        places = set()
        for label in labels:
            path = label.rpartition(" ")[2]
            if path.startswith(self.prefix) or f"{path}." == self.prefix:
                continue
            owner = next((one for one in ancestors(path) if one in self.seen.layers), None)
            if owner in self.seen.left:
                places.add(self.seen.layers[owner][1])
        return tuple(sorted(places))


def ancestors(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition(".")[0]
