"""The outlier features, as a list that never leaves the device."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl


class Outliers(NamedTuple):
    """Outlier features of matrices: flags, int8 (..., features), 1 where one is; places (..., most) in ascending order,
    -1 for none; and how many of a single list there are, int32 (1,) on the device, where it may be longer."""

    flags: torch.Tensor
    places: torch.Tensor
    count: torch.Tensor | None = None


def find_outliers(hidden_states: torch.Tensor, threshold: float) -> Outliers:
    """The features of float (tokens, features) that have a token with |x| ≥ threshold."""
    tokens, features = hidden_states.shape
    # The list has room for all features, so no input overflows it.
    flags, places, count = (
        hidden_states.new_zeros(size, dtype=dtype)
        for size, dtype in [(features, torch.int8), (features, torch.int32), (1, torch.int32)]
    )
    block = {"BLOCK_TOKENS": 32, "BLOCK_FEATURES": 128}
    grid = (triton.cdiv(features, block["BLOCK_FEATURES"]), triton.cdiv(tokens, block["BLOCK_TOKENS"]))
    flag_outliers[grid](hidden_states, flags, *hidden_states.shape, *hidden_states.stride(), float(threshold), **block)
    list_flags[(1,)](flags, places, count, features, BLOCK=min(triton.next_power_of_2(features), 4096))
    return Outliers(flags, places, count)


@triton.jit
def flag_outliers(
    hidden_states,
    flags,
    tokens,
    features,
    token_stride,
    feature_stride,
    threshold,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_FEATURES: tl.constexpr,
):
    feature = tl.program_id(0) * BLOCK_FEATURES + tl.arange(0, BLOCK_FEATURES)
    token = tl.program_id(1) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS).to(tl.int64)
    address = hidden_states + token[:, None] * token_stride + feature[None, :].to(tl.int64) * feature_stride
    value = tl.load(address, mask=(token < tokens)[:, None] & (feature < features)[None, :], other=0).to(tl.float32)
    hit = tl.max((tl.abs(value) >= threshold).to(tl.int32), axis=0)
    # Several programs may write the same flag; all of them write a 1.
    tl.store(flags + feature, hit, mask=(hit > 0) & (feature < features))


@triton.jit
def list_flags(flags, places, count, features, BLOCK: tl.constexpr):
    before = 0
    for start in range(0, features, BLOCK):
        feature = start + tl.arange(0, BLOCK)
        flag = tl.load(flags + feature, mask=feature < features, other=0).to(tl.int32)
        tl.store(places + before + tl.cumsum(flag) - 1, feature, mask=flag > 0)
        before += tl.sum(flag)
    tl.store(count, before)
