"""The tracing of a model: hooks, and the statistics collected from each block."""

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, reduce

import numpy as np
import torch
from outlier_kernels import dispatch, states
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outliers.criterion import ALPHA, MASSIVE, MASSIVE_RATIO, RESIDUAL, ROLES, ROUTER, SINK, check_threshold, role_of
from outliers.errors import UserError, not_finite, unknown_name
from outliers.models.anatomy import check_positions, experts_of, family_of, ids_of, layers_of, shape_of, state_readers
from outliers.models.anatomy.examples import Block
from outliers.models.anatomy.experts import expert_count
from outliers.models.anatomy.names import modules_of
from outliers.models.anatomy.stack_views import StackView, stack_view, stack_views
from outliers.models.anatomy.weights import device_of
from outliers.models.attention import eager
from outliers.models.decoder import inference, run_decoder, under
from outliers.models.hooks import attention_hooks, expert_hooks, input_hooks, residual_hooks
from outliers.models.stream import AS_IT_IS, Variant, WatchedVariant, is_streamed
from outliers.terminal.progress import with_bar
from outliers.text.blocks import unpad
from outliers.text.tokens import named_ids
from outliers.tracing.result import Trace
from outliers.tracing.sketch import KEYED, buckets, pack_keys
from outliers.tracing.statistics import (
    BY_POSITION,
    OF_EXPERTS,
    ON_STREAM,
    SKETCHED,
    add_from_start,
    token_states,
    united_roles,
)
from outliers.tracing.tokens import TokenSums

ALIKE = {
    "attn_in": ("cross_in", "cross_kv"),
    "attn_out": ("attn_mid", "cross_out"),
    "ffn_in": (ROUTER,),
    "ffn_out": ("ffn_mid",),
}
See = Callable[[Block, torch.Tensor], None]
logger = logging.getLogger(__name__)
SKETCHED_AT_ONCE = 1 << 16  # approximate number of hits that are added to the sketch together


@with_bar
def trace(
    model: PreTrainedModel,
    blocks: Iterable[Block],
    roles: Iterable[str] = ROLES,
    alpha: float = ALPHA,
    attention: bool = True,
    variant: Variant = AS_IT_IS,
    tokens: PreTrainedTokenizerBase | None = None,
    attention_mask: Iterable[torch.Tensor] | None = None,
    see_last: See = lambda ids, states: None,
    stack: str | None = None,
    *,
    progress: bool | None = None,
) -> Trace:
    """Return statistics of bounded size of a model's hidden states (LLM.int8(), section 4.1).

    Each block is a separate sequence; the head is not applied. No hidden state is kept.

    Args:
        model: a causal language model, quantized or not; it is left as it was.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,), such as a progress bar over them; they may be of
            several lengths.
        roles: the hidden states to trace: "attn_in", "attn_out", "ffn_in" and "ffn_out", the inputs of the q/k/v, the
            attention output, the first and the second feed-forward projections; "attn_mid", "ffn_mid", of those
            between; "router", of routers that read another state than ffn_in. `Trace.roles` has those that the model
            has, and of a role with several hidden states in a layer each, such as "attn_mid 2". What experts read as
            ffn_out has statistics by expert, see `Trace.expert_shares`. The residual stream is always traced.
        alpha: magnitude from which an entry is a hit.
        attention: whether to find attention sinks. If attention is a plain causal softmax, this takes memory for some
            rows of a layer's attention matrix (heads, T, T) on a CPU in float32, and none on a GPU with Triton;
            otherwise the model uses eager attention, with memory for the whole matrix. False saves memory with long
            contexts.
        variant: a change of the model, such as a scheme, see `outliers.variants`.
        tokens: the model's tokenizer, to record at which tokens each feature of the residual stream is large, see
            `Trace.tokens`; for a vision model its image processor, or True.
        attention_mask: which tokens count and which are padding, shaped as the blocks, as tokenizers return it; each
            sequence then runs without its padding. None if there is no padding.
        see_last: called with each block and its last hidden states (T, features), the head's input, so that
            measurements on these need no pass of their own.
        stack: for an encoder-decoder "encoder", "decoder", or "cross": what the decoder's layers read from the encoder,
            at the encoder's positions, and the cross-attention to these. None for a model with one stack.
        progress: whether to show a bar after two seconds; by default on a terminal and in a notebook.

    Raises:
        UserError: there is no such stack, or one must be named; a role is unknown, or the model has none of them; alpha
            is not positive; there is no block, one has less than two tokens, is longer than the model's context or
            holds ids outside the vocabulary; the attention mask does not fit these blocks; a hidden state has NaN or
            inf.

    Example:
        >>> outliers.trace(model, blocks).sequences
        2
    """
    given = unpad(blocks, attention_mask), roles, alpha, attention, variant, tokens, see_last
    (trace,) = traces(model, *given, stack_view(model, stack))
    return trace


