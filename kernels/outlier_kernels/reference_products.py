"""The truth of products that train: both operands are quantized by rows when they meet, one matrix or many at once."""

from functools import reduce

import torch

from outlier_kernels import reference
from outlier_kernels.formats import ROWS
from outlier_kernels.reference import CODE_MAX, EXACT_IN_FLOATS, Quantized


def magnitudes(matrices: torch.Tensor) -> torch.Tensor:
    """The largest |x| of each feature of (..., rows, features): (..., features) in their dtype."""
    return matrices.abs().amax(-2)


def quantize_rows(matrices: torch.Tensor, stochastic: bool = False) -> Quantized:
    """Absmax codes of (..., m, k) with a scale a row (..., m, 1); stochastic: rounded up with a chance of how near the
    value is to the code above it."""
    if not stochastic:
        made = reference.quantize(matrices.reshape(-1, matrices.shape[-1]), ROWS)
        return Quantized(made.codes.view(matrices.shape), made.scale.view(*matrices.shape[:-1], 1))
    matrices = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    scale = reference.absmax_scale(matrices.amin(-1, keepdim=True), matrices.amax(-1, keepdim=True))
    codes = (matrices / scale).add_(torch.rand_like(matrices)).floor_().clamp_(-CODE_MAX, CODE_MAX)
    return Quantized(codes.to(torch.int8), scale)


def product(
    left: torch.Tensor,
    right: torch.Tensor,
    outliers: torch.Tensor | None = None,
    exact: torch.Tensor | None = None,
    stochastic: bool = False,
) -> torch.Tensor:
    """left · rightᵀ in int8, each row of either with an absmax scale (equation 6).

    Args:
        left: float (..., m, k).
        right: float (..., n, k), of any dtype too.
        outliers: inner dimensions that are multiplied in 16 bits (equation 8), bool (..., k); scales are without them.
        exact: columns of the product that are computed in 16 bits, bool (..., n).
        stochastic: whether `left` is rounded by chance.

    Returns:
        (..., m, n) in the dtype of `left`; it was rounded to that from float32.
    """
    if outliers is None:
        found = _vector_wise(left, right, stochastic)
    else:
        of_rows = outliers[..., None, :]
        rest = [operand.masked_fill(of_rows, 0) for operand in (left, right)]  # zeros change no absmax scale
        if outliers.ndim == 1:
            in_16_bits = product_in_16_bits(left[:, outliers], right[:, outliers])
        else:  # of each matrix others
            in_16_bits = product_in_16_bits(left.masked_fill(~of_rows, 0), right)
        found = _vector_wise(*rest, stochastic) + in_16_bits
    if exact is not None and exact.ndim == 1:
        found[:, exact] = product_in_16_bits(left, right[exact])
    elif exact is not None:
        found = torch.where(exact[..., None, :], product_in_16_bits(left, right), found)
    return found.to(left.dtype)


def product_in_16_bits(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left · rightᵀ: in float16 on a GPU, in float32 at least on a CPU, as `reference.outlier_product` has it."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    narrow = torch.float16 if left.is_cuda and dtype == torch.float32 else dtype
    return (left.to(narrow) @ right.to(narrow).mT).to(dtype)


def _vector_wise(left: torch.Tensor, right: torch.Tensor, stochastic: bool) -> torch.Tensor:
    of_left, of_right = quantize_rows(left, stochastic), quantize_rows(right)
    if left.ndim == 2:
        return reference.matmul(of_left, of_right)
    return _batched_sums(of_left.codes, of_right.codes) * of_left.scale * of_right.scale.mT


def _batched_sums(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Products of codes (..., m, k) and (..., n, k), int32 (..., m, n): float32 holds sums of so few exactly."""
    parts = zip(left.split(EXACT_IN_FLOATS, -1), right.split(EXACT_IN_FLOATS, -1), strict=True)
    return reduce(torch.add, ((some.float() @ others.float().mT).to(torch.int32) for some, others in parts))
