"""Sums of a causal softmax over the queries, whose probabilities are never in memory."""

import torch
import triton
import triton.language as tl

from outlier_kernels.triton import launch
from outlier_kernels.triton.product import precision
from outlier_kernels.triton.quantization import DTYPES

ENTRIES = 4096  # of a tile of queries or keys, half as many in float32, which takes three products
WIDEST = 512  # bytes of the features of a head, beyond which registers would be spilled


def serves(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether `attention_sums` takes queries and keys."""
    return query.dtype in DTYPES and key.dtype == query.dtype and 0 < query.shape[3] * query.itemsize <= WIDEST


def attention_sums(query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    """See `dispatch.attention_sums`."""
    _, heads, length, features = query.shape
    norms = query.new_empty(2, heads, length, dtype=torch.float32)
    given = query, key, *norms, heads // key.shape[1], length, features
    padded, few_digits = max(16, triton.next_power_of_2(features)), query.itemsize <= 2
    rows = min(64, max(16, ENTRIES // (1 + (not few_digits)) // padded))
    strides, grid = (*query.stride()[1:], *key.stride()[1:]), (triton.cdiv(length, rows), heads)
    named = {"FEATURES": padded, "PRECISION": precision(few_digits), "QUERIES": rows, "KEYS": rows, "num_stages": 2}
    launch(find_norms, grid, *given, *strides, float(scaling), **named)
    launch(add_probabilities, grid, *given, *strides, float(scaling), **named)
    return norms[1]


@triton.jit
def find_norms(
    query,
    key,
    norms,
    _sums,
    shared,
    length,
    features,
    head_stride,
    token_stride,
    feature_stride,
    key_head_stride,
    key_token_stride,
    key_feature_stride,
    scaling,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """The logarithm of each query's sum of exponentials."""
    head, place = tl.program_id(1).to(tl.int64), tl.program_id(0) * QUERIES + tl.arange(0, QUERIES)
    query += head * head_stride
    key += head // shared * key_head_stride
    queries = load_heads(query, place, length, features, token_stride, feature_stride, FEATURES)
    most, total = tl.full((QUERIES,), float("-inf"), tl.float32), tl.zeros((QUERIES,), tl.float32)
    for start in range(0, tl.minimum(length, (tl.program_id(0) + 1) * QUERIES), KEYS):
        other = start + tl.arange(0, KEYS)
        keys = load_heads(key, other, length, features, key_token_stride, key_feature_stride, FEATURES)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scaling
        scores = tl.where(other[None, :] <= place[:, None], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, axis=1))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(scores - higher[:, None]), axis=1)
        most = higher
    tl.store(norms + head * length + place, most + tl.log(total), mask=place < length)


@triton.jit
def add_probabilities(
    query,
    key,
    norms,
    sums,
    shared,
    length,
    features,
    head_stride,
    token_stride,
    feature_stride,
    key_head_stride,
    key_token_stride,
    key_feature_stride,
    scaling,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Sums over all queries of what each key receives."""
    head, other = tl.program_id(1).to(tl.int64), tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    query += head * head_stride
    key += head // shared * key_head_stride
    keys = load_heads(key, other, length, features, key_token_stride, key_feature_stride, FEATURES)
    received = tl.zeros((KEYS,), tl.float32)
    for start in range(tl.program_id(0) * KEYS // QUERIES * QUERIES, length, QUERIES):
        place = start + tl.arange(0, QUERIES)
        queries = load_heads(query, place, length, features, token_stride, feature_stride, FEATURES)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scaling
        norm = tl.load(norms + head * length + place, mask=place < length, other=float("inf"))
        seen = (other[None, :] <= place[:, None]) & (place < length)[:, None]
        received += tl.sum(tl.where(seen, tl.exp(scores - norm[:, None]), 0.0), axis=0)
    tl.store(sums + head * length + other, received, mask=other < length)


@triton.jit
def load_heads(states, place, length, features, token_stride, feature_stride, FEATURES: tl.constexpr):
    """Some positions of a head, (positions, features) in float32."""
    feature = tl.arange(0, FEATURES)
    inside = (place < length)[:, None] & (feature < features)[None, :]
    address = states + place[:, None].to(tl.int64) * token_stride + feature[None, :] * feature_stride
    return tl.load(address, mask=inside, other=0).to(tl.float32)
