"""The attention of a model: its function, its states, and an implementation that sums the probabilities.

Fused kernels never compute the probabilities, and an architecture's own plain products compute all of them, (heads, T,
T), and pass over them half a dozen times. `summed_attention` computes them for some queries at a time, while they fit a
core's cache, only for the keys up to these queries, and sums them over the queries. The outputs equal those of the
plain products bit by bit: under the causal mask the other probabilities are exactly 0, and take part in the products
with the values as zeros. On a GPU the fused kernel attends, and another one sums the probabilities without storing
them.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import NamedTuple
from weakref import ref

import torch
from outlier_kernels import dispatch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.masking_utils import causal_mask_function, eager_mask

from outliers.errors import UserError
from outliers.models.anatomy import Projection, anatomy_of, layers_of, reader_at, stack_module, stacks_of

OURS = "outliers"  # the name of `attend` among the implementations of attention
ROLE = "attention"  # the role of the operands of attention, beside those of projections
QUERIES = 128  # the least number computed at once; products of fewer rows are summed in another order
MASK = {"use_cache", "position_ids", "sliding_window"}  # arguments without effect if there is a mask
OF_ONE = {"mask_function": causal_mask_function, "batch_size": 1, "q_offset": 0, "kv_offset": 0, "attention_mask": None}

States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # queries, keys and values, each (batch, heads, T, features)
_plain: dict[int, ref] = {}  # by length: the last mask known to be causal


class AttentionCall(NamedTuple):
    """The arguments of a call of attention beside queries, keys and values.

    mask: added to the scores, or True where a query attends, (1, heads or 1, queries, keys); None for all keys, or for
    those up to each query if it is causal. scaling: factor of the products of queries and keys; None for the inverse
    root of the head size. window: the largest number of keys that a query sees, if no mask defines it.
    """

    mask: torch.Tensor | None
    scaling: float | None
    causal: bool
    window: int | None

    def scale(self, query: torch.Tensor) -> float:
        """Return the factor of the products of these queries (..., head size)."""
        return query.shape[-1] ** -0.5 if self.scaling is None else self.scaling

    def visible(self, queries: int, keys: int) -> torch.Tensor:
        """Return the keys that each query sees, bool (queries, keys)."""
        if self.mask is not None:
            mask = self.mask[0, 0, :, :keys]
            return (mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2).expand(queries, keys)
        everything, first = torch.ones(queries, keys, dtype=torch.bool), keys - queries
        seen = everything.triu(first + 1 - self.window) if self.window else everything
        return seen.tril(first) if self.causal and queries > 1 else seen


class AttentionSettings(NamedTuple):
    """The attention of a module.

    config: its own configuration. function: the function that computes it; None for the one that the configuration
    names. changes: functions of query, key, value and their `AttentionCall` that return changed queries, keys and
    values, or None; applied one after the other.
    """

    config: PretrainedConfig
    function: Callable | None = None
    changes: tuple[Callable[..., States | None], ...] = ()


def settings_of(module: nn.Module) -> AttentionSettings:
    """Return the settings of an attention module: without `change_attention`, its configuration alone."""
    return vars(module).get("attending") or AttentionSettings(module.config)


def change_attention(module: nn.Module, **changed) -> None:
    """Change how a module computes attention.

    The module gets its own configuration for that, so that the model's configuration, and with it the masks, does not
    change.

    changed: fields of `AttentionSettings`; function: with the signature of transformers' attention functions.
    """
    attending = settings_of(module)._replace(**changed)
    vars(module).pop("attending", None)
    module.config = attending.config
    if attending.function or attending.changes:
        module.attending, module.config = attending, copy.copy(attending.config)
        module.config._attn_implementation = OURS


def attend(module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *mask, **others) -> tuple:
    """Compute attention as `change_attention` set it up for the module, as an attention function of transformers."""
    attending = settings_of(module)
    if attending.changes:
        call = call_of(module, *mask, **others)
        for change in attending.changes:
            query, key, value = change(query, key, value, call) or (query, key, value)
    function = attending.function or _attention_function(module, attending.config._attn_implementation)
    return function(module, query, key, value, *mask, **others)


def call_of(
    module: nn.Module,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **_others,
) -> AttentionCall:
    """Collect the arguments of a transformers attention function beside queries, keys and values."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    return AttentionCall(attention_mask, scaling, causal, sliding_window)


