"""The projections of all experts of a layer as one int8 product: each row with the weight of its expert.

Rows are sorted by expert. How many each expert has is known only on the device, so the grid has a tile of rows for the
most that there can be, and each program finds its expert, or ends.
"""

import torch
import triton
import triton.language as tl

from outlier_kernels.reference import LARGEST_K
from outlier_kernels.reference_integers import Quantized
from outlier_kernels.states import DTYPES
from outlier_kernels.triton import has_int8_units, launch, tiles
from outlier_kernels.triton.product import LEAST_COLUMNS, LEAST_DEPTH, aligned, sum_codes
from outlier_kernels.triton.quantization import quantize_rows


def serves(rows: torch.Tensor, weight: Quantized) -> bool:
    """Return whether `grouped_linear` takes rows and weights: int8 with absmax."""
    return (
        weight.codes.dtype == torch.int8
        and weight.zero_point is None
        and rows.dtype in DTYPES
        and 0 < rows.shape[1] <= LARGEST_K
        and rows.numel() > 0
        and has_int8_units(rows.device)
    )


def grouped_linear(
    rows: torch.Tensor, ends: torch.Tensor, weight: Quantized, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute `reference.grouped_linear` in two launches, without synchronizing host and device."""
    n, (experts, outputs, _) = len(rows), weight.codes.shape
    quantized = quantize_rows(rows, buffer=0)
    padded, result = quantized.codes.stride(0), rows.new_empty(n, outputs)
    tile = tiles.choose(experts, triton.cdiv(n, experts), outputs, rows.itemsize <= 2, rows.device)
    tile = tile._replace(
        columns=min(tile.columns, max(LEAST_COLUMNS, triton.next_power_of_2(outputs))),
        depth=min(tile.depth, max(LEAST_DEPTH, triton.next_power_of_2(padded))),
    )
    grid = triton.cdiv(n, tile.rows) + min(n, experts), triton.cdiv(outputs, tile.columns)
    of_experts = aligned(weight.codes, padded), weight.scale.contiguous(), None if bias is None else bias.contiguous()
    launch(
        *(multiply_grouped, grid, quantized.codes, quantized.scale, of_experts, ends, result),
        (experts, outputs, padded),
        **tile.blocks,
        EXPERTS=triton.next_power_of_2(experts),
        WHOLE=padded % tile.depth == 0,
    )
    return result


@triton.jit
def multiply_grouped(
    codes,
    scale,
    of_experts,
    ends,
    result,
    sizes,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    other_codes, other_scale, bias = of_experts
    experts, columns, padded = sizes
    number = tl.arange(0, EXPERTS)
    there = number < experts
    end = tl.load(ends + number, mask=there, other=0).to(tl.int32)
    start = tl.load(ends + number - 1, mask=there & (number > 0), other=0).to(tl.int32)
    tiles_of = tl.where(there, (end - start + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    tiles_up_to = tl.cumsum(tiles_of, 0)
    expert = tl.sum((there & (tiles_up_to <= tl.program_id(0))).to(tl.int32))
    if expert < experts:
        mine = number == expert
        tile = tl.program_id(0) - tl.sum(tl.where(mine, tiles_up_to - tiles_of, 0))
        last = tl.sum(tl.where(mine, end, 0))
        first_row = tl.sum(tl.where(mine, start, 0)) + tile * BLOCK_ROWS
        first_column = tl.program_id(1) * BLOCK_COLUMNS
        tile_row, tile_column = first_row + tl.arange(0, BLOCK_ROWS), first_column + tl.arange(0, BLOCK_COLUMNS)
        # Beyond the edge the last row is computed again, because loads without masks stay wide.
        row = tl.minimum(tile_row, last - 1).to(tl.int64)
        column = expert.to(tl.int64) * columns + tl.minimum(tile_column, columns - 1)
        left, right = codes + row[:, None] * padded, other_codes + column[None, :] * padded
        sums = sum_codes(left, right, padded, BLOCK_DEPTH, WHOLE)
        value = sums.to(tl.float32) * tl.load(scale + row)[:, None] * tl.load(other_scale + column)[None, :]
        if bias is not None:
            value += tl.load(bias + column).to(tl.float32)[None, :]
        stored = (tile_row < last)[:, None] & (tile_column < columns)[None, :]
        place = tile_row[:, None].to(tl.int64) * columns + tile_column[None, :]
        tl.store(result + place, value.to(result.dtype.element_ty), mask=stored)
