"""The int8 product, with everything that follows it in the same kernel."""

import torch
import triton
import triton.language as tl

from outlier_kernels.reference import Quantized
from outlier_kernels.triton import tiles
from outlier_kernels.triton.outlier_features import Outliers


def multiply(
    quantized: Quantized,
    weight: Quantized,
    bias: torch.Tensor | None,
    hidden_states: torch.Tensor,
    outliers: Outliers | None,
) -> torch.Tensor:
    """Dequantized product (tokens, outputs) of codes that are 0 in outlier features, from `quantize`, plus that of the
    outliers: hidden states (tokens, features), in their precision, with the dequantized weights."""
    tokens, features = hidden_states.shape
    outputs, padded = len(weight.codes), quantized.codes.stride(0)
    output = hidden_states.new_empty(tokens, outputs)
    light = quantized.zero_point is None and hidden_states.itemsize == 2
    tile = tiles.choose(tokens, light, hidden_states.device)
    small = [None if part is None else part.contiguous() for part in (*weight[1:], bias)]
    # A scale and a zero point of the whole matrix are read by every row.
    strides = int(len(quantized.scale) > 1), int(len(weight.scale) > 1), *hidden_states.stride()
    of_outliers = outliers[1:] if outliers else (None, None)
    operands = *quantized, _aligned(weight.codes, padded), *small, hidden_states, *of_outliers, output
    product[triton.cdiv(tokens, tile.rows), triton.cdiv(outputs, tile.columns)](
        *operands,
        *(tokens, outputs, features, padded),
        *strides,
        **tile.blocks,
        BLOCK_OUTLIERS=16,
        WHOLE=padded % tile.depth == 0,
        # A 16-bit float and a code have no more digits than TF32, which multiplies them exactly.
        PRECISION="tf32x3" if hidden_states.dtype == torch.float32 else "tf32",
    )
    return output


def _aligned(codes: torch.Tensor, padded: int) -> torch.Tensor:
    """Codes (outputs, features) whose rows are `padded` apart, copied unless they are.

    What is behind the features does not matter, for the activations' codes are 0 there; but it has to be memory.
    """
    end = codes.storage_offset() + len(codes) * padded
    if codes.stride() == (padded, 1) and end <= codes.untyped_storage().nbytes():
        return codes
    return torch.nn.functional.pad(codes, (0, padded - codes.shape[1])).contiguous()


