"""The statistics of a trace from one read of each hidden state: a kernel a state, whose tiles leave their shares."""

import torch
import triton
import triton.language as tl

from outlier_kernels import reference_states
from outlier_kernels.reference_states import add_residual, values_of_hits
from outlier_kernels.states import Statistics, serves
from outlier_kernels.triton import launch

__all__ = ["add", "add_residual", "serves", "values_of_hits"]
TILE = {"TOKENS": 8, "FEATURES": 128}
NOTHING, MAGNITUDES, HITS = range(3)  # what is kept of each entry


def add(
    statistics: Statistics, x: torch.Tensor, ids: torch.Tensor, alpha: float, kept: torch.Tensor | None
) -> torch.Tensor:
    """See `dispatch.add_state`."""
    low, high, hits, sums, squares, powers, rest = shares(x, alpha, kept)
    reference_states.check_finite(squares)  # float32 has no squares as large, and the extremes pass over NaN
    torch.minimum(statistics["min"], low, out=statistics["min"])
    torch.maximum(statistics["max"], high, out=statistics["max"])
    torch.maximum(statistics["rest.max"], rest, out=statistics["rest.max"])
    reference_states.join_largest(statistics, x, torch.maximum(-low, high), ids)
    squares_rest = squares - x[0].double().square()
    added = {"hits": hits, "sequences_hit": hits > 0, "sum": sums, "squares": squares, "squares_rest": squares_rest}
    for name, value in (added | reference_states.kurtoses(powers, x.shape[1])).items():
        statistics[name] += value
    return hits


def shares(x: torch.Tensor, alpha: float, kept: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Least and largest entry of each feature (float32), its hits (int64), its sums and squares (float64); four powers
    of the entries, summed over each token's (float64, (4, tokens)); and the largest magnitude without position 0."""
    tokens, features = x.shape
    blocks, strips = triton.cdiv(tokens, TILE["TOKENS"]), triton.cdiv(features, TILE["FEATURES"])
    extremes = x.new_empty(2, blocks, features, dtype=torch.float32)
    hits = x.new_empty(blocks, features, dtype=torch.int32)
    sums = x.new_empty(2, blocks, features, dtype=torch.float64)
    powers = x.new_empty(strips, 4, tokens, dtype=torch.float64)
    rest = x.new_empty(blocks, strips, dtype=torch.float32)
    if kept is None:
        keeps = NOTHING
    elif kept.dtype == torch.bool:
        keeps, kept = HITS, kept.view(torch.int8)
    else:
        keeps = MAGNITUDES
    given = x, kept, extremes, hits, sums, powers, rest, tokens, features, *x.stride(), float(alpha)
    launch(add_tile, (strips, blocks), *given, KEEPS=keeps, **TILE)
    return extremes[0].amin(0), extremes[1].amax(0), hits.sum(0), *sums.sum(1), powers.sum(0), rest.amax()


@triton.jit
def add_tile(
    x,
    kept,
    extremes,
    hits,
    sums,
    powers,
    rest,
    tokens,
    features,
    token_stride,
    feature_stride,
    alpha,
    KEEPS: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    strip, block, strips, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    feature = strip * FEATURES + tl.arange(0, FEATURES)
    token = block * TOKENS + tl.arange(0, TOKENS).to(tl.int64)
    inside = (token < tokens)[:, None] & (feature < features)[None, :]
    address = x + token[:, None] * token_stride + feature[None, :].to(tl.int64) * feature_stride
    value = tl.load(address, mask=inside, other=0).to(tl.float32)
    magnitude = tl.abs(value)
    hit = magnitude >= alpha  # never of the zeros outside
    entry = token[:, None] * features + feature[None, :]
    if KEEPS == 1:
        before = tl.load(kept + entry, mask=inside, other=0).to(tl.float32)
        tl.store(kept + entry, tl.maximum(before, magnitude).to(kept.dtype.element_ty), mask=inside)
    if KEEPS == 2:
        tl.store(kept + entry, hit.to(tl.int8), mask=hit)

    place, others = block.to(tl.int64) * features + feature, blocks.to(tl.int64) * features
    of_feature = feature < features
    tl.store(extremes + place, tl.min(tl.where(inside, value, float("inf")), axis=0), mask=of_feature)
    tl.store(extremes + others + place, tl.max(tl.where(inside, value, float("-inf")), axis=0), mask=of_feature)
    tl.store(hits + place, tl.sum(hit.to(tl.int32), axis=0), mask=of_feature)
    tl.store(rest + block * strips + strip, tl.max(tl.where((token > 0)[:, None], magnitude, 0.0)))

    first = value.to(tl.float64)
    second = first * first
    tl.store(sums + place, tl.sum(first, axis=0), mask=of_feature)
    tl.store(sums + others + place, tl.sum(second, axis=0), mask=of_feature)
    powers += strip.to(tl.int64) * 4 * tokens + token
    tl.store(powers, tl.sum(first, axis=1), mask=token < tokens)
    tl.store(powers + tokens, tl.sum(second, axis=1), mask=token < tokens)
    tl.store(powers + 2 * tokens, tl.sum(second * first, axis=1), mask=token < tokens)
    tl.store(powers + 3 * tokens, tl.sum(second * second, axis=1), mask=token < tokens)
