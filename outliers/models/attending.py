"""Attention whose probabilities are summed over the queries while they are in a core's cache, for who needs no more.

The fused kernels never make the probabilities, and an architecture's own plain products make all of them, (heads, T,
T), and pass over them half a dozen times. Here they are made for some queries at a time, and of the keys up to these
alone. The outputs are those of the plain products bit by bit: under the causal mask the other probabilities are exactly
0, and as such they take part in the products with the values.
"""

import math
import sys
from itertools import pairwise
from weakref import ref

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

SUMMED = "summed"  # its name among the implementations of attention
QUERIES = 128  # at once, and fewest: of few rows a product is summed in another order
MASK = {"use_cache", "position_ids", "sliding_window"}  # arguments that change nothing beside the mask

_plain: dict[int, ref] = {}  # length: the mask that was last found to be causal


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
    """An attention function of transformers: states (1, heads, T, features) to outputs (1, T, heads, features).

    Returns:
        The outputs; and the probabilities summed over queries, (1, heads, 1, T), in another order than of the whole at
        once: they agree to float32's rounding. What is not softmax under a causal mask of one sequence, in float32 and
        on a CPU, goes to the architecture's own function, which returns all probabilities, (1, heads, T, T).
    """
    others = {name: given for name, given in others.items() if given is not None}
    if not others.keys() <= MASK or dropout or scaling is None or not _is_plain(query, key, attention_mask):
        eager_attention = sys.modules[type(module).__module__].eager_attention_forward
        return eager_attention(module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others)
    heads, length = query.shape[1:3]
    key, value = _for_all(key, heads).transpose(2, 3), _for_all(value, heads)
    if math.frexp(scaling)[0] == 0.5:  # a power of two, which rounds nothing wherever it is multiplied with
        query, scaling = query * scaling, 1
    outputs = torch.empty(1, length, heads, value.shape[-1])
    received = torch.zeros(1, heads, 1, length)
    starts = range(0, max(1, length - QUERIES + 1), QUERIES)
    room = torch.zeros(1, heads, length - starts[-1], length)  # right of the keys so far there are zeros
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


def _for_all(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values (1, groups, T, features) for each head."""
    _, groups, length, features = states.shape
    return states[:, :, None].expand(1, groups, heads // groups, length, features).reshape(1, heads, length, features)


def _is_plain(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """Whether one sequence attends to itself under a causal mask, in float32 on a CPU; and with several heads, for the
    products of a single one are split among threads otherwise."""
    if mask is None or not query.is_cpu or query.dtype != torch.float32 or query.shape[0] > 1 or query.shape[1] < 2:
        return False
    length = query.shape[2]
    if key.shape[2] != length or mask.dtype != query.dtype:
        return False
    known = _plain.get(length)
    if known is None or known() is not mask:  # all layers share one
        causal = torch.full((1, 1, length, length), torch.finfo(torch.float32).min).triu_(1)
        if not torch.equal(mask, causal):
            return False
        _plain[length] = ref(mask)
    return True


AttentionInterface.register(SUMMED, summed_attention)
AttentionMaskInterface.register(SUMMED, eager_mask)