@inference
def traces(
    model: PreTrainedModel,
    blocks: Iterable[Block],
    roles: Iterable[str] = ROLES,
    alpha: float = ALPHA,
    attention: bool = True,
    variant: Variant = AS_IT_IS,
    tokens: PreTrainedTokenizerBase | None = None,
    see_last: See = lambda ids, states: None,
    only: StackView | None = None,
) -> list[Trace]:
    """Trace several views of a model in one pass: all that have some of the roles, or only one.

    A model with a single stack of layers has one view, an encoder-decoder has "encoder", "decoder" and "cross".
    Arguments and errors are those of `trace`. With all views, each role brings those of `ALIKE`, its counterparts in
    other views. only: the single view.
    """
    roles, alpha = _check_roles(roles), check_threshold("alpha", alpha)
    requested = set(roles).union(*(others for role, others in ALIKE.items() if role in roles and not only))
    candidates = [only] if only else stack_views(model).values()
    views = [(view, roles_of_view) for view in candidates if (roles_of_view := _roles_of(model, view, requested))]
    if not views:
        place = f" in the view '{only.name}'" if only and only.name else ""
        raise UserError(f"no layer of this model has {' or '.join(roles)}{place}; trace other roles")
    attention = attention and _has_equal_heads(model, [view for view, _ in views])
    blocks = list(blocks) if is_streamed(model) else blocks
    by_token = ["residual.massive_tokens", *["attention.sinks_tokens"] * attention]
    vocabulary, names = family_of(model.config).vocabulary(model.config), partial(named_ids, model.config, tokens)
    experts = {
        layer: {"E": expert_count(one), "s": shape_of(next(one.get_submodule("0").children()))[1]}
        for layer, one in experts_of(model).items()
    }
    observers = []
    for view, roles in views:
        at_once, room, device = (1, 0), torch.zeros, device_of(model)
        if is_streamed(model):
            at_once = len(blocks), max((len(view.ids(model, block)) for block in blocks), default=0)
            room, device = model.stream.storage, model.stream.device
        counts = {name: torch.zeros(vocabulary, dtype=torch.int64, device=device) for name in by_token}
        known = names if tokens else None
        observers.append(_TraceObserver(view, roles, alpha, counts, at_once, room, known, experts))

    def begin(number: int, of_stacks: tuple[torch.Tensor, ...]) -> None:
        for observer in observers:
            observer.begin(number, of_stacks)

    watched = WatchedVariant(variant, partial(_hooks, observers, attention))
    with eager(model, summed=True) if attention else nullcontext(), under(model, watched) as (changed, left):
        for number, block, last in run_decoder(changed, blocks, begin, left):
            for observer in observers:
                observer.end(number, ids_of(model, block))
            see_last(block, last)
    if not observers[0].lengths:
        raise UserError("no blocks to trace; expected at least one")
    traces = [observer.result() for observer in observers]
    for trace, (view, roles) in zip(traces, views, strict=True):
        trace.architecture, trace.modules = model.config.model_type, _modules(model, view, roles)
        widths = {role: [of.get(layer, 0) for layer in view.layers] for role, of in _widths(model, view).items()}
        trace.widths = {role: widths[role] for role in roles if len({*widths[role]} - {0}) > 1}
    return traces


def _modules(model: PreTrainedModel, view: StackView, roles: tuple[str, ...]) -> dict[str, list[list[str]]]:
    """Return the paths of the modules that read each role in the layers of a view, and of the layers that output the
    stream."""
    states, modules = [*roles, *([] if view.cross else [RESIDUAL])], modules_of(model)
    return {state: [modules.get((layer, state), []) for layer in view.layers] for state in states}


@contextmanager
def _hooks(
    observers: "Sequence[_TraceObserver]", attention: bool, model: PreTrainedModel, layer: int | None
) -> Iterator[None]:
    with ExitStack() as stack:
        for observer in observers:
            for hooks in _hooks_of(observer, attention, model, layer):
                stack.enter_context(hooks)
        yield


