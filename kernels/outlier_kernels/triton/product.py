"""The int8 product and everything that follows it in one kernel: for a layer, and for one or many matrices that are
both quantized for it."""

import torch
import triton
import triton.language as tl

from outlier_kernels import reference_products
from outlier_kernels.reference import LARGEST_K
from outlier_kernels.reference_integers import Quantized
from outlier_kernels.states import DTYPES
from outlier_kernels.triton import has_int8_units, launch, tiles
from outlier_kernels.triton.outlier_features import Outliers
from outlier_kernels.triton.quantization import as_four_dimensions, quantize_rows

LEAST_DEPTH, LEAST_COLUMNS = 32, 16  # smallest tile of int8 units


def serves(left: torch.Tensor, right: torch.Tensor, _outliers: torch.Tensor | None = None) -> bool:
    return has_int8_units(left.device) and all(
        operand.dtype in DTYPES and operand.numel() > 0 and operand.shape[-1] <= LARGEST_K for operand in (left, right)
    )


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    outliers: torch.Tensor | None = None,
    exact_columns: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """Compute `reference_products.product` without synchronizing host and device: codes and sums bit for bit, outputs
    up to the order in which outliers are added."""
    left_out = listed = None
    if outliers is not None:
        left_out = reference_products.flags_of(outliers, left.shape[-1]).to(torch.int8)
        listed = Outliers(left_out, outliers.contiguous())
    left_codes, right_codes = quantize_rows(left, left_out=left_out, seed=seed), quantize_rows(right, left_out=left_out)
    result = multiply(left_codes, right_codes, left, right, listed)
    if exact_columns is not None:
        reference_products.put_columns(result, left, right, exact_columns)
    return result


