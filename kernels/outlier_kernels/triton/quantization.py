"""Quantization of rows of one or many matrices: one program per tile of rows, which stays in registers."""

import os

import torch
import triton
import triton.language as tl

from outlier_kernels.formats import Quantizer, is_int8
from outlier_kernels.reference_integers import Quantized
from outlier_kernels.states import DTYPES
from outlier_kernels.triton import launch, room
from outlier_kernels.triton.outlier_features import find_outliers

ALIGNMENT = 16  # bytes of a thread's widest load, if rows begin at multiples of them
ENTRIES = 2048  # in a tile
WIDEST = 16384  # features that the registers of one program hold
STRIP = 4096  # features at a time of wider rows, which are read twice
FEATURES = 32  # in a tile of a transposed matrix, whose rows are interleaved
# Triton's interpreter rounds a fused multiply-add twice.
FUSES = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")


def serves(matrix: torch.Tensor, quantizer: Quantizer | None) -> bool:
    return is_int8(quantizer) and matrix.dtype in DTYPES and matrix.numel() > 0


def quantize(
    matrix: torch.Tensor,
    quantizer: Quantizer,
    left_out: torch.Tensor | None = None,
    limits: torch.Tensor | None = None,
    buffer: int | None = None,
) -> Quantized:
    """Compute `reference.quantize` to int8 (rows, features). Arguments are those of `quantize_rows`; limits that are
    not given are computed."""
    if quantizer.per_row:
        limits = None
    elif limits is None:
        limits = find_outliers(matrix, None, True, left_out).limits
    return quantize_rows(matrix, quantizer.symmetric, left_out, limits=limits, buffer=buffer)