@triton.jit
def product(
    codes,
    scale,
    zero_point,
    code_sums,
    weight_codes,
    weight_scale,
    weight_zero_point,
    weight_code_sums,
    bias,
    hidden_states,
    indices,
    count,
    output,
    tokens,
    outputs,
    features,
    padded,
    scale_stride,
    weight_scale_stride,
    token_stride,
    feature_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_OUTLIERS: tl.constexpr,
    WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # Programs that run together share columns of the weight, the larger operand.
    first_row, first_column = tl.program_id(0) * BLOCK_ROWS, tl.program_id(1) * BLOCK_COLUMNS
    tile_row, tile_column = tl.arange(0, BLOCK_ROWS), tl.arange(0, BLOCK_COLUMNS)
    # Beyond the edge the last row is computed again: without masks the loads below stay wide.
    row = tl.minimum(first_row + tile_row, tokens - 1).to(tl.int64)
    column = tl.minimum(first_column + tile_column, outputs - 1).to(tl.int64)
    inputs = hidden_states + row[:, None] * token_stride
    weights = weight_codes + column[None, :] * padded

    sums = multiply_codes(codes + row[:, None] * padded, weights, padded, BLOCK_DEPTH, WHOLE)
    step = tl.load(scale + row * scale_stride)
    if zero_point is None:
        value = sums.to(tl.float32) * step[:, None]
    else:
        inliers = features
        weight_sum = tl.load(weight_code_sums + column)
        weight_zero = tl.load(weight_zero_point + column * weight_scale_stride)
        if indices is not None:
            inliers -= tl.load(count)
            outlier_sum, input_sum = sum_outliers(inputs, weights, indices, count, feature_stride, BLOCK_OUTLIERS)
            weight_sum -= outlier_sum
        # Products of zero points outgrow int32 where a range is far from 0; in float64 all of this is exact to 2^53.
        zero = tl.load(zero_point + row * scale_stride).to(tl.float64)
        shift = inliers * zero - tl.load(code_sums + row)
        value = sums + shift[:, None] * weight_zero[None, :].to(tl.float64)
        value -= zero[:, None] * weight_sum[None, :].to(tl.float64)
        value = value.to(tl.float32) * step[:, None]
        if indices is not None:
            value -= input_sum[:, None] * weight_zero[None, :]
    if indices is not None:
        value = add_outliers(value, inputs, weights, indices, count, feature_stride, BLOCK_OUTLIERS, PRECISION)
    value *= tl.load(weight_scale + column * weight_scale_stride)[None, :]
    if bias is not None:
        value += tl.load(bias + column).to(tl.float32)[None, :]
    stored = (tile_row < tokens - first_row)[:, None] & (tile_column < outputs - first_column)[None, :]
    output += first_row.to(tl.int64) * outputs + first_column
    output += tile_row[:, None] * outputs + tile_column[None, :]
    tl.store(output, value.to(output.dtype.element_ty), mask=stored)


@triton.jit
def multiply_codes(codes, weights, padded, BLOCK_DEPTH: tl.constexpr, WHOLE: tl.constexpr):
    """Exact int32 sums; codes: pointers (rows, 1), weights: pointers (1, columns), both with `padded` features."""
    feature = tl.arange(0, BLOCK_DEPTH)
    codes += feature[None, :]
    weights += feature[:, None]
    sums = tl.zeros((codes.shape[0], weights.shape[1]), tl.int32)
    for start in range(0, padded, BLOCK_DEPTH):
        if WHOLE:
            sums = tl.dot(tl.load(codes), tl.load(weights), sums, out_dtype=tl.int32)
        else:
            inside = feature < padded - start
            left = tl.load(codes, mask=inside[None, :], other=0)
            right = tl.load(weights, mask=inside[:, None], other=0)
            sums = tl.dot(left, right, sums, out_dtype=tl.int32)
        codes += BLOCK_DEPTH
        weights += BLOCK_DEPTH
    return sums


@triton.jit
def sum_outliers(inputs, weights, indices, count, feature_stride, BLOCK_OUTLIERS: tl.constexpr):
    """Sums over the outlier features of the weights' codes, int32 (columns,), and of the inputs, float32 (rows,)."""
    weight_sum = tl.zeros((weights.shape[1],), tl.int32)
    input_sum = tl.zeros((inputs.shape[0],), tl.float32)
    for start in tl.range(0, tl.load(count), BLOCK_OUTLIERS, num_stages=1):
        left, right = load_outliers(inputs, weights, indices, count, start, feature_stride, BLOCK_OUTLIERS)
        input_sum += tl.sum(left, axis=1)
        weight_sum += tl.sum(right.to(tl.int32), axis=0)
    return weight_sum, input_sum


@triton.jit
def add_outliers(
    value, inputs, weights, indices, count, feature_stride, BLOCK_OUTLIERS: tl.constexpr, PRECISION: tl.constexpr
):
    """`value` plus the product of the inputs and the weights' codes over the outlier features."""
    for start in tl.range(0, tl.load(count), BLOCK_OUTLIERS, num_stages=1):
        left, right = load_outliers(inputs, weights, indices, count, start, feature_stride, BLOCK_OUTLIERS)
        value = tl.dot(left, right.to(tl.float32), value, input_precision=PRECISION)
    return value


@triton.jit
def load_outliers(inputs, weights, indices, count, start, feature_stride, BLOCK_OUTLIERS: tl.constexpr):
    """Inputs, float32 (rows, outliers), and the weights' codes, int8 (outliers, columns), of some outlier features."""
    position = start + tl.arange(0, BLOCK_OUTLIERS)
    listed = position < tl.load(count)
    feature = tl.load(indices + position, mask=listed, other=0)
    offset = feature.to(tl.int64) * feature_stride
    left = tl.load(inputs + offset[None, :], mask=listed[None, :], other=0).to(tl.float32)
    return left, tl.load(weights + feature[:, None], mask=listed[:, None], other=0)