def _attention_function(module: nn.Module, implementation: str) -> Callable:
    own = sys.modules[type(module).__module__].eager_attention_forward
    return summed_attention if implementation == OURS else AttentionInterface().get(implementation, own)


@contextmanager
def product_hooks(
    model: PreTrainedModel, visit: Callable[..., States | None], only: int | None = None
) -> Iterator[None]:
    """Call `visit(layer, query, key, value, call)` with the operands of each layer's attention, or of only one.

    The states are (batch, heads, T, features), keys after the rotary embedding and with those of a prefix; call: see
    `AttentionCall`. States that `visit` returns replace the three; None leaves them unchanged. It is not called for a
    model whose attention cannot be replaced.
    """
    with ExitStack() as stack:
        for attention in attentions(model) if is_replaceable(model) else ():
            if only in (None, attention.layer):
                changes = settings_of(attention.module).changes
                stack.callback(change_attention, attention.module, changes=changes)
                change_attention(attention.module, changes=(*changes, partial(visit, attention.layer)))
        yield


def attentions(model: PreTrainedModel) -> Iterator[Projection]:
    """Yield a `Projection` for each layer with attention that stands for its products of queries with keys and of
    probabilities with values; its module is the attention, and its path ends in ".products"."""
    for layer in layers_of(model):
        if layer.anatomy.attention is None:
            continue
        attention = reader_at(layer, ROLE, layer.anatomy.attention)
        yield attention._replace(path=f"{attention.path}.products")


def is_replaceable(model: PreTrainedModel) -> bool:
    """Return whether the attention function of a model can be replaced.

    The only encoder-decoder with a replaceable one, T5Gemma, has capped scores, and is excluded.
    """
    return model._supports_attention_backend and not anatomy_of(model.config).decoder and any(attentions(model))


def check_replaceable_attention(model: PreTrainedModel) -> None:
    if not is_replaceable(model):
        raise UserError(
            f"the attention of '{model.config.model_type}' cannot be replaced in transformers; expected an "
            "architecture such as gpt2, llama, bert or vit, or attention in 16 bits"
        )


@contextmanager
def eager(model: PreTrainedModel, summed: bool = False) -> Iterator[None]:
    """Let a model attend by plain products and their masks within this context.

    A custom attention function that was registered by a user may compute something else, and is kept.

    summed: whether its probabilities may come summed over the queries.
    """
    before = model.config._attn_implementation
    function = AttentionInterface().get(before)
    # implementations of transformers and of its hub (with a slash in the name) compute the same as plain products
    known = before == OURS or "/" in before or function is None
    if not known and function.__module__.partition(".")[0] != "transformers":
        yield
        return
    upcast = getattr(model.config, "reorder_and_upcast_attn", False)  # GPT-2 does so only under the name "eager"
    owners = [model, *(stack_module(model, stack) for stack in stacks_of(model.config))]
    module_configs = (settings_of(one.module).config for one in attentions(model) if hasattr(one.module, "config"))
    configs = [*(owner.config for owner in owners), *module_configs]  # a copied layer has its own
    named = [config._attn_implementation for config in configs]
    for config in configs:  # `set_attn_implementation` fails for Falcon
        config._attn_implementation = OURS if summed and not upcast else "eager"
    try:
        yield
    finally:
        for config, name in zip(configs, named, strict=True):
            config._attn_implementation = name


