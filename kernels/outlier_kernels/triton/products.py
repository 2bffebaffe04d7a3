"""Products whose operands are both quantized when they meet, of one matrix or many at once."""

import torch
import triton
import triton.language as tl

from outlier_kernels import reference_products
from outlier_kernels.reference import LARGEST_K
from outlier_kernels.triton import tiles
from outlier_kernels.triton.product import multiply_codes
from outlier_kernels.triton.quantization import ALIGNMENT, DTYPES, absmax_scale, round_to_even

ENTRIES = 2048  # of a tile that is quantized at once
FEATURES = 32  # of a tile of a transposed matrix, whose rows lie side by side
LEAST_DEPTH, LEAST_COLUMNS = 32, 16  # what int8 units take


def serves(*operands: torch.Tensor) -> bool:
    """Whether the kernels read these operands."""
    return all(
        operand.dtype in DTYPES and operand.numel() > 0 and operand.shape[-1] <= LARGEST_K for operand in operands
    )


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    outliers: torch.Tensor | None = None,
    exact: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """`reference_products.product` without synchronising host and device: codes and sums bit for bit, outputs but for
    the order in which outliers are added up."""
    with torch.cuda.device_of(left):  # Triton launches on the current device, whatever the tensors are on
        of_left, of_right = quantize_rows(left, outliers, seed), quantize_rows(right, outliers)
        result = _multiply(*of_left, *of_right, left, right, outliers)
    if exact is not None:
        reference_products.put_columns(result, left, right, exact)
    return result