def _hooks_of(
    observer: "_TraceObserver", attention: bool, model: PreTrainedModel, layer: int | None
) -> Iterator[AbstractContextManager]:
    view = observer.view
    layers = [number for number in view.layers if layer in (None, number)]
    tracked = [
        reader
        for reader in state_readers(model)
        if reader.layer_state[1] in observer.roles and reader.layer in layers and reader.expert is None
    ]

    def of_view(see: Callable) -> Callable:
        return lambda number, *seen: see(number, *seen) if number in layers else None

    yield input_hooks(tracked, observer.see_encoder_output if view.cross else observer.see_hidden_state)
    if not view.cross:
        yield residual_hooks(model, of_view(observer.see_residual), layer)
        yield expert_hooks(model, of_view(observer.see_units), of_view(observer.see_expert), layer)
    if attention:
        yield attention_hooks(model, of_view(observer.see_attention), layer, True, view.cross)


def _check_roles(roles: Iterable[str]) -> tuple[str, ...]:
    roles = [roles] if isinstance(roles, str) else list(roles)
    for role in roles:
        if role not in ROLES:
            raise unknown_name("role", role, ROLES)
    if not roles:
        raise UserError(f"no roles to trace; expected some of {', '.join(ROLES)}")
    return tuple(role for role in ROLES if role in roles)


def _widths(model: PreTrainedModel, view: StackView) -> dict[str, dict[int, int]]:
    """Return the number of features of each hidden state, by state and layer of a view; 0 stands for the width of the
    residual stream."""
    widths: dict[str, dict[int, int]] = defaultdict(dict)
    for reader in state_readers(model):
        in_view = view.cross == (reader.role == "cross_kv") and reader.layer in view.layers
        if in_view and reader.expert is None:
            in_one_width = reader.role in ON_STREAM
            widths[reader.layer_state[1]].setdefault(reader.layer, 0 if in_one_width else shape_of(reader.module)[1])
    return widths


def _roles_of(model: PreTrainedModel, view: StackView, roles: Collection[str]) -> tuple[str, ...]:
    """Return the hidden states of some roles that belong to a view."""
    states = [state for state in _widths(model, view) if role_of(state) in roles]
    return tuple(sorted(states, key=lambda state: (ROLES.index(role_of(state)), state)))


def _has_equal_heads(model: PreTrainedModel, views: Iterable[StackView]) -> bool:
    """Return whether all layers of views have attention with the same number of heads, as a share of heads requires."""
    attending = {layer.number for layer in layers_of(model) if layer.anatomy.attention is not None}
    if not attending:
        return False
    for view in views:
        widths = _widths(model, view)["attn_out"]
        heads = {widths.get(layer) if layer in attending else None for layer in view.layers}
        if not view.cross and len(heads) > 1:
            logger.warning("the trace is without attention, of which layers have different numbers of heads, or none")
            return False
    return True


