"""Hooks that read or change hidden states of a model, and are removed on every exit, also on errors."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import TypeVar

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from outliers.criterion import RESIDUAL, ROLES, of_transformerlens, role_of
from outliers.errors import UserError, shown, unknown_name
from outliers.models.anatomy import (
    Layer,
    Projection,
    check_not_compiled,
    check_used_once,
    decoder_layers,
    experts_of,
    layers_of,
    state_readers,
)
from outliers.models.anatomy.experts import call_by_projection, expert_count, restore
from outliers.models.anatomy.names import LayerState, state_names
from outliers.models.anatomy.weights import is_offloaded
from outliers.models.attention import eager

Visit = Callable[[int, str, torch.Tensor], torch.Tensor | None]
Hook = TypeVar("Hook", bound=Callable)
STATES = (*ROLES, RESIDUAL)
MASKS = ("attention_mask", "mask")  # names of the mask among the arguments of attention modules

# Attributes in which torch keeps the hooks of a module: hooks that a replacement layer can call too.
FORWARD_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)
# Hooks that a replacement cannot call: they see gradients, or tensors of the state by name.
OTHER_HOOKS = (
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def independent(hook: Hook) -> Hook:
    """Mark a hook, or a function that it calls, as keeping no state between blocks, and return it."""
    hook.independent = True
    return hook


def is_independent(hook: Callable) -> bool:
    return getattr(hook, "independent", False)


@contextmanager
def attached(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks when the context ends; handles: from an iterator that registers them."""
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        yield


@contextmanager
def hooks(
    model: PreTrainedModel,
    visit: Visit,
    roles: Iterable[str] = ROLES,
    layers: Iterable[int] | None = None,
    names: str | None = None,
) -> Iterator[None]:
    """Return a context in which a given function is called with every hidden state.

    The model may be run by `model(ids)`, `model.generate(…)`, a training step, or a function of this package such as
    `outliers.perplexity`. The hooks are removed when the context ends, also by an error. A streamed model passes all
    blocks through a layer before the next one, so that the function sees layer 0 of every block first.

    Args:
        model: a causal language model, resident or streamed, quantized or not.
        visit: called as `visit(layer, role, x)`: the number of a decoder layer, the role, and the hidden state (tokens,
            features), sequences of a batch one after the other. A tensor that it returns replaces x; the residual
            stream cannot be replaced.
        roles: "attn_in", "attn_out", "ffn_in", "ffn_out", the inputs of the q/k/v, the attention output, the first and
            the second feed-forward projections; "residual", the output of a decoder layer; or one of these in one layer
            by its name in TransformerLens, such as "blocks.3.mlp.hook_post".
        layers: their numbers, from 0; None for all.
        names: "transformerlens" or "nnsight": what the role is called in `visit`, such as "blocks.3.mlp.hook_post" or
            "model.layers[3].mlp.down_proj.input" (docs/names.md). None for the names above.

    Raises:
        UserError: a role is unknown, the model has not all of these layers, or they have none of these roles; names are
            unknown, or do not tell the stacks of a model apart; or its architecture is unknown.

    Example:
        >>> largest = {}
        >>> with outliers.hooks(model, lambda layer, role, x: largest.update({(layer, role): x.abs().max().item()})):
        ...     _ = model(blocks)
        >>> largest[0, "ffn_out"] > 0
        True
    """
    check_used_once(model)
    check_not_compiled(model)
    roles = [roles] if isinstance(roles, str) else list(roles)
    numbers = range(len(decoder_layers(model)))
    states = _states(roles, numbers if layers is None else layers)
    known = state_names(model, names) if names else {}
    projections = [one for one in state_readers(model) if {one.layer_state, (one.layer, one.role)} & {*states}]
    streams = [layer for layer, role in states if role == RESIDUAL]
    layers = sorted({layer for layer, _role in states})
    if not set(layers) <= set(numbers) or not (projections or streams):
        known_roles = ", ".join([*dict.fromkeys(reader.layer_state[1] for reader in state_readers(model)), RESIDUAL])
        raise UserError(
            f"no hidden states of role {' or '.join(roles)} in layers {shown(layers)}; this model has the layers 0 to "
            f"{numbers[-1]}, and the roles {known_roles}"
        )

    def see(layer: int, role: str, x: torch.Tensor) -> torch.Tensor | None:
        return visit(layer, known.get((layer, role), role), x)

    def look_at(layer: int, x: torch.Tensor) -> None:
        see(layer, RESIDUAL, x)

    with ExitStack() as stack:
        stack.callback(restore, call_by_projection(model))
        stack.enter_context(input_hooks(projections, see))
        for layer in streams:
            stack.enter_context(residual_hooks(model, look_at, layer))
        yield


