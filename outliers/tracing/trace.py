"""Trace a model: hooks, and what they keep of each block."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import nullcontext
from functools import partial, reduce
from itertools import groupby, pairwise, takewhile
from operator import attrgetter
from threading import Event

import torch
from torch import nn
from transformers import PreTrainedModel

from outliers.criterion import ALPHA, MASSIVE, MASSIVE_RATIO, SINK, check_threshold
from outliers.errors import UserError, unknown_name
from outliers.models.anatomy import ROLES, decoder_layers, readers
from outliers.models.decoder import inference, run_decoder
from outliers.models.hooks import attention_hooks, input_hooks, residual_hooks
from outliers.tracing.result import SKETCHED, STREAM, Trace, pack_keys, views
from outliers.tracing.sketch import buckets
from outliers.tracing.state import check_finite, largest_entry, median, moments


def trace(
    model: PreTrainedModel | Sequence[PreTrainedModel],
    blocks: Iterable[torch.Tensor],
    roles: Iterable[str] = ROLES,
    alpha: float = ALPHA,
    attention: bool = True,
) -> Trace:
    """Run blocks through a model and keep statistics of fixed size of its hidden states.

    Each block is a sequence of its own; the head is not applied. No hidden state is kept.

    Args:
        model: a causal language model, quantized or not; it is left as it was. Several equal ones, each on a device of
            its own, trace a part of the blocks each, at the same time, and the traces are merged; the blocks are then
            collected first.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,), such as a progress bar over them.
        roles: the hidden states to trace: "attn_in", "attn_out", "ffn_in" and "ffn_out", the inputs of the q/k/v, the
            attention output, the first and the second feed-forward projections; all that is quantized. Those that some
            layer of the model lacks, such as ffn_out in a mixture of experts, are left out, which `Trace.roles` says.
            The residual stream is always looked at.
        alpha: magnitude from which an entry is a hit.
        attention: whether to find attention sinks; the model then attends eagerly, with memory for one layer's
            attention matrix (heads, T, T). Without it long contexts take less.

    Raises:
        UserError: a role is unknown, or the model has none of them; alpha is not positive; there is no block, one is
            longer than the model's context, of another length than the first, or holds ids outside the vocabulary; a
            hidden state holds NaN or inf; there is no model, or one is given twice.
    """
    roles = _check_roles(roles)
    alpha = check_threshold("alpha", alpha)
    found = _of_parts(model, blocks, partial(_trace, roles=roles, alpha=alpha, attention=attention))
    if found is None:
        raise UserError("no blocks to trace; expected at least one")
    return found


def _of_parts(
    models: PreTrainedModel | Sequence[PreTrainedModel], blocks: Iterable[torch.Tensor], trace_one: Callable
) -> Trace | None:
    """The trace of all blocks, dealt out to the models in contiguous parts, a thread each."""
    if isinstance(models, nn.Module):
        return trace_one(models, blocks)
    if not models or len(set(models)) < len(models):  # the hooks of two threads on one model would see both blocks
        raise UserError(f"{len(models)} models of which {len(set(models))} differ; expected one for each device")
    blocks = list(blocks)
    bounds = [len(blocks) * number // len(models) for number in range(len(models) + 1)]
    stop = Event()  # the others, where one has failed or the caller is interrupted
    parts = [takewhile(lambda _: not stop.is_set(), blocks[start:end]) for start, end in pairwise(bounds)]
    with ThreadPoolExecutor(len(models)) as pool:
        running = [pool.submit(trace_one, *of_part) for of_part in zip(models, parts, strict=True)]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            stop.set()
    found = [part.result() for part in running]
    return reduce(Trace.merge, [part for part in found if part is not None]) if blocks else None


@inference  # of the thread that it runs in
def _trace(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], roles: tuple[str, ...], alpha: float, attention: bool
) -> Trace | None:
    roles = _in_every_layer(model, roles)
    observers: dict[int, _Observer] = {}  # of blocks that are not through
    observer = total = None

    def begin(number: int, ids: torch.Tensor) -> None:
        nonlocal observer
        if number not in observers:
            observers[number] = _Observer(ids, roles, alpha, model.config.vocab_size)
        observer = observers[number]

    tracked = (reader for reader in readers(model) if reader.role in roles)
    with (
        input_hooks(tracked, lambda *seen: observer.see_hidden_state(*seen)),
        residual_hooks(model, lambda *seen: observer.see_residual(*seen)),
        attention_hooks(model, lambda *seen: observer.see_attention(*seen)) if attention else nullcontext(),
    ):
        for number, _ids, _states in run_decoder(model, blocks, begin):
            one = observers.pop(number).result()
            total = one if total is None else total.merge(one)
    return None if total is None else total.cpu()


def _check_roles(roles: Iterable[str]) -> tuple[str, ...]:
    """The roles in the order of `ROLES`."""
    roles = [roles] if isinstance(roles, str) else list(roles)
    for role in roles:
        if role not in ROLES:
            raise unknown_name("role", role, ROLES)
    if not roles:
        raise UserError(f"no roles to trace; expected some of {', '.join(ROLES)}")
    return tuple(role for role in ROLES if role in roles)


def _in_every_layer(model: PreTrainedModel, roles: tuple[str, ...]) -> tuple[str, ...]:
    """Of the roles those that every layer has."""
    layers: dict[str, set[int]] = defaultdict(set)
    for reader in readers(model):
        layers[reader.role].add(reader.layer)
    found = tuple(role for role in roles if len(layers[role]) == len(decoder_layers(model)))
    if not found:
        raise UserError(f"not every layer of this model has {' or '.join(roles)}; trace other roles")
    return found


class _Observer:
    """Reduces what the hooks see of one sequence (T,) to the statistics of a `Trace`."""

    def __init__(self, ids: torch.Tensor, roles: tuple[str, ...], alpha: float, vocabulary: int):
        self.ids, self.roles, self.alpha, self.vocabulary = ids, roles, alpha, vocabulary
        self.by_layer: dict[str, list[torch.Tensor]] = defaultdict(list)
        # (T, features) by device, so that no state that large moves before the end of the sequence
        self.hit: dict[tuple, dict] = defaultdict(dict)  # view: hit in any of its hidden states so far
        self.magnitude: dict[str, dict] = defaultdict(dict)  # role in the residual stream: the largest |x| so far
        self.sketch: list[torch.Tensor] = []
        self.massive_positions: list[torch.Tensor] = []
        self.sinks: list[torch.Tensor] = []
        self.heads = 0

    def see_hidden_state(self, layer: int, role: str, x: torch.Tensor) -> None:
        x = x.float()
        low, high = x.amin(0), x.amax(0)
        by_feature = torch.maximum(-low, high)
        check_finite(by_feature, layer, role)
        columns = (by_feature >= self.alpha).nonzero()[:, 0]
        candidates = x[:, columns]
        hit = candidates.abs() >= self.alpha
        hits = torch.zeros_like(low, dtype=torch.int64).index_copy_(0, columns, hit.sum(0))
        low_rest, high_rest = torch.aminmax(x[1:])
        statistics = {
            "min": low,
            "max": high,
            "largest": largest_entry(x, by_feature, self.ids),
            "rest.max": torch.maximum(-low_rest, high_rest),
            "hits": hits,
            "sequences_hit": hits.clamp(max=1),
            **moments(x),
        }
        for name, value in statistics.items():
            self.by_layer[f"{role}.{name}"].append(value)
        for view in views(self.roles):
            if role in view:
                self.hit[view].setdefault(x.device, torch.zeros_like(x, dtype=torch.bool))[:, columns] |= hit
        if role in STREAM:
            magnitude, of_role = x.abs(), self.magnitude[role]
            of_role[x.device] = torch.maximum(of_role.get(x.device, magnitude), magnitude)
        if role in SKETCHED:
            features = columns.expand_as(hit)[hit]
            self.sketch.append(pack_keys(layer, ROLES.index(role), features, buckets(candidates[hit])))

    def see_residual(self, layer: int, x: torch.Tensor) -> None:
        x = x.float()
        magnitude = x.abs()
        by_feature = magnitude.amax(0)
        check_finite(by_feature, layer, "residual")
        middle = median(magnitude)
        largest = largest_entry(x, by_feature, self.ids)
        massive = (magnitude > MASSIVE) & (magnitude >= MASSIVE_RATIO * middle)
        positions, features = massive.nonzero(as_tuple=True)
        self.massive_positions.append(positions)
        statistics = {
            "largest": largest,
            "sum_of_max": largest[0],
            "sum_of_ratios": largest[0] / middle,
            "massive": features.bincount(minlength=x.shape[1]),
        }
        for name, value in statistics.items():
            self.by_layer[f"residual.{name}"].append(value)

    def see_attention(self, _layer: int, probabilities: torch.Tensor, _recompute) -> None:
        received = probabilities[0].float().sum(1)  # (heads, keys), over the queries at and after each key
        sinks = received > SINK * torch.arange(received.shape[1], 0, -1, device=received.device)
        self.heads = len(sinks)
        self.sinks.append(sinks.sum(0))

    def result(self) -> Trace:
        """The trace of the sequence, on the device of its ids; call it after the forward pass."""
        statistics = {name: self._stack(rows) for name, rows in self.by_layer.items()}
        for view, hit in self.hit.items():
            in_layer = torch.stack([statistics[f"{role}.sequences_hit"] for role in view]).amax(0)
            statistics[f"{'+'.join(view)}.layers_hit"] = in_layer.sum(0)
            statistics[f"{'+'.join(view)}.positions_hit"] = reduce(torch.logical_or, self._home(hit.values())).sum(0)
        for role, magnitude in self.magnitude.items():
            statistics[f"{role}.magnitude"] = reduce(torch.maximum, self._home(magnitude.values())).double()
        massive = torch.cat(self._home(self.massive_positions)).bincount(minlength=len(self.ids))
        statistics |= {"residual.massive_positions": massive, "residual.massive_tokens": self._by_token(massive)}
        if self.sinks:
            sinks = self._stack(self.sinks)
            statistics |= {"attention.sinks": sinks, "attention.sinks_tokens": self._by_token(sinks.sum(0))}
        keys, counts = torch.cat([self.ids[:0], *self._home(self.sketch)]).unique(return_counts=True)
        sketch = Counter(dict(zip(keys.tolist(), counts.tolist(), strict=True)))
        return Trace(self.alpha, self.roles, len(self.ids), 1, self.heads, statistics, sketch)

    def _home(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors of several layers, which may be on several devices, on that of the ids."""
        return [tensor.to(self.ids.device) for tensor in tensors]

    def _stack(self, rows: list[torch.Tensor]) -> torch.Tensor:
        """The rows of all layers; those of a device move together."""
        on_devices = groupby(rows, attrgetter("device"))
        return torch.cat(self._home(torch.stack(tuple(on_one)) for _, on_one in on_devices))

    def _by_token(self, by_position: torch.Tensor) -> torch.Tensor:
        """Counts by token id (V,) of counts by position (T,)."""
        by_token = torch.zeros(self.vocabulary, dtype=torch.int64, device=self.ids.device)
        return by_token.index_add_(0, self.ids, by_position)