def quantize_rows(
    matrices: torch.Tensor, outliers: torch.Tensor | None = None, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference_products.quantize_rows` of (..., m, k): codes, int8 (matrices, m, padded) with zeros up to a multiple
    of 16 features, and scales, float32 (matrices, m)."""
    four = _as_four(matrices)
    batches, heads, rows, features = four.shape
    padded = triton.cdiv(features, ALIGNMENT) * ALIGNMENT
    codes = matrices.new_empty(batches * heads, rows, padded, dtype=torch.int8)
    scale = matrices.new_empty(batches * heads, rows, dtype=torch.float32)
    flags = None if outliers is None else reference_products.flags_of(outliers, features).to(torch.int8)
    width = FEATURES if four.stride(3) != 1 else min(triton.next_power_of_2(padded), ENTRIES // 4)
    height = ENTRIES // width
    # A fused multiply and add would not round the quotient.
    quantize_tile[(batches * heads * triton.cdiv(rows, height),)](
        *(four, flags, codes, scale, seed),
        *(heads, rows, features, padded),
        *four.stride(),
        0 if flags is None or flags.ndim == 1 else features,
        ROWS=height,
        FEATURES=width,
        enable_fp_fusion=False,
    )
    return codes, scale


def _as_four(matrices: torch.Tensor) -> torch.Tensor:
    """Matrices (..., m, k) as (batches, heads, m, k)."""
    if matrices.ndim > 4:
        return matrices.flatten(0, -4)
    return matrices[(None,) * (4 - matrices.ndim)]


def _multiply(
    codes: torch.Tensor,
    scale: torch.Tensor,
    other_codes: torch.Tensor,
    other_scale: torch.Tensor,
    left: torch.Tensor,
    right: torch.Tensor,
    outliers: torch.Tensor | None,
) -> torch.Tensor:
    """Dequantized products, plus those of the outliers as they are: (..., m, n) in the dtype of `left`."""
    result = left.new_empty(*left.shape[:-1], right.shape[-2])
    (matrices, m, padded), n = codes.shape, result.shape[-1]
    four, other_four = _as_four(left), _as_four(right)
    light = left.itemsize == right.itemsize == 2
    tile = tiles.choose(m, light, left.device)
    tile = tile._replace(
        columns=min(tile.columns, max(LEAST_COLUMNS, triton.next_power_of_2(n))),
        depth=min(tile.depth, max(LEAST_DEPTH, triton.next_power_of_2(padded))),
    )
    count = 0 if outliers is None else outliers.shape[-1]
    places = None if outliers is None else outliers.contiguous()
    multiply_rows[matrices * triton.cdiv(m, tile.rows), triton.cdiv(n, tile.columns)](
        *(codes, scale, other_codes, other_scale, four, other_four, places, result),
        *(four.shape[1], m, n, padded, count),
        0 if outliers is None or outliers.ndim == 1 else count,
        *four.stride(),
        *other_four.stride(),
        **tile.blocks,
        BLOCK_OUTLIERS=16,
        WHOLE=padded % tile.depth == 0,
        # A 16-bit float has no more digits than TF32, which multiplies them exactly.
        PRECISION="tf32" if light else "tf32x3",
    )
    return result


@triton.jit
def quantize_tile(
    matrices,
    flags,
    codes,
    scale,
    seed,
    heads,
    rows,
    features,
    padded,
    batch_stride,
    head_stride,
    row_stride,
    feature_stride,
    flags_stride,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    tiles_of_one = tl.cdiv(rows, ROWS)
    matrix = (tl.program_id(0) // tiles_of_one).to(tl.int64)
    row = tl.program_id(0) % tiles_of_one * ROWS + tl.arange(0, ROWS)
    matrices += matrix // heads * batch_stride + matrix % heads * head_stride
    matrices += row[:, None].to(tl.int64) * row_stride
    inside = row < rows
    if flags is not None:
        flags += matrix * flags_stride

    largest = tl.zeros((ROWS,), tl.float32)
    nans = tl.zeros((ROWS,), tl.int32)
    for start in range(0, features, FEATURES):
        feature = start + tl.arange(0, FEATURES)
        value = load_tile(matrices, flags, inside, feature, features, feature_stride)
        largest = tl.maximum(largest, tl.max(tl.abs(value), axis=1))
        nans += tl.sum((value != value).to(tl.int32), axis=1)
    step = absmax_scale(tl.where(nans > 0, float("nan"), largest))
    place = matrix * rows + row
    tl.store(scale + place, step, mask=inside)

    for start in range(0, padded, FEATURES):
        feature = start + tl.arange(0, FEATURES)
        value = load_tile(matrices, flags, inside, feature, features, feature_stride)
        quotient = tl.div_rn(value, tl.zeros_like(value) + step[:, None])
        if seed is None:
            code = round_to_even(quotient)
        else:
            chance = chances(seed, place, start // 4, ROWS, FEATURES)
            code = tl.floor(quotient + tl.where(value == 0, 0.0, chance))
        code = tl.minimum(tl.maximum(code, -127.0), 127.0).to(tl.int8)
        address = codes + place[:, None] * padded + feature[None, :]
        tl.store(address, code, mask=inside[:, None] & (feature < padded)[None, :])


@triton.jit
def load_tile(matrices, flags, inside, feature, features, feature_stride):
    """Values of some rows and features in float32, 0 for those that are left out and beyond the edges."""
    kept = feature < features
    if flags is not None:
        kept &= tl.load(flags + feature, mask=kept, other=1) == 0
    address = matrices + feature[None, :].to(tl.int64) * feature_stride
    return tl.load(address, mask=inside[:, None] & kept[None, :], other=0).to(tl.float32)


@triton.jit
def chances(seed, row, first, ROWS: tl.constexpr, FEATURES: tl.constexpr):
    """`reference_products.chances` of rows, from the feature 4 · first on: float32 (ROWS, FEATURES)."""
    zeros = tl.zeros((ROWS, FEATURES // 4), tl.int32)
    fours = zeros + (first + tl.arange(0, FEATURES // 4))[None, :]
    a, b, c, d = tl.philox(seed, fours, zeros + row[:, None].to(tl.int32), zeros, zeros)
    word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08  # 2^-24


@triton.jit
def multiply_rows(
    codes,
    scale,
    other_codes,
    other_scale,
    left,
    right,
    outliers,
    result,
    heads,
    rows,
    columns,
    padded,
    count,
    outliers_stride,
    batch_stride,
    head_stride,
    row_stride,
    feature_stride,
    other_batch_stride,
    other_head_stride,
    other_row_stride,
    other_feature_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_OUTLIERS: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tiles_of_one = tl.cdiv(rows, BLOCK_ROWS)
    matrix = (tl.program_id(0) // tiles_of_one).to(tl.int64)
    first_row, first_column = tl.program_id(0) % tiles_of_one * BLOCK_ROWS, tl.program_id(1) * BLOCK_COLUMNS
    tile_row, tile_column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
    # Beyond the edge the last row is computed again: without masks the loads below stay wide.
    row = tl.minimum(first_row + tile_row, rows - 1).to(tl.int64)
    column = tl.minimum(first_column + tile_column, columns - 1).to(tl.int64)
    codes += (matrix * rows + row)[:, None] * padded
    other_codes += (matrix * columns + column)[None, :] * padded
    sums = multiply_codes(codes, other_codes, padded, BLOCK_DEPTH, WHOLE)
    value = sums.to(tl.float32) * tl.load(scale + matrix * rows + row)[:, None]
    value *= tl.load(other_scale + matrix * columns + column)[None, :]
    if outliers is not None:
        left += matrix // heads * batch_stride + matrix % heads * head_stride
        right += matrix // heads * other_batch_stride + matrix % heads * other_head_stride
        for start in tl.range(0, count, BLOCK_OUTLIERS, num_stages=1):
            position = start + tl.arange(0, BLOCK_OUTLIERS)
            place = tl.load(outliers + matrix * outliers_stride + position, mask=position < count, other=-1)
            is_place = place >= 0
            left_value = tl.load(
                left + row[:, None] * row_stride + place[None, :] * feature_stride, mask=is_place[None, :], other=0
            )
            right_value = tl.load(
                right + column[None, :] * other_row_stride + place[:, None] * other_feature_stride,
                mask=is_place[:, None],
                other=0,
            )
            value = tl.dot(left_value.to(tl.float32), right_value.to(tl.float32), value, input_precision=PRECISION)
    stored = (tile_row < rows - first_row)[:, None] & (tile_column < columns - first_column)[None, :]
    result += (matrix * rows + first_row) * columns + first_column
    result += tile_row[:, None] * columns + tile_column[None, :]
    tl.store(result, value.to(result.dtype.element_ty), mask=stored)
