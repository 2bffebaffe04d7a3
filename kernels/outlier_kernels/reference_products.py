"""The reference for products in training: both operands, one matrix or many, are quantized by rows for the product."""

from functools import reduce

import torch

from outlier_kernels import reference
from outlier_kernels.formats import ROWS
from outlier_kernels.reference import EXACT_IN_FLOATS
from outlier_kernels.reference_integers import CODE_MAX, Quantized, absmax_scale

# Philox4x32: ten rounds of two multiplications; each round adds two constants to the key (Salmon et al., 2011).
MULTIPLIERS, KEY_STEPS, ROUNDS, WORD = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85), 10, 0xFFFFFFFF


def quantize_rows(matrices: torch.Tensor, outliers: torch.Tensor | None = None, seed: int | None = None) -> Quantized:
    """Quantize (..., m, k) by absmax, with one scale per row (..., m, 1).

    Args:
        matrices: float (..., m, k).
        outliers: places of features to leave out, int64 (..., count), -1 for none; their codes are 0.
        seed: seed of `chances` for stochastic rounding, which rounds a value up with a probability equal to its
            fraction; None rounds to nearest.
    """
    if outliers is not None:  # zeros change no absmax scale
        matrices = matrices.masked_fill(flags_of(outliers, matrices.shape[-1])[..., None, :], 0)
    if seed is None:
        made = reference.quantize(matrices.reshape(-1, matrices.shape[-1]), ROWS)
        return Quantized(made.codes.view(matrices.shape), made.scale.view(*matrices.shape[:-1], 1))
    matrices = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    scale = absmax_scale(matrices.abs().amax(-1, keepdim=True))
    codes = (matrices / scale).add_(chances(matrices, seed)).floor_().clamp_(-CODE_MAX, CODE_MAX)
    return Quantized(codes.to(torch.int8), scale)


def chances(matrices: torch.Tensor, seed: int) -> torch.Tensor:
    """Return numbers in [0, 1) for the entries of (..., m, k), float32.

    For row r, counted through all matrices, and feature i: the first 24 bits of word i % 4 of Philox at the counter (i
    // 4, r, 0, 0).
    """
    features = matrices.shape[-1]
    rows = torch.arange(matrices[..., 0].numel(), device=matrices.device)[:, None]
    fours = torch.arange(-(-features // 4), device=matrices.device)
    words = torch.stack(philox(fours, rows, seed), -1).flatten(1)[:, :features]
    return ((words >> 8).float() * 2**-24).view(matrices.shape)


def philox(first: torch.Tensor, second: torch.Tensor, seed: int) -> tuple[torch.Tensor, ...]:
    """Return four random words at the counters (first, second, 0, 0), all integers below 2^32 in int64.

    seed: the key, below 2^63.
    """
    first, second = torch.broadcast_tensors(first, second)
    words, key = (first, second, torch.zeros_like(first), torch.zeros_like(first)), (seed & WORD, seed >> 32)
    for _ in range(ROUNDS):
        a, b = (word * factor for word, factor in zip(words[::2], MULTIPLIERS, strict=True))  # their lowest 64 bits
        high_a, high_b = (number >> 32 & WORD for number in (a, b))
        words = high_b ^ words[1] ^ key[0], b & WORD, high_a ^ words[3] ^ key[1], a & WORD
        key = tuple(word + step & WORD for word, step in zip(key, KEY_STEPS, strict=True))
    return words


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    outliers: torch.Tensor | None = None,
    exact_columns: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """Compute left · rightᵀ in int8, with an absmax scale per row of either (equation 6).

    Args:
        left: float (..., m, k).
        right: float (..., n, k), of any dtype.
        outliers: indices of inner dimensions that are multiplied unquantized (equation 8), int64 (..., count) in
            ascending order, preceded by -1 where a matrix has fewer; no scale includes them.
        exact_columns: indices of columns of the product that are computed unquantized, in the same form (..., count).
        seed: seed of stochastic rounding of `left`, see `quantize_rows`.

    Returns:
        (..., m, n) in the dtype of `left`, computed in float32, or in float64 if `left` is.
    """
    left_codes, right_codes = quantize_rows(left, outliers, seed), quantize_rows(right, outliers)
    result = _dequantized(left_codes, right_codes)
    if outliers is not None:
        flags = flags_of(outliers, left.shape[-1])[..., None, :]
        result = result + exact_product(left.masked_fill(~flags, 0), right)
    if exact_columns is not None:
        flags = flags_of(exact_columns, right.shape[-2])[..., None, :]
        result = torch.where(flags, exact_product(left, right), result)
    return result.to(left.dtype)


def exact_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute left · rightᵀ in float32 at least; for 16-bit operands this is the result of 16-bit units before
    rounding."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    return left.to(dtype) @ right.to(dtype).mT


def put_columns(result: torch.Tensor, left: torch.Tensor, right: torch.Tensor, exact_columns: torch.Tensor) -> None:
    """Overwrite columns of a result (..., m, n) by those of the unquantized left · rightᵀ, see `product`.

    exact_columns: int64 (..., count); a place of -1 repeats the last column of its matrix.
    """
    last = exact_columns[..., -1:]
    places = torch.where(exact_columns < 0, last, exact_columns).clamp(min=0)
    rows = right.gather(-2, places[..., None].expand(*places.shape, right.shape[-1]))
    columns = places[..., None, :].expand(*result.shape[:-1], -1)
    columns_of_product = exact_product(left, rows).to(result.dtype)
    result.scatter_(-1, columns, torch.where((last < 0)[..., None, :], result.gather(-1, columns), columns_of_product))


def flags_of(places: torch.Tensor, size: int) -> torch.Tensor:
    """Turn places (..., count), -1 for none, into flags: bool (..., size)."""
    flags = torch.zeros(*places.shape[:-1], size + 1, dtype=torch.bool, device=places.device)
    return flags.scatter_(-1, torch.where(places < 0, size, places), True)[..., :size]


def _dequantized(left: Quantized, right: Quantized) -> torch.Tensor:
    if left.codes.ndim == 2:
        return reference.matmul(left, right)
    return _batched_sums(left.codes, right.codes) * left.scale * right.scale.mT


def _batched_sums(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply codes (..., m, k) and (..., n, k) to int32 (..., m, n), in pieces whose sums float32 holds exactly."""
    parts = zip(left.split(EXACT_IN_FLOATS, -1), right.split(EXACT_IN_FLOATS, -1), strict=True)
    return reduce(torch.add, ((piece.float() @ other_piece.float().mT).to(torch.int32) for piece, other_piece in parts))
