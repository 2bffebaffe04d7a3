"""Quantization of rows, of one matrix or many at once; a program a tile of rows."""

import torch
import triton
import triton.language as tl

from outlier_kernels.formats import Quantizer
from outlier_kernels.reference_integers import Quantized

ALIGNMENT = 16  # bytes that one load of a thread takes, if rows begin at multiples of them
ENTRIES = 2048  # of a tile
WIDEST = 4096  # features that the registers of one program hold
FEATURES = 32  # of a tile of a transposed matrix, whose rows lie side by side
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def is_int8(quantizer: Quantizer | None) -> bool:
    """Whether the kernels make its codes: those of rows, or of everything."""
    return quantizer is not None and quantizer.format == "int8" and quantizer.group is None


def serves(matrix: torch.Tensor, quantizer: Quantizer | None) -> bool:
    """Whether `quantize` takes a matrix."""
    return is_int8(quantizer) and matrix.dtype in DTYPES and matrix.numel() > 0


def quantize(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """`reference.quantize` to int8, see `quantize_rows`."""
    with torch.cuda.device_of(matrix):  # Triton launches on the current device, whatever the tensors are on
        return quantize_rows(matrix, quantizer.symmetric, quantizer.per_row)


def quantize_rows(
    matrices: torch.Tensor,
    symmetric: bool = True,
    per_row: bool = True,
    left_out: torch.Tensor | None = None,
    seed: int | None = None,
) -> Quantized:
    """Codes of (..., m, k), int8, bit for bit those of the reference, but a NaN has some code, not none (its scale is
    NaN or inf).

    They are the first columns of matrices that are padded with zeros to a multiple of 16 features, which the product
    needs for wide loads.

    Args:
        matrices: float16, bfloat16 or float32, of any strides.
        symmetric: absmax, else zeropoint.
        per_row: one scale for every row, else one for the whole matrix, of which there is one.
        left_out: int8 (..., k), 1 for features that are left out: no range includes them, and their codes are 0.
        seed: of absmax codes that are rounded by chance, see `reference_products.quantize_rows`.
    """
    four = as_four(matrices)
    batches, heads, rows, features = four.shape
    leading, padded = matrices.shape[:-1], triton.cdiv(features, ALIGNMENT) * ALIGNMENT
    codes = matrices.new_empty(*leading, padded, dtype=torch.int8)
    scale = matrices.new_empty(*(leading if per_row else (1,)), 1, dtype=torch.float32)
    zero_point, code_sums = (None, None) if symmetric else (torch.empty_like(scale), scale.new_empty(*leading, 1))
    limits = None if per_row else _limits(matrices, left_out)
    width = min(triton.next_power_of_2(padded), WIDEST) if four.stride(3) == 1 else FEATURES
    height = max(1, ENTRIES // width)
    quantize_tile[(batches * heads * triton.cdiv(rows, height),)](
        *(four, left_out, limits, codes, scale, zero_point, code_sums, seed),
        *(heads, rows, features, padded, *four.stride()),
        0 if left_out is None or left_out.ndim == 1 else features,
        ROWS=height,
        FEATURES=width,
        enable_fp_fusion=False,  # a fused multiply and add would not round the product, as torch does
    )
    return Quantized(codes[..., :features], scale, zero_point, code_sums)


def as_four(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices (..., m, k) as (batches, heads, m, k)."""
    if matrices.ndim > 4:
        return matrices.flatten(0, -4)
    return matrices[(None,) * (4 - matrices.ndim)]


def _limits(matrix: torch.Tensor, left_out: torch.Tensor | None) -> torch.Tensor:
    """Smallest and largest element that is not left out, float32 (2,)."""
    if left_out is None:
        return torch.stack(matrix.aminmax()).float()
    least, most = (matrix.masked_fill(left_out.bool(), limit) for limit in (torch.inf, -torch.inf))
    return torch.stack([least.amin(), most.amax()]).float()


@triton.jit
def quantize_tile(
    matrices,
    left_out,
    limits,
    codes,
    scale,
    zero_point,
    code_sums,
    seed,
    heads,
    rows,
    features,
    padded,
    batch_stride,
    head_stride,
    row_stride,
    feature_stride,
    left_out_stride,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    tiles_of_one = tl.cdiv(rows, ROWS)
    matrix = (tl.program_id(0) // tiles_of_one).to(tl.int64)
    row = tl.program_id(0) % tiles_of_one * ROWS + tl.arange(0, ROWS)
    matrices += matrix // heads * batch_stride + matrix % heads * head_stride
    matrices += row[:, None].to(tl.int64) * row_stride
    inside, place = row < rows, matrix * rows + row
    if left_out is not None:
        left_out += matrix * left_out_stride
    if limits is None:
        group = place
        low, high = find_limits(matrices, left_out, inside, features, feature_stride, ROWS, FEATURES)
    else:
        group, zeros = place * 0, tl.zeros((ROWS,), tl.float32)
        low, high = zeros + tl.load(limits), zeros + tl.load(limits + 1)
    # Where all features are left out nothing remains, which is quantized as zeros are.
    low, high = tl.where(high < low, 0.0, low), tl.where(high < low, 0.0, high)

    if zero_point is None:
        step = absmax_scale(tl.maximum(high, -low))
    else:
        # The range itself may be beyond the largest float, and its scale is at least the smallest normal one, 2^-126.
        dynamic_range = tl.div_rn(tl.zeros_like(low) + 127.0, high * 0.5 - low * 0.5)
        dynamic_range = tl.where(dynamic_range > 8.507059173023462e37, 8.507059173023462e37, dynamic_range)
        dynamic_range = tl.where(high - low == 0, 1.0, dynamic_range)
        zero = -round_to_even(dynamic_range * low) - 127
        step = tl.div_rn(tl.zeros_like(low) + 1.0, dynamic_range)
        tl.store(zero_point + group, zero, mask=inside)
    tl.store(scale + group, step, mask=inside)

    code_sum = tl.zeros((ROWS,), tl.float32)  # exact: LARGEST_K · 127 < 2^24
    for start in range(0, padded, FEATURES):
        feature = start + tl.arange(0, FEATURES)
        # From the cache, which read the row to find the limits.
        value, inlier = load_inliers(matrices, left_out, inside, feature, features, feature_stride)
        if zero_point is not None:
            code = round_to_even(value * dynamic_range[:, None]) + zero[:, None]
        else:
            quotient = tl.div_rn(value, tl.zeros_like(value) + step[:, None])
            if seed is None:
                code = round_to_even(quotient)
            else:
                code = tl.floor(quotient + chances(seed, place, start // 4, ROWS, FEATURES))
        code = tl.where(inlier, tl.minimum(tl.maximum(code, -127.0), 127.0), 0.0)
        address = codes + place[:, None] * padded + feature[None, :]
        tl.store(address, code.to(tl.int8), mask=inside[:, None] & (feature < padded)[None, :])
        code_sum += tl.sum(code, axis=1)
    if zero_point is not None:
        tl.store(code_sums + place, code_sum, mask=inside)


@triton.jit
def absmax_scale(largest):
    """`reference_integers.absmax_scale`, at least 2^-126."""
    scale = tl.div_rn(largest, tl.zeros_like(largest) + 127.0)
    return tl.where(largest == 0, 1.0, tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale))


@triton.jit
def find_limits(matrices, left_out, inside, features, feature_stride, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """Smallest and largest inlier of rows; both NaN if one is, which the hardware's minimum and maximum pass over."""
    low = tl.full((ROWS,), float("inf"), tl.float32)
    high = tl.full((ROWS,), float("-inf"), tl.float32)
    nans = tl.zeros((ROWS,), tl.int32)
    for start in range(0, features, FEATURES):
        feature = start + tl.arange(0, FEATURES)
        value, inlier = load_inliers(matrices, left_out, inside, feature, features, feature_stride)
        nans += tl.sum((value != value).to(tl.int32), axis=1)
        low = tl.minimum(low, tl.min(tl.where(inlier, value, float("inf")), axis=1))
        high = tl.maximum(high, tl.max(tl.where(inlier, value, float("-inf")), axis=1))
    return tl.where(nans > 0, float("nan"), low), tl.where(nans > 0, float("nan"), high)


@triton.jit
def load_inliers(matrices, left_out, inside, feature, features, feature_stride):
    """Values of some rows and features in float32, 0 for those that are left out, and which are not."""
    kept = feature < features
    if left_out is not None:
        kept &= tl.load(left_out + feature, mask=kept, other=1) == 0
    inlier = inside[:, None] & kept[None, :]
    address = matrices + feature[None, :].to(tl.int64) * feature_stride
    return tl.load(address, mask=inlier, other=0).to(tl.float32), inlier


@triton.jit
def chances(seed, row, first, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """`reference_products.chances` of rows, from the feature 4 · first on: float32 (ROWS, FEATURES)."""
    zeros = tl.zeros((ROWS, FEATURES // 4), tl.int32)
    fours = zeros + (first + tl.arange(0, FEATURES // 4))[None, :]
    a, b, c, d = tl.philox(seed, fours, zeros + row[:, None].to(tl.int32), zeros, zeros)
    word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def round_to_even(value):
    """The nearest whole number, ties to even: adding 2^23 leaves no bits for a fraction, and all floats from there on
    are whole. (Triton's own rounding is a library call, which its interpreter does not have.)"""
    magnitude = tl.abs(value)
    whole = tl.where(magnitude < 8388608.0, (magnitude + 8388608.0) - 8388608.0, magnitude)
    return tl.where(value < 0, -whole, whole)