def _padded(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Pad the features of tensors with zeros to the largest number."""
    width = max(tensor.shape[-1] if tensor.ndim else 0 for tensor in tensors)
    lacks = [width - tensor.shape[-1] if tensor.ndim else 0 for tensor in tensors]
    return [functional.pad(one, (0, lack)) if lack else one for one, lack in zip(tensors, lacks, strict=True)]


@contextmanager
def _with_place(*place: int | str) -> Iterator[None]:
    """Complete the error of a hidden state that is not finite by its place: the error's own, or else the given one."""
    try:
        yield
    except states.NotFinite as broken:
        layer, state = broken.label or place
        raise not_finite(f"in the hidden states of layer {layer}, role {state}, feature {broken.feature}") from None


class _TraceObserver:
    """An accumulator that reduces the hidden states of sequences, each (T,), to a `Trace`.

    A turn is what the hooks see from one call of `begin` to the next: one sequence, in one layer of a streamed model
    and in all layers of another. Statistics of one layer are added up at once. Statistics over all layers are kept for
    each sequence until its end, with an entry per input of a layer, because a streamed model passes all sequences
    through a layer before the next.
    """

    def __init__(
        self,
        view: StackView,
        roles: tuple[str, ...],
        alpha: float,
        counts: dict,
        at_once: tuple[int, int],
        room: Callable,
        names: Callable[[Iterable[int]], dict] | None,
        experts: dict[int, dict[str, int]],
    ):
        """counts: zeros by token id (V,). at_once: how many sequences take turns, and the tokens of the longest one,
        as far as known. room: allocates zeros that are kept. names: function of ids, if tokens are traced. experts:
        by layer that has some, the number of experts, E, and of the features that they read, s."""
        self.view = view
        self.roles, self.alpha, self.total, self.room, self.names = roles, alpha, counts, room, names
        self.at_once, self.block = at_once
        self.heads, self.lengths = 0, []
        self.tokens = TokenSums(len(counts["residual.massive_tokens"])) if names else None
        self.by_layer: dict[str, dict[int, states.Statistics]] = defaultdict(dict)  # state, layer
        self.experts_in = experts
        self.experts: dict[int, dict[str, torch.Tensor]] = {}  # layer: statistics of its experts
        self.sketch: Counter = Counter()
        self.found = states.Found()  # hits that are not yet in the sketch
        # Sequence and device: massive activations at its positions (T,).
        self.massive: dict[tuple[int, torch.device], torch.Tensor] = {}
        self.visible: tuple = (None, None)  # the last visibility, and the least attention that a sink receives under it
        self.in_layer: dict[str, torch.Tensor] = {}  # role: hits (features,) of the sequence in this layer
        self.in_turn: list[dict[str, torch.Tensor]] = []  # `in_layer` of the layers of this turn
        # A single role has its hits by layer.
        self.united = [united for united in united_roles(roles) if len(united) > 1]
        # By role, then by device (so that no large state moves before the end of a sequence), dtype and features:
        # (at_once, T, features) of the largest |x| so far, from which hits follow, for states with the features of the
        # residual stream; of hits for other states.
        self.kept: dict[str, dict[tuple, torch.Tensor]] = defaultdict(dict)
        self.kept_here: dict[tuple, torch.Tensor] = {}  # views for the current sequence, by role and these keys

    def begin(self, number: int, of_stacks: tuple[torch.Tensor, ...]) -> None:
        """Announce the next sequence to the hooks; of_stacks: the ids at the positions that each stack reads."""
        self._end_turn()
        ids = of_stacks[self.view.position_stack]
        if len(ids) < 2:
            raise UserError(f"sequence {number} has {len(ids)} tokens; expected at least 2")
        self.number, self.ids, self.block = number % self.at_once, ids, max(self.block, len(ids))
        self.kept_here.clear()

    def _end_turn(self) -> None:
        """Add up the hits of the layers of a turn."""
        with _with_place():
            self.found.read()
        for united in self.united:
            by_layer = [[of[role].to(self.ids.device) for role in united if role in of] for of in self.in_turn]
            # In a layer that lacks a role, another one counts twice, so that one operator serves all layers.
            if hits := [hit for of_layer in by_layer if of_layer for hit in (of_layer * len(united))[: len(united)]]:
                largest = torch.stack(hits).unflatten(0, (-1, len(united))).amax(1)
                self._add(f"{'+'.join(united)}.layers_hit", largest.clamp_(max=1).sum(0))
        self.in_turn.clear()

    def see_hidden_state(self, layer: int, role: str, x: torch.Tensor) -> None:
        """Add a hidden state (T, features) to the statistics of its layer and role, and keep its largest magnitudes or
        hits."""
        kept = self._kept(role, x, x.dtype if role in ON_STREAM else torch.bool)
        state = self._state(layer, role, states.STATISTICS, x, kept)
        with _with_place(layer, role):
            self.in_layer[role] = dispatch.add_state(state, self.alpha, role in SKETCHED)

    def see_residual(self, layer: int, x: torch.Tensor) -> None:
        """Add the residual stream (T, features) after a layer to its statistics, and count its massive activations; it
        ends the layer."""
        turn = self.number, x.device
        if turn not in self.massive:
            self.massive[turn] = torch.zeros(len(x), dtype=torch.int64, device=x.device)
        kept = self._kept(RESIDUAL, x, x.dtype) if self.tokens else None
        state = self._state(layer, RESIDUAL, states.RESIDUAL, x, kept)
        with _with_place(layer, RESIDUAL):
            dispatch.add_residual(state, (MASSIVE, MASSIVE_RATIO), self.massive[turn])
        self.in_turn.append(dict(self.in_layer))  # the residual stream is a layer's last state
        self.in_layer.clear()
        if self.found.waiting > SKETCHED_AT_ONCE:
            self._sketch_hits()

    def see_attention(self, layer: int, probabilities: torch.Tensor, _recompute, visible: torch.Tensor) -> None:
        """Count the attention sinks of a layer: keys that get a large share of the attention of the queries that see
        them."""
        first = visible.shape[1] - len(self.ids)  # the keys of a prefix come before and are not counted
        # (heads, keys), summed over the queries that see each key, unless they are summed already
        received = probabilities[0, ..., first:].float()
        received = received[:, 0] if received.shape[1] == 1 else received.sum(1)
        if visible is not self.visible[0]:  # layers share one object
            queries = visible[:, first:].sum(0).to(received.device)
            limits = torch.where(queries.min() < len(visible), SINK * queries, SINK * len(visible))
            self.visible = visible, limits
        sinks = received > self.visible[1]
        self.heads, sinks = len(sinks), sinks.sum(0)
        counts = self.by_layer["attention"].setdefault(layer, {})
        counts["sinks"] = add_from_start(counts["sinks"], sinks, 0) if counts else sinks
        self._add_by_token("attention.sinks_tokens", sinks)

    def see_units(self, layer: int, expert: int, _tokens: torch.Tensor, x: torch.Tensor) -> None:
        statistics, magnitudes = self._of_experts(layer, x.shape[1], x.device), x.abs().float()
        statistics["squares"][expert] += magnitudes.square().sum(0)
        statistics["max"][expert] = torch.maximum(statistics["max"][expert], magnitudes.amax(0))
        statistics["hits"][expert] += (magnitudes >= self.alpha).sum(0)

    def see_expert(self, layer: int, expert: int, tokens: torch.Tensor, x: torch.Tensor, output: torch.Tensor) -> None:
        """Record what an expert reads and adds to the residual stream, (n, features) each, at its tokens (n,)."""
        statistics = self.experts[layer]
        statistics["tokens"][expert] += len(tokens)
        statistics["state_squares"][expert] += x.float().square().sum(0)
        magnitudes = output.abs().flatten()
        at = magnitudes.argmax()
        row, feature = at // output.shape[1], at % output.shape[1]
        position = tokens[row]
        found = (magnitudes[at], output.flatten()[at], feature, position, self.ids.to(x.device)[position])
        found, known = torch.stack([value.double() for value in found]), statistics["largest"][expert]
        statistics["largest"][expert] = torch.where(found[0] > known[0], found, known)

    def _of_experts(self, layer: int, units: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the statistics of the experts of a layer, which are zeros at first."""
        if layer not in self.experts:
            sizes = self.experts_in[layer] | {"u": units, "X": self.experts_in[layer]["E"]}
            self.experts[layer] = {
                name: torch.zeros([sizes.get(size, size) for size in shape if size != "L"], dtype=dtype, device=device)
                for name, (dtype, shape) in OF_EXPERTS.items()
            }
        return self.experts[layer]

    def see_encoder_output(self, layer: int, role: str, x: torch.Tensor) -> None:
        """Record the encoder's output where a layer of the decoder reads it."""
        self.see_hidden_state(layer, role, x)
        self.see_residual(layer, x)

    def end(self, number: int, of_stacks: tuple[torch.Tensor, ...]) -> None:
        """Add up the kept states of a sequence after its last layer."""
        self.begin(number, of_stacks)
        ids = self.ids
        self.lengths.append(len(ids))
        for turn in [turn for turn in self.massive if turn[0] == self.number]:
            massive = self.massive.pop(turn)
            self._add("residual.massive_positions", massive)
            self._add_by_token("residual.massive_tokens", massive)
        hit, magnitudes = {}, {}
        for role, by_key in self.kept.items():
            entries = _padded([kept[self.number, : len(ids)].to(ids.device) for kept in by_key.values()])
            if role in self.roles and role not in ON_STREAM:
                hit[role] = reduce(torch.logical_or, entries)
            else:
                magnitudes[role] = reduce(torch.maximum, entries).float()
        for role in [role for role in ON_STREAM if role in magnitudes]:
            hit[role] = magnitudes[role] >= self.alpha
            self._add(f"{role}.magnitude", magnitudes[role].double())
        for united in united_roles(self.roles):
            self._add(f"{'+'.join(united)}.positions_hit", reduce(torch.logical_or, map(hit.get, united)).sum(0))
        if self.tokens:
            united = {s: reduce(torch.maximum, map(magnitudes.get, s.split("+"))) for s in token_states(self.roles)}
            self.tokens.add(ids, united)
        for kept in (kept for by_key in self.kept.values() for kept in by_key.values()):
            kept[self.number, : len(ids)].zero_()

    def result(self) -> Trace:
        """Return the trace of all sequences, at least one, in host memory."""
        self._sketch_hits()
        statistics = {}
        for state, layers in self.by_layer.items():
            for name in next(iter(layers.values())):
                zeros = torch.zeros_like(next(iter(layers.values()))[name])  # for layers that lack the role
                numbers = self.view.layers if state in self.roles else layers
                rows = [layers[number][name].cpu() if number in layers else zeros.cpu() for number in numbers]
                statistics[f"{state}.{name}"] = torch.stack(_padded(rows))
        statistics |= {f"{role}.layers_hit": statistics[f"{role}.sequences_hit"].sum(0) for role in self.roles}
        statistics |= {name: value.cpu() for name, value in self.total.items()}
        fields = {"stack": self.view.name, "first_layer": self.view.layers[0]}
        if self.experts:
            none = {name: torch.zeros_like(value) for name, value in next(iter(self.experts.values())).items()}
            for name, (_, shape) in OF_EXPERTS.items():
                values = [self.experts.get(layer, none)[name].cpu() for layer in self.view.layers]
                statistics[f"experts.{name}"] = (torch.cat if shape[0] == "X" else torch.stack)(values)
            fields["experts"] = len(none["tokens"])
        lengths = torch.tensor(self.lengths)
        statistics["text.sequences"] = (lengths > torch.arange(self.block)[:, None]).sum(1)
        sizes = self.block, len(lengths), self.heads
        trace = Trace(self.alpha, self.roles, *sizes, statistics, self.sketch, **fields)
        if self.tokens:
            statistics |= self.tokens.statistics()
            trace.names = self.names(self.tokens.token_ids)
        return trace

    def _state(self, layer: int, name: str, table: dict, x: torch.Tensor, kept: torch.Tensor | None) -> states.State:
        """Return a hidden state of the sequence with the statistics of its layer, which are zeros at first."""
        check_positions(layer, len(x), len(self.ids))
        layers = self.by_layer[name]
        if layer not in layers:
            layers[layer] = states.empty(table, x.shape[1], x.device)
        return states.State(x, self.ids.to(x.device), layers[layer], kept, self.found, (layer, name))

    def _sketch_hits(self) -> None:
        if self.found.hits:
            places, hits = zip(*self.found.hits, strict=True)
            sizes, hits = torch.tensor(list(map(len, hits))), np.concatenate(hits)
            first = self.view.layers[0]
            numbers = torch.tensor([(layer - first, KEYED.index(role)) for layer, role in places])
            layers, roles = numbers.repeat_interleave(sizes, 0).unbind(1)
            features, values = (torch.from_numpy(hits[name].copy()) for name in hits.dtype.names)
            keys, counts = pack_keys(layers, roles, features, buckets(values)).unique(return_counts=True)
            self.sketch.update(dict(zip(keys.tolist(), counts.tolist(), strict=True)))
            self.found.hits.clear()
            self.found.waiting = 0

    def _add(self, name: str, value: torch.Tensor) -> None:
        """Add a value, on any device, to a statistic over all layers, on the device of the ids."""
        value, kind = value.to(self.ids.device), name.rpartition(".")[2]
        if name in self.total:
            self.total[name] = add_from_start(self.total[name], value, BY_POSITION.get(kind, 0))
        else:
            self.total[name] = value.clone()

    def _add_by_token(self, name: str, by_position: torch.Tensor) -> None:
        """Add counts by position (T,) to counts by token id (V,)."""
        self.total[name].index_add_(0, self.ids, by_position.to(self.ids.device))

    def _kept(self, role: str, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the state (T, features) that is kept over the layers on a device for this sequence and role, zeros at
        first."""
        key = x.device, dtype, x.shape[1]
        if (role, *key) not in self.kept_here:
            by_key = self.kept[role]
            if key not in by_key or by_key[key].shape[1] < len(x):
                by_key[key] = self.room((self.at_once, self.block, x.shape[1]), dtype=dtype, device=x.device)
            self.kept_here[role, *key] = by_key[key][self.number, : len(x)]
        return self.kept_here[role, *key]