def multiply(
    left_codes: Quantized,
    right_codes: Quantized,
    left: torch.Tensor,
    right: torch.Tensor,
    outliers: Outliers | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute left · rightᵀ from codes by `quantize_rows` that are 0 in outlier features, dequantized, plus the product
    of the outliers.

    Args:
        left_codes, right_codes: the codes of (..., m, k) and (..., n, k); with zero points only for a single matrix.
            The buffer of the left codes may have more rows than m.
        left: values of outliers in their precision: float (..., m, k).
        right: the outliers' factors: float (..., n, k), or the codes of `right_codes` for all features, to which its
            scales are applied.
        outliers: the outlier features of each matrix; None for none.
        bias: (n,).

    Returns:
        (..., m, n) in the dtype of `left`.
    """
    (m, features), n, padded = left.shape[-2:], right.shape[-2], left_codes.codes.stride(-2)
    result = left.new_empty(*left.shape[:-1], n)
    four, other_four = as_four_dimensions(left), as_four_dimensions(right)
    matrices, heads = four.shape[:2].numel(), four.shape[1]
    few_digits = left.itemsize <= 2 and right.itemsize <= 2
    tile = tiles.choose(matrices, m, n, few_digits and left_codes.zero_point is None, left.device)
    tile = tile._replace(
        columns=min(tile.columns, max(LEAST_COLUMNS, triton.next_power_of_2(n))),
        depth=min(tile.depth, max(LEAST_DEPTH, triton.next_power_of_2(padded))),
    )
    small = [None if part is None else part.contiguous() for part in (*right_codes[1:], bias)]
    places, count = (None, None) if outliers is None else (outliers.places, outliers.count)
    most = 0 if places is None else places.shape[-1]
    from_list_to_list = 0 if places is None or places.ndim == 1 else most
    grid = matrices * triton.cdiv(m, tile.rows), triton.cdiv(n, tile.columns)
    launch(
        *(multiply_codes, grid, four, other_four, tuple(left_codes), (aligned(right_codes.codes, padded), *small)),
        *(places, count, result, None if matrices == 1 else heads, (m, n, features, padded, most, from_list_to_list)),
        # A stride of 0 makes every row read the scale and zero point of the whole matrix.
        *((int(left_codes.scale.numel() > 1), int(right_codes.scale.numel() > 1)), four.stride(), other_four.stride()),
        **tile.blocks,
        BLOCK_OUTLIERS=16,
        WHOLE=padded % tile.depth == 0,
        PRECISION=precision(few_digits),
    )
    return result


def precision(few_digits: bool) -> str:
    """Return the precision for products of outliers: a 16-bit float and a code fit TF32, which multiplies them
    exactly."""
    return "tf32" if few_digits else "tf32x3"


def aligned(codes: torch.Tensor, padded: int) -> torch.Tensor:
    """Return codes (..., rows, features) with rows `padded` apart, copied only if necessary.

    The values behind the features do not matter, because the other codes are 0 there, but they must be valid memory.
    """
    end = codes.storage_offset() + codes[..., 0].numel() * padded
    if codes.stride()[-2:] == (padded, 1) and end <= codes.untyped_storage().nbytes():
        return codes
    return torch.nn.functional.pad(codes, (0, padded - codes.shape[-1])).contiguous()


@triton.jit
def multiply_codes(
    left,
    right,
    left_codes,
    right_codes,
    places,
    count,
    result,
    heads,
    sizes,
    scale_strides,
    strides,
    other_strides,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_OUTLIERS: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    codes, scale, zero_point, code_sums = left_codes
    other_codes, other_scale, other_zero_point, other_code_sums, bias = right_codes
    rows, columns, features, padded, most, places_stride = sizes
    scale_stride, other_scale_stride = scale_strides
    feature_strides = strides[3], other_strides[3]
    # Concurrent programs share columns of the right operand, the larger one in a layer.
    tiles_of_one = tl.cdiv(rows, BLOCK_ROWS)
    first_row, first_column = tl.program_id(0) % tiles_of_one * BLOCK_ROWS, tl.program_id(1) * BLOCK_COLUMNS
    tile_row, tile_column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
    # Beyond the edge the last row is computed again, because loads without masks stay wide.
    row = tl.minimum(first_row + tile_row, rows - 1).to(tl.int64)
    column = tl.minimum(first_column + tile_column, columns - 1).to(tl.int64)
    left += row[:, None] * strides[2]
    right += column[None, :] * other_strides[2]
    if heads is not None:  # for a single matrix these numbers would waste registers
        matrix = (tl.program_id(0) // tiles_of_one).to(tl.int64)
        left += matrix // heads * strides[0] + matrix % heads * strides[1]
        right += matrix // heads * other_strides[0] + matrix % heads * other_strides[1]
        row, column = matrix * rows + row, matrix * columns + column
        result += matrix * rows * columns
        if places is not None:
            places += matrix * places_stride
    number = most
    if count is not None:
        number = tl.load(count)

    sums = sum_codes(codes + row[:, None] * padded, other_codes + column[None, :] * padded, padded, BLOCK_DEPTH, WHOLE)
    step = tl.load(scale + row * scale_stride)
    if zero_point is None:
        value = sums.to(tl.float32) * step[:, None]
    else:
        inliers = features
        other_sum = tl.load(other_code_sums + column)
        other_zero = tl.load(other_zero_point + column * other_scale_stride)
        if places is not None:
            inliers -= number
            if right.dtype.element_ty == tl.int8:
                outlier_sum, input_sum = sum_outliers(left, right, places, number, feature_strides, BLOCK_OUTLIERS)
                other_sum -= outlier_sum
        zero, code_sum = tl.load(zero_point + row * scale_stride), tl.load(code_sums + row)
        value = add_zero_points(sums, inliers, zero, code_sum, other_zero, other_sum) * step[:, None]
        if places is not None:  # noqa: SIM102 - the compiler knows each condition
            if right.dtype.element_ty == tl.int8:
                value -= input_sum[:, None] * other_zero[None, :]
    # The outliers' factors include the scales, unless they are codes.
    if right.dtype.element_ty != tl.int8:
        value *= tl.load(other_scale + column * other_scale_stride)[None, :]
    if places is not None:
        for start in tl.range(0, number, BLOCK_OUTLIERS, num_stages=1):
            inputs, weights = load_outliers(left, right, places, number, start, feature_strides, BLOCK_OUTLIERS)
            value = tl.dot(inputs, weights.to(tl.float32), value, input_precision=PRECISION)
    if right.dtype.element_ty == tl.int8:
        value *= tl.load(other_scale + column * other_scale_stride)[None, :]
    if bias is not None:
        value += tl.load(bias + column).to(tl.float32)[None, :]
    stored = (tile_row < rows - first_row)[:, None] & (tile_column < columns - first_column)[None, :]
    result += first_row.to(tl.int64) * columns + first_column
    result += tile_row[:, None] * columns + tile_column[None, :]
    tl.store(result, value.to(result.dtype.element_ty), mask=stored)


@triton.jit
def add_zero_points(sums, inliers, zero, code_sum, other_zero, other_sum):
    """Add the terms of zero points to sums of codes and round once.

    inliers: the number of features that are no outliers. zero, code_sum: the zero point and the sum of codes of each
    row, other_zero, other_sum of each column. Products of zero points outgrow int32 for ranges far from 0; in float64
    the result is exact up to 2^53.
    """
    zero = zero.to(tl.float64)
    value = sums + (inliers * zero - code_sum)[:, None] * other_zero[None, :].to(tl.float64)
    value -= zero[:, None] * other_sum[None, :].to(tl.float64)
    return value.to(tl.float32)


@triton.jit
def sum_codes(codes, other_codes, padded, BLOCK_DEPTH: tl.constexpr, WHOLE: tl.constexpr):
    """Compute exact int32 sums. codes: pointers (rows, 1). other_codes: pointers (1, columns). Both have `padded`
    features."""
    feature = tl.arange(0, BLOCK_DEPTH)
    codes += feature[None, :]
    other_codes += feature[:, None]
    sums = tl.zeros((codes.shape[0], other_codes.shape[1]), tl.int32)
    for start in range(0, padded, BLOCK_DEPTH):
        if WHOLE:
            sums = tl.dot(tl.load(codes), tl.load(other_codes), sums, out_dtype=tl.int32)
        else:
            inside = feature < padded - start
            left_codes = tl.load(codes, mask=inside[None, :], other=0)
            right_codes = tl.load(other_codes, mask=inside[:, None], other=0)
            sums = tl.dot(left_codes, right_codes, sums, out_dtype=tl.int32)
        codes += BLOCK_DEPTH
        other_codes += BLOCK_DEPTH
    return sums


@triton.jit
def sum_outliers(left, right, places, number, feature_strides, BLOCK_OUTLIERS: tl.constexpr):
    """Return two sums over the outlier features, for the terms of zero points: of the right codes, int32 (columns,),
    and of the inputs, float32 (rows,)."""
    other_sum = tl.zeros((right.shape[1],), tl.int32)
    input_sum = tl.zeros((left.shape[0],), tl.float32)
    for start in tl.range(0, number, BLOCK_OUTLIERS, num_stages=1):
        inputs, weights = load_outliers(left, right, places, number, start, feature_strides, BLOCK_OUTLIERS)
        input_sum += tl.sum(inputs, axis=1)
        other_sum += tl.sum(weights.to(tl.int32), axis=0)
    return other_sum, input_sum


@triton.jit
def load_outliers(left, right, places, number, start, feature_strides, BLOCK_OUTLIERS: tl.constexpr):
    """Load inputs, float32 (rows, outliers), and their factors, (outliers, columns), of some outlier features."""
    position = start + tl.arange(0, BLOCK_OUTLIERS)
    place = tl.load(places + position, mask=position < number, other=-1)
    is_place = place >= 0
    inputs = tl.load(left + place[None, :].to(tl.int64) * feature_strides[0], mask=is_place[None, :], other=0)
    weights = tl.load(right + place[:, None] * feature_strides[1], mask=is_place[:, None], other=0)
    return inputs.to(tl.float32), weights