def _states(roles: Iterable[str], layers: Iterable[int]) -> list[LayerState]:
    """Return the hidden states of roles in layers, without duplicates; a TransformerLens name stands for one of
    them."""
    layers, states = list(layers), {}
    for role in roles:
        state = of_transformerlens(role)
        if role_of(state[1] if state else role) not in STATES:
            raise unknown_name("role", role, STATES)
        states |= dict.fromkeys([state] if state else [(layer, role) for layer in layers])
    return list(states)


def input_hooks(projections: Iterable[Projection], visit: Visit) -> AbstractContextManager[None]:
    """Call `visit(layer, role, x)` with the input x (tokens, features) of projections.

    A tensor that it returns replaces x; None leaves x unchanged. Projections that read one hidden state, such as q, k
    and v, share one call and its result.
    """
    shared = _Shared(visit)

    def hook_of(projection: Projection):
        def hook(_module, inputs):
            x = inputs[0]
            changed = shared(projection, x)
            return None if changed is None else (changed.view(x.shape), *inputs[1:])

        return independent(hook) if is_independent(visit) else hook

    return attached(reader.module.register_forward_pre_hook(hook_of(reader)) for reader in projections)


def _is_same(x: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Return whether two tensors are the same, or views of the same entries in the same order."""
    return x is other or (other is not None and _memory_layout(x) == _memory_layout(other))


def _memory_layout(x: torch.Tensor) -> tuple:
    """Return what is equal for views of the same memory in the same order: its storage, offset, size and strides."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.numel(), x.stride(-1), x.shape[-1], x.dtype


class _Shared:
    """A visit that is called once for all projections that read one hidden state, whether they get it as (1, T,
    features) or as (T, features)."""

    def __init__(self, visit: Visit):
        self.visit = visit
        self.seen: dict[tuple[int, str], tuple] = {}  # by layer and role: the last input and its replacement

    def __call__(self, projection: Projection, x: torch.Tensor) -> torch.Tensor | None:
        place = projection.layer_state
        before, changed = self.seen.get(place, (None, None))  # another thread's block may replace them meanwhile
        if _is_same(x, changed):  # as in a module whose own input was replaced
            return changed
        if not _is_same(x, before):
            # OPT flattens sequences and positions itself
            changed = self.visit(*place, x.flatten(0, -2))
            same_layer = {other: states for other, states in self.seen.items() if other[0] == place[0]}
            self.seen = same_layer | {place: (x, changed)}
        return changed


@contextmanager
def output_hooks(readers: Iterable[tuple[Projection, torch.Tensor]], visit: Visit) -> Iterator[None]:
    """Compute some outputs of projections from what `visit(layer, role, x)` returns for their input x (tokens,
    features).

    The projection multiplies twice, and each output is taken from one of the products; other hooks still see the input
    x. Projections that read one hidden state share a call, as in `input_hooks`. Several changes of one output are
    applied one after the other.

    Args:
        readers: projections, each with the mask of its changed outputs, bool (outputs,).
        visit: returns the changed input.
    """
    shared = _Shared(visit)

    def change_of(projection: Projection):
        def change(x: torch.Tensor) -> torch.Tensor:
            return shared(projection, x).view(x.shape)

        return independent(change) if is_independent(visit) else change

    with ExitStack() as stack:
        for projection, outputs in readers:
            stack.enter_context(_changed_outputs(projection.module, outputs, change_of(projection)))
        yield


class _Outputs:
    """A hook that computes some outputs of a projection from a changed input, and the others from the given one."""

    def __init__(self):
        self.changes: list[tuple[torch.Tensor, Callable]] = []

    @property
    def independent(self) -> bool:
        return all(is_independent(change) for _, change in self.changes)

    def __call__(self, module: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
        kinds = sum(outputs.long() << number for number, (outputs, _) in enumerate(self.changes))
        for kind in kinds.unique().tolist():
            x = inputs[0]
            for number, (_, change) in enumerate(self.changes):
                x = change(x) if kind >> number & 1 else x
            if x is not inputs[0]:
                # not through __call__, so that this hook is not called again
                output = torch.where((kinds == kind).to(output.device), module.forward(x), output)
        return output


@contextmanager
def _changed_outputs(module: nn.Module, outputs: torch.Tensor, change: Callable) -> Iterator[None]:
    """Compute some outputs of a projection, flags `outputs` (outputs,), from the input that `change` returns for the
    given one."""
    hook = next((registered for registered in module._forward_hooks.values() if isinstance(registered, _Outputs)), None)
    with ExitStack() as stack:
        if hook is None:
            hook = _Outputs()
            stack.callback(module.register_forward_hook(hook).remove)
        hook.changes.append((outputs, change))
        stack.callback(hook.changes.pop)
        yield


def residual_hooks(
    model: PreTrainedModel, visit: Callable[[int, torch.Tensor], torch.Tensor | None], only: int | None = None
) -> AbstractContextManager[None]:
    """Call `visit(layer, x)` with the output x (tokens, features) of each layer, or of only one.

    A tensor that it returns replaces x; None leaves x unchanged. If there are several streams at each position, as in
    hyper-connections, x is their mean, and a change of it is added to each of them.
    """

    def hook_of(layer: Layer):
        def hook(_module, _inputs, output):
            parted = isinstance(output, (tuple, list))  # some architectures return a sequence, the others a tensor
            state, *others = output if parted else (output,)
            if layer.anatomy.streams > 1:
                streams = state.unflatten(-1, (-1, layer.anatomy.width)).flatten(2, -2)
                stream = streams.mean(2)
            else:
                stream = state[0] if state.ndim == 4 else state  # of Gemma 3n's streams, the one that branches read
            changed = visit(layer.number, stream.flatten(0, -2))
            if changed is None:
                return None
            changed = changed.view(stream.shape)
            if layer.anatomy.streams > 1:
                changed = (streams + (changed - stream).unsqueeze(2)).view(state.shape)
            elif stream is not state:
                changed = torch.cat((changed[None], state[1:]))
            return type(output)((changed, *others)) if parted else changed

        return independent(hook) if is_independent(visit) else hook

    layers = [layer for layer in layers_of(model) if only in (None, layer.number)]
    return attached(layer.module.register_forward_hook(hook_of(layer)) for layer in layers)


def expert_hooks(
    model: PreTrainedModel,
    see_units: Callable[[int, int, torch.Tensor, torch.Tensor], None],
    see_expert: Callable[[int, int, torch.Tensor, torch.Tensor, torch.Tensor], None] = lambda *_seen: None,
    only: int | None = None,
) -> AbstractContextManager[None]:
    """Call functions with the inputs and outputs of each expert of all layers, or of one.

    see_units: called as `see_units(layer, expert, tokens, x)` with the positions of its tokens, int64 (n,), and the
    input of its last projection (n, units). see_expert: called as `see_expert(layer, expert, tokens, x, output)` with
    the states that it reads and its output to the residual stream, (n, features) each.
    """

    def on(layer: int, number: int, expert: nn.Module) -> Iterator[RemovableHandle]:
        *_, last = expert.children()
        yield last.register_forward_pre_hook(lambda _module, inputs: see_units(layer, number, expert.tokens, inputs[0]))
        yield expert.register_forward_hook(
            lambda _module, inputs, output: see_expert(layer, number, inputs[1], inputs[0], output)
        )

    return attached(
        handle
        for layer, experts in experts_of(model).items()
        for number in range(expert_count(experts) if only in (None, layer) else 0)
        for handle in on(layer, number, experts.get_submodule(str(number)))
    )


@contextmanager
def attention_hooks(
    model: PreTrainedModel,
    visit: Callable,
    only: int | None = None,
    summed: bool = False,
    cross: bool = False,
) -> Iterator[None]:
    """Call `visit(layer, probabilities, recompute, visible)` after the attention of each layer, or of only one.

    probabilities: (sequences, heads, queries, keys), after the softmax. recompute: a function without arguments that
    runs this attention once more and returns its probabilities, without effect on the model's pass. visible: which keys
    each query can see by the masks of the model, without those of a variant, bool (queries, keys). The model uses eager
    attention within the context, because fused kernels never compute the probabilities; see `eager`.

    summed: whether the probabilities may come summed over the queries, (sequences, heads, 1, keys), which costs less.
    cross: whether to visit the cross-attention of a decoder to an encoder.

    Raises:
        UserError: the model's attention returns no probabilities.
    """

    def zero_biases(alibi, _module, args, kwargs):
        # Falcon's eager attention adds its biases to the scores even if the mask, one per head, contains them already
        if kwargs.get(alibi) is not None and kwargs["attention_mask"].shape[1] > 1:
            kwargs = {**kwargs, alibi: torch.zeros_like(kwargs[alibi])}
        return args, kwargs

    masks = _Masks(cross)

    def hook_of(layer: Layer):
        def hook(module, args, kwargs, output):
            found = probabilities(output)
            read = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
            if not cross and (found.shape[-2] not in read.shape or found.shape[-1] < found.shape[-2]):
                raise UserError(
                    f"the attention of layer {layer.number} gives probabilities of the shape {tuple(found.shape)}; "
                    "expected those of all keys for each query: this model attends within windows; look at it with "
                    "attention=False"
                )
            # not through __call__, so that this hook is not called again
            again = lambda: probabilities(module.forward(*args, **kwargs))  # noqa: E731
            visit(layer.number, found, again, masks.visible(layer, module, *found.shape[-2:]))

        return hook

    def ask_for_probabilities(module, args, kwargs):
        place = list(inspect.signature(module.forward).parameters).index("output_attentions")
        if place < len(args):
            return (*args[:place], True, *args[place + 1 :]), kwargs
        return args, {**kwargs, "output_attentions": True}

    def probabilities(output) -> torch.Tensor:
        for part in reversed(output) if isinstance(output, (tuple, list)) else ():
            if isinstance(part, torch.Tensor) and part.ndim == 4 and part.is_floating_point():
                return part
        raise UserError(
            f"the model's attention '{model.config._attn_implementation}' gives no probabilities; expected them "
            "beside its outputs: load it with attn_implementation='eager', or look at it with attention=False"
        )

    def registered() -> Iterator[RemovableHandle]:
        for layer in layers_of(model):
            path = layer.anatomy.cross_attention if cross else layer.anatomy.attention
            if path is None or only not in (None, layer.number):
                continue
            attention = layer.module.get_submodule(path)
            if "output_attentions" in inspect.signature(attention.forward).parameters:
                yield attention.register_forward_pre_hook(ask_for_probabilities, with_kwargs=True)
            if layer.anatomy.alibi:
                hook = partial(zero_biases, layer.anatomy.alibi)
                yield attention.register_forward_pre_hook(hook, with_kwargs=True)
            # before the hooks of a variant that hides something
            yield attention.register_forward_pre_hook(masks.note, with_kwargs=True, prepend=True)
            yield attention.register_forward_hook(hook_of(layer), with_kwargs=True)

    with eager(model, summed), attached(registered()):
        yield


class _Masks:
    """The masks of attention calls, and the keys that they let queries see."""

    def __init__(self, cross: bool):
        self.cross, self.mask = cross, None
        self.known: tuple = (None, None)  # the last mask, which layers share, and the keys that it shows

    def note(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Record the mask of a call."""
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments | kwargs
        masks = (mask for name in MASKS for mask in tree_leaves(given.get(name)))  # some models give several by name
        self.mask = next((mask for mask in masks if isinstance(mask, torch.Tensor) and mask.ndim == 4), None)

    def visible(self, layer: Layer, module: nn.Module, queries: int, keys: int) -> torch.Tensor:
        """Return the keys that each query of a layer can see, bool (queries, keys)."""
        mask, anatomy = self.mask, layer.anatomy
        if mask is None:
            everything = torch.ones(queries, keys, dtype=torch.bool)
            # a custom attention function makes its mask itself
            window, first = getattr(module, "sliding_window", None), keys - queries
            seen = everything.triu(first + 1 - window) if window else everything
            return everything if self.cross or anatomy.bidirectional else seen.tril(first)
        if mask.shape[-1] < keys:
            raise UserError(
                f"the attention of layer {layer.number} has {keys} keys for {mask.shape[-1]} positions; expected one "
                "key for each: this model makes keys of several positions too; look at it with attention=False"
            )
        if mask is not self.known[0]:
            entries = mask[0, 0, :, :keys]  # of the first head
            # The first position sees itself, which shows how boolean masks code visibility: as False in MPT.
            is_bool = entries.dtype == torch.bool
            shown = entries == entries[0, 0] if is_bool else entries > torch.finfo(mask.dtype).min / 2
            self.known = mask, shown.expand(max(queries, len(entries)), keys)
        visible = self.known[1]
        if anatomy.window is None:
            return visible
        queries = len(visible)
        return visible & getattr(module, anatomy.window)[0, 0, keys - queries : keys, :keys]


def check_hooks(path: str, module: nn.Module, same_weights: bool = False) -> None:
    """Raise UserError if a module has hooks that cannot be handed over to a replacement: `OTHER_HOOKS`, one of
    accelerate that changes the call, or a forward method in the place of its own.

    same_weights: whether the replacement has the same weights, which may then be offloaded.
    """
    accelerated = vars(module).get("_hf_hook")
    forward = vars(module).get("_old_forward" if accelerated else "forward")
    others = [name.strip("_") for name in OTHER_HOOKS if getattr(module, name)]
    if not same_weights and is_offloaded(module):
        raise UserError(
            f"the weights of '{path}' are offloaded by accelerate, and a scheme quantizes weights in memory; expected "
            "a model on one device, or a streamed one, or that place among those to skip"
        )
    if others:
        obstacle = others[0]
    elif accelerated and type(accelerated) is not AlignDevicesHook:
        obstacle = f"accelerate's {type(accelerated).__name__}, which changes the call,"
    elif forward and getattr(forward, "__func__", None) is not type(module).forward:
        obstacle = "a forward method in the place of its own"
    else:
        return
    raise UserError(f"'{path}' has {obstacle} that a quantized layer cannot keep; remove it first")


def hand_over_hooks(module: nn.Module, other: nn.Module) -> None:
    """Let a replacement call the forward hooks of a module, and follow it between devices."""
    for name in FORWARD_HOOKS:
        getattr(other, name).update(getattr(module, name))
    if "_hf_hook" in vars(module):
        add_hook_to_module(other, copy.copy(module._hf_hook))