def summed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention from states (1, heads, T, features), with the signature of transformers' attention functions.

    Returns:
        The outputs (1, T, heads, features), and the probabilities summed over queries, (1, heads, 1, T). The order of
        summation differs from that over the whole matrix, so that they agree up to float32 rounding. Anything other
        than a softmax under a causal mask of one sequence, or on a CPU other than float32, is left to the
        architecture's own function, which returns all probabilities, (1, heads, T, T).
    """
    others = {name: given for name, given in others.items() if given is not None}
    if not others.keys() <= MASK or dropout or scaling is None or not _is_plain(query, key, attention_mask):
        plain = _attention_function(module, "eager")
        return plain(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others)
    heads, length = query.shape[1:3]
    if dispatch.has_attention_kernel(query, key):
        given = {"is_causal": True, "scale": scaling, "enable_gqa": heads != key.shape[1]}
        outputs = nn.functional.scaled_dot_product_attention(query, key, value, **given)
        received = dispatch.attention_sums(query, key, scaling)
        return outputs.transpose(1, 2).contiguous(), received[None, :, None]
    key, value = (repeat_kv(states, heads // states.shape[1]) for states in (key, value))
    key = key.transpose(2, 3)
    if math.frexp(scaling)[0] == 0.5:  # a power of two: multiplying by it is exact anywhere
        query, scaling = query * scaling, 1
    outputs = torch.empty(1, length, heads, value.shape[-1])
    received = torch.zeros(1, heads, 1, length)
    starts = range(0, max(1, length - QUERIES + 1), QUERIES)
    room = torch.zeros(1, heads, length - starts[-1], length)  # zeros to the right of the visible keys
    for start, end in pairwise([*starts, length]):
        scores = torch.matmul(query[:, :, start:end], key[..., :end])
        if scaling != 1:
            scores *= scaling
        scores[..., start:] += attention_mask[..., start:end, start:end]
        torch.softmax(scores, -1, out=scores)
        received[..., :end] += scores.sum(2, keepdim=True)
        probabilities = room[:, :, : end - start]
        probabilities[..., :end] = scores
        outputs[:, start:end] = torch.matmul(probabilities, value).transpose(1, 2)
    return outputs, received


def causal_mask(**given) -> torch.Tensor | None:
    """Return the mask of the "eager" attention of transformers, from the keywords that it gives to functions of masks;
    None if that has none.

    The mask of a sequence that attends to itself is the same tensor for blocks of one length while any of them is in
    use, so that it need not be tested for causality again.
    """
    length = given.get("q_length")
    if length != given["kv_length"] or any(given.get(name) != value for name, value in OF_ONE.items()):
        return eager_mask(**given)
    mask = _plain[length]() if length in _plain else None
    if mask is None or (mask.dtype, mask.device) != (given["dtype"], given["device"]):
        mask = eager_mask(**given)
        _plain[length] = ref(mask)
    return mask


def _is_plain(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Return whether `summed_attention` can compute an attention: one sequence attends to itself under a causal mask.

    That is on a GPU with a kernel for sums, or in float32 on a CPU with several heads: products of a single head are
    split among threads differently.
    """
    if mask is None or query.shape[0] > 1:
        return False
    on_cpu = query.is_cpu and query.dtype == torch.float32 and query.shape[1] > 1
    if not (dispatch.has_attention_kernel(query, key) or on_cpu):
        return False
    length = query.shape[2]
    if key.shape[2] != length or mask.dtype != query.dtype or mask.shape != (1, 1, length, length):
        return False
    known = _plain.get(length)
    if known is None or known() is not mask:  # all layers share one
        causal = torch.full_like(mask, torch.finfo(mask.dtype).min).triu_(1)
        if not torch.equal(mask, causal):
            return False
        _plain[length] = ref(mask)
    return True


AttentionInterface.register(OURS, attend)
AttentionMaskInterface.register(OURS, causal_mask)
