"""Sums of a causal softmax over the queries, without storing its probabilities."""

import torch
import triton
import triton.language as tl

from outlier_kernels.states import DTYPES
from outlier_kernels.triton import launch
from outlier_kernels.triton.product import precision

ENTRIES = 4096  # entries in a tile of queries or keys; half as many in float32, which takes three products
WIDEST = 512  # bytes of a head's features, beyond which registers would spill


def serves(query: torch.Tensor, key: torch.Tensor) -> bool:
    return query.dtype in DTYPES and key.dtype == query.dtype and 0 < query.shape[3] * query.itemsize <= WIDEST


def attention_sums(query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    """See `dispatch.attention_sums`."""
    _, heads, length, features = query.shape
    norms, sums = query.new_empty(2, heads, length, dtype=torch.float32)
    padded, few_digits = max(16, triton.next_power_of_2(features)), query.itemsize <= 2
    rows = min(64, max(16, ENTRIES // (1 + (not few_digits)) // padded))
    sizes = heads // key.shape[1], length, features
    for received in (None, sums):
        launch(
            *(attend, (triton.cdiv(length, rows), heads), query, key, norms, received),
            *(sizes, query.stride()[1:], key.stride()[1:], float(scaling)),
            FEATURES=padded,
            PRECISION=precision(few_digits),
            ROWS=rows,
            num_stages=2,
        )
    return sums


@triton.jit
def attend(
    query,
    key,
    norms,
    sums,
    sizes,
    strides,
    key_strides,
    scaling,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Store the logarithm of each query's sum of exponentials in `norms`, if `sums` is None; else read `norms`, and
    store in `sums` the attention that each key receives from all queries."""
    shared, length, features = sizes
    head, place = tl.program_id(1).to(tl.int64), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    query += head * strides[0]
    key += head // shared * key_strides[0]
    if sums is None:
        queries = load_heads(query, place, length, features, strides, FEATURES)
        most, total = tl.full((ROWS,), float("-inf"), tl.float32), tl.zeros((ROWS,), tl.float32)
        for start in range(0, tl.minimum(length, (tl.program_id(0) + 1) * ROWS), ROWS):
            other = start + tl.arange(0, ROWS)
            keys = load_heads(key, other, length, features, key_strides, FEATURES)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scaling
            scores = tl.where(other[None, :] <= place[:, None], scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, axis=1))
            total = total * tl.exp(most - higher) + tl.sum(tl.exp(scores - higher[:, None]), axis=1)
            most = higher
        tl.store(norms + head * length + place, most + tl.log(total), mask=place < length)
    else:
        keys = load_heads(key, place, length, features, key_strides, FEATURES)
        received = tl.zeros((ROWS,), tl.float32)
        for start in range(tl.program_id(0) * ROWS, length, ROWS):
            other = start + tl.arange(0, ROWS)
            queries = load_heads(query, other, length, features, strides, FEATURES)
            scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scaling
            norm = tl.load(norms + head * length + other, mask=other < length, other=float("inf"))
            seen = (place[None, :] <= other[:, None]) & (other < length)[:, None]
            received += tl.sum(tl.where(seen, tl.exp(scores - norm[:, None]), 0.0), axis=0)
        tl.store(sums + head * length + place, received, mask=place < length)


@triton.jit
def load_heads(states, place, length, features, strides, FEATURES: tl.constexpr):
    """Load positions of a head, (positions, features) in float32."""
    feature = tl.arange(0, FEATURES)
    inside = (place < length)[:, None] & (feature < features)[None, :]
    address = states + place[:, None].to(tl.int64) * strides[1] + feature[None, :] * strides[2]
    return tl.load(address, mask=inside, other=0).to(tl.float32)
