"""A layer of few tokens in one kernel: every program makes all codes of the inputs itself, which are small beside the
weights of its outputs."""

import torch
import triton
import triton.language as tl

from outlier_kernels.formats import Quantizer
from outlier_kernels.reference_integers import Quantized
from outlier_kernels.triton import launch
from outlier_kernels.triton.product import LEAST_COLUMNS, LEAST_DEPTH, add_zero_points, aligned, precision
from outlier_kernels.triton.quantization import ALIGNMENT, codes_of, join_limits, scales_of
from outlier_kernels.triton.tiles import FEW


def multiply(
    x: torch.Tensor, weight: Quantized, bias: torch.Tensor | None, activations: Quantizer, threshold: float | None
) -> torch.Tensor:
    """Compute `layer.linear` for up to 32 tokens."""
    (tokens, features), outputs = x.shape, len(weight.codes)
    result, padded = x.new_empty(tokens, outputs), triton.cdiv(features, ALIGNMENT) * ALIGNMENT
    small = [None if part is None else part.contiguous() for part in (*weight[1:], bias)]
    columns = min(32, max(LEAST_COLUMNS, triton.next_power_of_2(outputs)))
    rows, light = 16 if tokens <= 16 else FEW, x.itemsize <= 2 and activations.symmetric
    depth = 4096 // rows if light else LEAST_DEPTH  # limited by registers
    launch(
        *(multiply_few, (triton.cdiv(outputs, columns),), x, (aligned(weight.codes, padded), *small), result),
        *((tokens, outputs, features, padded, *x.stride()), int(weight.scale.numel() > 1)),
        None if threshold is None else float(threshold),
        PER_ROW=activations.per_row,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=min(depth, max(LEAST_DEPTH, triton.next_power_of_2(padded))),
        PRECISION=precision(x.itemsize <= 2),
        num_warps=4,
        num_stages=3,
    )
    return result


@triton.jit
def multiply_few(
    x,
    others,
    result,
    sizes,
    other_scale_stride,
    threshold,
    PER_ROW: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Quantize the inputs, multiply them with some outputs' weights, and finish the result. others: the weight's codes,
    scale, zero point and code sums, and the bias."""
    other_codes, other_scale, other_zero_point, other_code_sums, bias = others
    rows, columns, features, padded, row_stride, feature_stride = sizes
    row, place = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside, column = row < rows, tl.minimum(place, columns - 1).to(tl.int64)
    x += row[:, None].to(tl.int64) * row_stride
    other_codes += column[None, :] * padded

    low, high = tl.full((ROWS,), float("inf"), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)
    outliers = 0
    for start in tl.range(0, features, DEPTH, num_stages=3):
        feature = start + tl.arange(0, DEPTH)
        value, outlier, inlier = load_few(x, inside, feature, features, feature_stride, threshold)
        low, high = join_limits(low, high, value, inlier)
        outliers += tl.sum(outlier)
    if not PER_ROW:  # the hardware's minimum skips NaN
        is_nan = tl.max((low != low).to(tl.int32)) > 0
        low = tl.zeros_like(low) + tl.where(is_nan, float("nan"), tl.min(low))
        high = tl.zeros_like(high) + tl.where(is_nan, float("nan"), tl.max(high))
    step, factor, zero = scales_of(low, high, other_zero_point is None)

    sums, code_sum = tl.zeros((ROWS, COLUMNS), tl.int32), tl.zeros((ROWS,), tl.float32)
    for start in range(0, padded, DEPTH):
        feature = start + tl.arange(0, DEPTH)
        value, outlier, inlier = load_few(x, inside, feature, features, feature_stride, threshold)
        code = codes_of(value, inlier, step, factor, zero, other_zero_point is None, None, row, 0)
        other = tl.load(other_codes + feature[:, None], mask=(feature < padded)[:, None], other=0)
        sums = tl.dot(code.to(tl.int8), other, sums, out_dtype=tl.int32)
        code_sum += tl.sum(code, axis=1)

    of_outliers, input_sum = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS,), tl.float32)
    outlier_sum = tl.zeros((COLUMNS,), tl.int32)
    if threshold is not None:  # noqa: SIM102 - this condition is known to the compiler
        if outliers > 0:
            for start in range(0, features, DEPTH):
                feature = start + tl.arange(0, DEPTH)
                value, outlier, inlier = load_few(x, inside, feature, features, feature_stride, threshold)
                if tl.sum(outlier) > 0:
                    inputs = tl.where((outlier > 0)[None, :], value, 0.0)
                    other = tl.load(other_codes + feature[:, None], mask=(outlier > 0)[:, None], other=0)
                    of_outliers = tl.dot(inputs, other.to(tl.float32), of_outliers, input_precision=PRECISION)
                    input_sum += tl.sum(inputs, axis=1)
                    outlier_sum += tl.sum(other.to(tl.int32), axis=0)

    if other_zero_point is None:
        value = sums.to(tl.float32) * step[:, None]
    else:
        other_zero = tl.load(other_zero_point + column * other_scale_stride)
        other_sum = tl.load(other_code_sums + column) - outlier_sum
        value = add_zero_points(sums, features - outliers, zero, code_sum, other_zero, other_sum) * step[:, None]
        value -= input_sum[:, None] * other_zero[None, :]
    value = (value + of_outliers) * tl.load(other_scale + column * other_scale_stride)[None, :]
    if bias is not None:
        value += tl.load(bias + column).to(tl.float32)[None, :]
    stored = inside[:, None] & (place < columns)[None, :]
    result += row[:, None].to(tl.int64) * columns + place[None, :]
    tl.store(result, value.to(result.dtype.element_ty), mask=stored)


@triton.jit
def load_few(x, inside, feature, features, feature_stride, threshold):
    """Load values of all rows and some features in float32, 0 outside; return them, which features are outliers
    (int32), and which values are inliers."""
    kept = inside[:, None] & (feature < features)[None, :]
    value = tl.load(x + feature[None, :].to(tl.int64) * feature_stride, mask=kept, other=0).to(tl.float32)
    if threshold is None:
        return value, tl.zeros_like(feature), kept
    else:  # noqa: RET505 - what is compiled needs it
        outlier = tl.max((tl.abs(value) >= threshold).to(tl.int32), axis=0)
        return value, outlier, kept & (outlier == 0)[None, :]
