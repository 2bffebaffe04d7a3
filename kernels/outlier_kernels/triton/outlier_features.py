"""Outlier features and limits of a matrix from one read, as a list that never leaves the device."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outlier_kernels.triton import launch, room

LEAST_KEY = tl.constexpr(-(2**31))


class Outliers(NamedTuple):
    """Outlier features of matrices.

    flags: (..., features), nonzero for outlier features. places: (..., most) in ascending order, -1 for none. count:
    length of a single list, int32 (1,) on the device, if `places` may be longer. limits: smallest and largest entry of
    the other features, float32 (2,), if requested.
    """

    flags: torch.Tensor
    places: torch.Tensor
    count: torch.Tensor | None = None
    limits: torch.Tensor | None = None


def find_outliers(
    matrix: torch.Tensor, threshold: float | None, limits: bool = False, left_out: torch.Tensor | None = None
) -> Outliers:
    """Find the features of float (rows, features) with |x| ≥ threshold in some row; none without a threshold.

    limits: whether to find the limits, both NaN if an entry is NaN. left_out: flags (features,) of features that the
    limits exclude. The result is valid until the next call.
    """
    rows, features = matrix.shape
    space, keys, outliers = room(_space, matrix.device, features)
    block = {"ROWS": 128 if rows > 32 else 32, "FEATURES": 128, "num_warps": 8}
    grid = (triton.cdiv(features, block["FEATURES"]), triton.cdiv(rows, block["ROWS"]))
    found, threshold = (None, None) if threshold is None else (tuple(outliers[:3]), float(threshold))
    of_limits = (keys, outliers.limits) if limits else None
    launch(
        *(scan_tile, grid, matrix, left_out, space, found, of_limits, (rows, features, *matrix.stride()), threshold),
        **block,
        LISTED=min(triton.next_power_of_2(features), 4096),
    )
    return outliers


def _space(device: torch.device, features: int) -> tuple[torch.Tensor, torch.Tensor, Outliers]:
    """Make scratch memory, which the last program of a launch restores to this state, and the result.

    The scratch memory is a ticket and flags of outlier features, int32 (1 + features,), and keys of the extremes of
    each feature, int32 (2, features).
    """
    space = torch.zeros(1 + features, dtype=torch.int32, device=device)
    keys = torch.full((2, features), LEAST_KEY.value, dtype=torch.int32, device=device)
    flags, places = space.new_empty(features, dtype=torch.int8), space.new_empty(features)
    return space, keys, Outliers(flags, places, space.new_empty(1), space.new_empty(2, dtype=torch.float32))


@triton.jit
def scan_tile(
    matrix,
    left_out,
    space,
    found,
    of_limits,
    sizes,
    threshold,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Find the outlier features and the smallest and largest entries of a tile; the last program to finish combines
    those of all tiles in `found` and `of_limits`, whichever is given."""
    rows, features, row_stride, feature_stride = sizes
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    of_features = feature < features
    inside = (row < rows)[:, None] & of_features[None, :]
    address = matrix + row[:, None] * row_stride + feature[None, :].to(tl.int64) * feature_stride
    value = tl.load(address, mask=inside, other=0).to(tl.float32)
    if found is not None:
        hit = tl.max((tl.abs(value) >= threshold).to(tl.int32), axis=0)
        # Several programs may write to the same feature; all of them write 1.
        tl.store(space + 1 + feature, hit, mask=(hit > 0) & of_features)
    if of_limits is not None:
        keys, limits = of_limits
        low = tl.max(tl.where(inside, key_of(-value), LEAST_KEY), axis=0)
        tl.atomic_max(keys + feature, low, mask=of_features, sem="relaxed")
        high = tl.max(tl.where(inside, key_of(value), LEAST_KEY), axis=0)
        tl.atomic_max(keys + features + feature, high, mask=of_features, sem="relaxed")
    tl.debug_barrier()
    ticket = tl.atomic_add(space, 1, sem="acq_rel")
    if ticket == tl.num_programs(0) * tl.num_programs(1) - 1:
        # The last program to finish combines the results of all, and restores the scratch memory.
        before, least, most = 0, LEAST_KEY, LEAST_KEY
        for start in range(0, features, LISTED):
            listed = start + tl.arange(0, LISTED)
            within = listed < features
            inlier = within
            if left_out is not None:
                inlier &= tl.load(left_out + listed, mask=within, other=1) == 0
            if found is not None:
                flag = tl.load(space + 1 + listed, mask=within, other=0, cache_modifier=".cg")
                tl.store(found[0] + listed, flag.to(tl.int8), mask=within)
                tl.store(found[1] + before + tl.cumsum(flag) - 1, listed, mask=flag > 0)
                tl.store(space + 1 + listed, 0, mask=flag > 0)
                before += tl.sum(flag)
                inlier &= flag == 0
            if of_limits is not None:
                lows = tl.load(keys + listed, mask=within, other=LEAST_KEY, cache_modifier=".cg")
                highs = tl.load(keys + features + listed, mask=within, other=LEAST_KEY, cache_modifier=".cg")
                least = tl.maximum(least, tl.max(tl.where(inlier, lows, LEAST_KEY)))
                most = tl.maximum(most, tl.max(tl.where(inlier, highs, LEAST_KEY)))
                tl.store(keys + listed, LEAST_KEY, mask=within)
                tl.store(keys + features + listed, LEAST_KEY, mask=within)
        if found is not None:
            tl.store(found[2], before)
        if of_limits is not None:  # without inliers the largest is below the smallest
            tl.store(limits, tl.where(least == LEAST_KEY, float("inf"), -value_of(least)))
            tl.store(limits + 1, tl.where(most == LEAST_KEY, float("-inf"), value_of(most)))
        tl.store(space, 0)


@triton.jit
def key_of(value):
    """Map floats to integers in their order; NaN is the largest."""
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(value != value, 0x7FC00000, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def value_of(key):
    """Invert `key_of`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)