def quantize_rows(
    matrices: torch.Tensor,
    symmetric: bool = True,
    left_out: torch.Tensor | None = None,
    seed: int | None = None,
    limits: torch.Tensor | None = None,
    buffer: int | None = None,
) -> Quantized:
    """Make codes of (..., m, k), int8, bit-identical to the reference, except that a NaN gets an arbitrary code (its
    scale is NaN or inf).

    Rows are padded in memory with zeros to a multiple of 16 features, which the product needs for wide loads.

    Args:
        matrices: float16, bfloat16 or float32, of any strides.
        symmetric: absmax, otherwise zeropoint.
        left_out: flags (..., k) of features that are left out: no range includes them, and their codes are 0.
        seed: for stochastic rounding of absmax codes, see `reference_products.quantize_rows`.
        limits: of the whole matrix, float32 (2,), if it has one scale; None for one scale per row.
        buffer: number of a reused buffer for codes of (m, k), valid until its next use, which may have further rows;
            None for new memory.
    """
    four = as_four_dimensions(matrices)
    batches, heads, rows, features = four.shape
    padded = triton.cdiv(features, ALIGNMENT) * ALIGNMENT
    kind = symmetric, limits is None
    if buffer is None:
        made = _empty(matrices.device, *kind, *matrices.shape[:-1], padded)
    else:
        made = room(_empty, matrices.device, *kind, triton.next_power_of_2(rows), padded, buffer=buffer)
    width = triton.next_power_of_2(padded)
    if four.stride(3) != 1 or width > WIDEST:
        width = STRIP if four.stride(3) == 1 else FEATURES
    height = max(1, ENTRIES // width)
    launch(
        *(quantize_tile, (batches * heads * triton.cdiv(rows, height),), four, left_out, limits, tuple(made), seed),
        *((heads, rows, features, padded), four.stride()),
        0 if left_out is None or left_out.ndim == 1 else features,
        ROWS=height,
        FEATURES=width,
        WHOLE=width >= padded,
        num_warps=4 * max(1, width // STRIP),
    )
    return made._replace(codes=made.codes[..., :features])


def _empty(device: torch.device, symmetric: bool, per_row: bool, *sizes: int) -> Quantized:
    """Allocate codes. symmetric: whether they are absmax. per_row: whether each row has a scale. sizes: of the
    matrices, with padded features."""
    *leading, padded = sizes
    codes = torch.empty(*leading, padded, dtype=torch.int8, device=device)
    scale = torch.empty(*(leading if per_row else (1,)), 1, device=device)
    if symmetric:
        return Quantized(codes, scale)
    return Quantized(codes, scale, torch.empty_like(scale), scale.new_empty(*leading, 1))


def as_four_dimensions(matrices: torch.Tensor) -> torch.Tensor:
    """Reshape matrices (..., m, k) to (batches, heads, m, k)."""
    if matrices.ndim > 4:
        return matrices.flatten(0, -4)
    return matrices[(None,) * (4 - matrices.ndim)]


@triton.jit
def quantize_tile(
    matrices,
    left_out,
    limits,
    made,
    seed,
    sizes,
    strides,
    left_out_stride,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    WHOLE: tl.constexpr,
):
    codes, scale, zero_point, code_sums = made
    heads, rows, features, padded = sizes
    batch_stride, head_stride, row_stride, feature_stride = strides
    tiles_of_one = tl.cdiv(rows, ROWS)
    matrix = (tl.program_id(0) // tiles_of_one).to(tl.int64)
    row = tl.program_id(0) % tiles_of_one * ROWS + tl.arange(0, ROWS)
    matrices += matrix // heads * batch_stride + matrix % heads * head_stride
    matrices += row[:, None].to(tl.int64) * row_stride
    inside, place = row < rows, matrix * rows + row
    if left_out is not None:
        left_out += matrix * left_out_stride
    if WHOLE:
        feature = tl.arange(0, FEATURES)
        value, inlier = load_inliers(matrices, left_out, inside, feature, features, feature_stride)
    if limits is not None:
        group, zeros = place * 0, tl.zeros((ROWS,), tl.float32)
        low, high = zeros + tl.load(limits), zeros + tl.load(limits + 1)
    else:
        group = place
        if WHOLE:
            low, high = limits_of(value, inlier)
        else:
            low = tl.full((ROWS,), float("inf"), tl.float32)
            high = tl.full((ROWS,), float("-inf"), tl.float32)
            for start in range(0, features, FEATURES):
                feature = start + tl.arange(0, FEATURES)
                part, inlier = load_inliers(matrices, left_out, inside, feature, features, feature_stride)
                low, high = join_limits(low, high, part, inlier)
    step, factor, zero = scales_of(low, high, zero_point is None)
    tl.store(scale + group, step, mask=inside)
    if zero_point is not None:
        tl.store(zero_point + group, zero, mask=inside)

    codes += place[:, None] * padded
    if WHOLE:
        code = codes_of(value, inlier, step, factor, zero, zero_point is None, seed, place, 0)
        tl.store(codes + feature[None, :], code.to(tl.int8), mask=inside[:, None] & (feature < padded)[None, :])
        code_sum = tl.sum(code, axis=1)
    else:
        code_sum = tl.zeros((ROWS,), tl.float32)  # exact: LARGEST_K · 127 < 2^24
        for start in range(0, padded, FEATURES):
            feature = start + tl.arange(0, FEATURES)
            part, inlier = load_inliers(matrices, left_out, inside, feature, features, feature_stride)
            code = codes_of(part, inlier, step, factor, zero, zero_point is None, seed, place, start // 4)
            tl.store(codes + feature[None, :], code.to(tl.int8), mask=inside[:, None] & (feature < padded)[None, :])
            code_sum += tl.sum(code, axis=1)
    if zero_point is not None:
        tl.store(code_sums + place, code_sum, mask=inside)


@triton.jit
def load_inliers(matrices, left_out, inside, feature, features, feature_stride):
    """Load values of some rows and features in float32, 0 if left out; return them, and which are inliers."""
    kept = feature < features
    if left_out is not None:
        kept &= tl.load(left_out + feature, mask=kept, other=1) == 0
    inlier = inside[:, None] & kept[None, :]
    address = matrices + feature[None, :].to(tl.int64) * feature_stride
    return tl.load(address, mask=inlier, other=0).to(tl.float32), inlier


@triton.jit
def limits_of(value, inlier):
    """Return the smallest and largest inlier of rows, both NaN if one is NaN, which the hardware's minimum and maximum
    skip."""
    low = tl.min(tl.where(inlier, value, float("inf")), axis=1)
    high = tl.max(tl.where(inlier, value, float("-inf")), axis=1)
    is_nan = tl.max((inlier & (value != value)).to(tl.int32), axis=1) > 0
    return tl.where(is_nan, float("nan"), low), tl.where(is_nan, float("nan"), high)


@triton.jit
def join_limits(low, high, value, inlier):
    """Extend the limits of rows by more of their values."""
    of_low, of_high = limits_of(value, inlier)
    is_nan = (low != low) | (of_low != of_low)
    return (
        tl.where(is_nan, float("nan"), tl.minimum(low, of_low)),
        tl.where(is_nan, float("nan"), tl.maximum(high, of_high)),
    )


@triton.jit
def scales_of(low, high, SYMMETRIC: tl.constexpr):
    """Return scales of rows with these limits, the factors of their values, and zero points; for absmax all three are
    the scale."""
    # If all features are left out, nothing remains; it is quantized like zeros.
    nothing = high < low
    low, high = tl.where(nothing, 0.0, low), tl.where(nothing, 0.0, high)
    if SYMMETRIC:
        largest = tl.maximum(high, -low)
        step = tl.div_rn(largest, tl.zeros_like(largest) + 127.0)
        # at least the smallest normal number, 2^-126
        step = tl.where(step < 1.1754943508222875e-38, 1.1754943508222875e-38, step)
        step = tl.where(largest == 0, 1.0, step)
        return step, step, step
    else:  # noqa: RET505 - what is compiled needs it
        # The range itself may exceed the largest float; its scale is at least the smallest normal number, 2^-126.
        factor = tl.div_rn(tl.zeros_like(low) + 127.0, high * 0.5 - low * 0.5)
        factor = tl.where(factor > 8.507059173023462e37, 8.507059173023462e37, factor)
        factor = tl.where(high - low == 0, 1.0, factor)
        zero = -round_to_even(factor * low) - 127
        return tl.div_rn(tl.zeros_like(low) + 1.0, factor), factor, zero


@triton.jit
def codes_of(value, inlier, step, factor, zero, SYMMETRIC: tl.constexpr, seed, row, first):
    """Return codes of rows, float32, 0 for left-out features. first: the number of their first group of four
    features."""
    if SYMMETRIC:
        quotient = divide(value, step) if FUSES else tl.div_rn(value, tl.zeros_like(value) + step[:, None])
        if seed is None:
            code = round_to_even(quotient)
        else:
            code = tl.floor(quotient + chances(seed, row, first, value.shape[0], value.shape[1]))
    else:
        code = round_to_even(value * factor[:, None]) + zero[:, None]
    return tl.where(inlier, tl.minimum(tl.maximum(code, -127.0), 127.0), 0.0)


@triton.jit
def divide(value, step):
    """Divide rows by their steps, rounded like a division: multiply with the reciprocal and correct the quotient until
    it is the nearest float (Markstein, 1990).

    Quotients below 2^-40 are only approximate; those by inf are NaN.
    """
    # Remainders of the smallest numbers need bits below the smallest float; scaling by 2^64 avoids that.
    lift = tl.where(step < 8.673617379884035e-19, 18446744073709551616.0, 1.0)
    value, step = value * lift[:, None], (step * lift)[:, None]
    inverse = tl.div_rn(tl.zeros_like(step) + 1.0, step)
    quotient = value * inverse
    for _ in tl.static_range(2):
        quotient = tl.fma(tl.fma(-quotient, step, value), inverse, quotient)
    return quotient


@triton.jit
def chances(seed, row, first, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """Compute `reference_products.chances` of rows, from feature 4 · first on: float32 (ROWS, FEATURES)."""
    zeros = tl.zeros((ROWS, FEATURES // 4), tl.int32)
    fours = zeros + (first + tl.arange(0, FEATURES // 4))[None, :]
    a, b, c, d = tl.philox(seed, fours, zeros + row[:, None].to(tl.int32), zeros, zeros)
    word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def round_to_even(value):
    """Round to the nearest integer, ties to even: adding 2^23 leaves no bits for a fraction, and all larger floats are
    integers.

    Triton's own rounding is a library call, which its interpreter lacks.
    """
    magnitude = tl.abs(value)
    whole = tl.where(magnitude < 8388608.0, (magnitude + 8388608.0) - 8388608.0, magnitude)
    return tl.where(value < 0, -whole, whole)
