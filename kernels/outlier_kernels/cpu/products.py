"""Products that quantize both of their operands, bit-identical to those of `reference_products`.

The passes read operands in their own dtype and layout, transposed ones in place, and convert outputs to the requested
dtype while their sums are in cache.
"""

from collections.abc import Iterator

import torch

from outlier_kernels import reference, reference_products
from outlier_kernels.cpu import all_passes
from outlier_kernels.cpu.compiled import KINDS

AT_ONCE = 1 << 18  # sums per chunk, which are finished before the next chunk
STRIP = 128  # rows of a transposed matrix at once
FEW = 64  # outliers up to which adding them one by one is as fast as torch's matrix product


def serves(left: torch.Tensor, right: torch.Tensor, outliers: torch.Tensor | None = None) -> bool:
    """Return whether the passes read these operands, and add this many outliers as fast as torch does."""
    few = outliers is None or outliers.shape[-1] <= FEW
    return few and all(operand.dtype in KINDS and operand.numel() > 0 for operand in (left, right))


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    outliers: torch.Tensor | None = None,
    exact_columns: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """Compute `reference_products.product`."""
    count = 0 if outliers is None else outliers.shape[-1]
    left, right = left.resolve_neg(), right.resolve_neg()
    of_left, row_scales = quantize_rows(left, outliers, seed)
    of_right, column_scales = quantize_rows(right, outliers)
    m, n = left.shape[-2], right.shape[-2]
    result = left.new_empty(*left.shape[:-1], n)
    outputs, row_scales, values = result.view(-1, n), row_scales.flatten(), None
    if count:
        values = _features(left, outliers).contiguous().view(-1, count)
        columns = _features(right, outliers).mT.contiguous().view(-1, count, n)
    for matrices, first, sums in _sums(of_left, of_right):
        rows = slice(matrices.start * m + first, matrices.start * m + first + sums.shape[0] * sums.shape[1])
        added = (None, None, 0) if values is None else (values[rows], columns[matrices], count)
        arguments = {"sums": sums, "rows": sums.shape[1], "scales": (row_scales[rows], column_scales[matrices])}
        all_passes().finish_products(rows.stop - rows.start, n, **arguments, outliers=added, result=outputs[rows])
    if exact_columns is not None:
        _put_columns(result, left, right, exact_columns)
    return result


def quantize_rows(
    matrices: torch.Tensor, outliers: torch.Tensor | None = None, seed: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `reference_products.quantize_rows` of (..., m, k): codes, int8 (matrices, m, k) in the memory order of
    the matrices, and scales, float32 (matrices, m)."""
    if 1 not in matrices.stride()[-2:]:
        matrices = matrices.contiguous()
    (m, k), places = matrices.shape[-2:], _places(matrices)
    scale = matrices.new_empty(len(places), m, dtype=torch.float32)
    flags = None if outliers is None else reference_products.flags_of(outliers, k).contiguous()
    left_out = flags, 0 if flags is None or flags.ndim == 1 else k
    arguments = {"places": places, "left_out": left_out, "chance": (seed is not None, seed), "scales": scale}
    if matrices.stride(-1) == 1:
        codes = scale.new_empty(len(places), m, k, dtype=torch.int8)
        all_passes().codes_by_row(len(places) * m, k, x=matrices, **arguments, codes=codes)
        return codes, scale
    codes, strip = scale.new_empty(len(places), k, m, dtype=torch.int8), min(STRIP, m)
    strips = -(-m // strip) * len(places)
    all_passes().codes_by_column(strips, strip * k, x=matrices.mT, width=strip, **arguments, codes=codes)
    return codes.mT, scale


def _places(matrices: torch.Tensor) -> torch.Tensor:
    """Return the offset in bytes of each matrix from the first, int64 (matrices,)."""
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for size, stride in zip(matrices.shape[:-2], matrices.stride()[:-2], strict=True):
        offsets = torch.arange(size, device="cpu") * (stride * matrices.element_size())
        places = (places[:, None] + offsets).flatten()
    return places


def _sums(left: torch.Tensor, right: torch.Tensor) -> Iterator[tuple[slice, int, torch.Tensor]]:
    """Yield products of codes (matrices, m, k) and (matrices, n, k) in chunks: the matrices, the first row, and int32
    sums (matrices, rows, n), whose memory the next chunk overwrites."""
    (matrices, m, _), n = left.shape, right.shape[1]
    rows = min(m, max(1, AT_ONCE // n))
    at_once = max(1, AT_ONCE // (rows * n)) if rows == m else 1
    room = left.new_empty(min(at_once, matrices), rows, n, dtype=torch.int32)
    others = right.unbind()
    for start in range(0, matrices, at_once):
        chunk = slice(start, min(start + at_once, matrices))
        for first in range(0, m, rows):
            among = left[chunk, first : first + rows].unbind()
            sums = room.flatten()[: len(among) * len(among[0]) * n].view(len(among), -1, n)
            for rows_of_left, rows_of_right, out in zip(among, others[chunk], sums.unbind(), strict=True):
                reference.int8_matmul(rows_of_left, rows_of_right, out)
            yield chunk, first, sums


def _features(matrices: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Gather features of matrices (..., rows, k), 0 for a place of -1: float32 (..., rows, count)."""
    features = matrices.gather(-1, places.clamp(min=0)[..., None, :].expand(*matrices.shape[:-1], -1)).float()
    return features.masked_fill_((places < 0)[..., None, :], 0)


def _put_columns(result: torch.Tensor, left: torch.Tensor, right: torch.Tensor, exact_columns: torch.Tensor) -> None:
    """Compute `reference_products.put_columns` faster."""
    if exact_columns.ndim == 1:  # left, a gradient, is transposed in memory: this product reads it once, in float32
        result[:, exact_columns] = reference_products.exact_product(right[exact_columns], left).mT.to(result.dtype)
        return
    for of_matrix in zip(result, left, right, exact_columns, strict=True):  # one matrix in float32 fits a cache
        reference_products.put_columns(*of_matrix)
