"""Quantization of rows, one program a row."""

import torch
import triton
import triton.language as tl

from outlier_kernels.reference import Quantized

ALIGNMENT = 16  # bytes that one load of a thread takes, if rows begin at multiples of them
LARGEST_BLOCK = 4096  # features that the registers of one program hold
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def quantize(
    matrix: torch.Tensor, symmetric: bool, per_row: bool = True, outliers: torch.Tensor | None = None
) -> Quantized:
    """`reference.quantize_integers` to int8, bit for bit, but a NaN has some code, not none (its scale is NaN or inf).

    The codes are the first columns of a matrix that is padded with zeros to a multiple of 16 features, which the
    product needs for wide loads.

    Args:
        matrix: float16, bfloat16 or float32 (rows, features), of any strides.
        symmetric: absmax, else zeropoint.
        per_row: one scale for every row, else one for the whole matrix.
        outliers: int8 (features,), 1 for features that are left out: no range includes them, and their codes are 0.
    """
    rows, features = matrix.shape
    padded = triton.cdiv(features, ALIGNMENT) * ALIGNMENT
    codes = matrix.new_empty(rows, padded, dtype=torch.int8)
    scale = matrix.new_empty(rows if per_row else 1, 1, dtype=torch.float32)
    zero_point, code_sums = (None, None) if symmetric else (torch.empty_like(scale), scale.new_empty(rows, 1))
    limits = None if per_row else _limits(matrix, outliers)
    block = min(triton.next_power_of_2(padded), LARGEST_BLOCK)
    outputs = (codes, scale, zero_point, code_sums)
    with torch.cuda.device_of(matrix):
        # A fused multiply and add would not round the product, as torch does.
        quantize_row[(rows,)](
            matrix, outliers, limits, *outputs, features, padded, *matrix.stride(), BLOCK=block, enable_fp_fusion=False
        )
    return Quantized(codes[:, :features], scale, zero_point, code_sums)


def _limits(matrix: torch.Tensor, outliers: torch.Tensor | None) -> torch.Tensor:
    """Smallest and largest element that is no outlier, float32 (2,)."""
    if outliers is None:
        return torch.stack(matrix.aminmax()).float()
    least, most = (matrix.masked_fill(outliers.bool(), limit) for limit in (torch.inf, -torch.inf))
    return torch.stack([least.amin(), most.amax()]).float()


@triton.jit
def quantize_row(
    matrix,
    outliers,
    limits,
    codes,
    scale,
    zero_point,
    code_sums,
    features,
    padded,
    row_stride,
    feature_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    matrix += row * row_stride
    codes += row * padded
    if limits is None:
        group = row
        low, high = find_limits(matrix, outliers, features, feature_stride, BLOCK)
    else:
        group = row * 0
        low, high = tl.load(limits), tl.load(limits + 1)
    # Where all features are outliers nothing is left, which is quantized as zeros are.
    low, high = tl.where(high < low, 0.0, low), tl.where(high < low, 0.0, high)

    if zero_point is None:
        step = absmax_scale(tl.maximum(high, -low))
    else:
        # The range itself may be beyond the largest float, and its scale is at least the smallest normal one, 2^-126.
        dynamic_range = tl.div_rn(tl.full((), 127.0, tl.float32), high * 0.5 - low * 0.5)
        dynamic_range = tl.where(dynamic_range > 8.507059173023462e37, 8.507059173023462e37, dynamic_range)
        dynamic_range = tl.where(high - low == 0, 1.0, dynamic_range)
        zero = -round_to_even(dynamic_range * low) - 127
        step = tl.div_rn(tl.full((), 1.0, tl.float32), dynamic_range)
        tl.store(zero_point + group, zero)
    tl.store(scale + group, step)

    code_sum = tl.zeros((), tl.float32)  # exact: LARGEST_K · 127 < 2^24
    for start in range(0, padded, BLOCK):
        feature = start + tl.arange(0, BLOCK)
        # From the cache, which read the row to find the limits.
        value, inlier = load_inliers(matrix, outliers, feature, features, feature_stride)
        if zero_point is None:
            code = round_to_even(tl.div_rn(value, tl.zeros_like(value) + step))
        else:
            code = round_to_even(value * dynamic_range) + zero
        code = tl.where(inlier, tl.minimum(tl.maximum(code, -127.0), 127.0), 0.0)
        tl.store(codes + feature, code.to(tl.int8), mask=feature < padded)
        code_sum += tl.sum(code)
    if zero_point is not None:
        tl.store(code_sums + row, code_sum)


@triton.jit
def absmax_scale(largest):
    """`reference.absmax_scale`, at least 2^-126."""
    scale = tl.div_rn(largest, tl.full(largest.shape, 127.0, tl.float32))
    return tl.where(largest == 0, 1.0, tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale))


@triton.jit
def find_limits(row, outliers, features, feature_stride, BLOCK: tl.constexpr):
    """Smallest and largest inlier of a row; both NaN if one is, which the hardware's minimum and maximum pass over."""
    low = tl.full((), float("inf"), tl.float32)
    high = tl.full((), float("-inf"), tl.float32)
    nans = tl.zeros((), tl.int32)
    for start in range(0, features, BLOCK):
        feature = start + tl.arange(0, BLOCK)
        value, inlier = load_inliers(row, outliers, feature, features, feature_stride)
        nans += tl.sum((value != value).to(tl.int32))
        low = tl.minimum(low, tl.min(tl.where(inlier, value, float("inf"))))
        high = tl.maximum(high, tl.max(tl.where(inlier, value, float("-inf"))))
    return tl.where(nans > 0, float("nan"), low), tl.where(nans > 0, float("nan"), high)


@triton.jit
def load_inliers(row, outliers, feature, features, feature_stride):
    """Values of some features in float32, 0 for those that are left out, and which are not."""
    inlier = feature < features
    if outliers is not None:
        inlier &= tl.load(outliers + feature, mask=inlier, other=1) == 0
    return tl.load(row + feature.to(tl.int64) * feature_stride, mask=inlier, other=0).to(tl.float32), inlier


@triton.jit
def round_to_even(value):
    """The nearest whole number, ties to even: adding 2^23 leaves no bits for a fraction, and all floats from there on
    are whole. (Triton's own rounding is a library call, which its interpreter does not have.)"""
    magnitude = tl.abs(value)
    whole = tl.where(magnitude < 8388608.0, (magnitude + 8388608.0) - 8388608.0, magnitude)
    return tl.where(value < 0, -whole, whole)
