"""The reference: the computation of every kernel of a linear layer, in a few lines of plain torch.

Number formats are in `outlier_kernels.reference_integers`, `outlier_kernels.reference_formats` and
`outlier_kernels.reference_systems`.
"""

import math
from collections.abc import Callable, Iterator
from functools import reduce
from typing import NamedTuple

import torch

from outlier_kernels import reference_formats, reference_integers, reference_systems
from outlier_kernels.formats import FORMATS, ROWS, Quantizer, import_location
from outlier_kernels.reference_integers import CODE_MAX, Quantized

EXACT_IN_FLOATS = 1024  # features whose products of codes sum exactly in float32: 1024 · 128² = 2^24
LARGEST_K = 131072  # features in one int32 sum: 131072 · 127² < 2^31; the sum of their codes is exact in float32
# Includes the functions that formats name, see `formats.Format`.
FUNCTIONS = vars(reference_integers) | vars(reference_formats) | vars(reference_systems)


class Exact(NamedTuple):
    """An unquantized weight, float (outputs, features), and its quantizer."""

    weight: torch.Tensor
    quantizer: Quantizer | None


def function_of(named: str | Callable) -> Callable:
    """Return the function that a format gives by name or location; a function is returned unchanged."""
    return FUNCTIONS.get(named) or import_location(named)


def quantize(matrix: torch.Tensor, quantizer: Quantizer | None) -> Quantized:
    """Quantize a floating-point matrix (rows, features); without a quantizer, codes are the values, in float32 at
    least.

    Raises:
        ValueError: the groups that share a scale do not divide the features.
    """
    if quantizer is None:
        matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
        return Quantized(matrix, matrix.new_ones(1, 1))
    make, group = function_of(FORMATS[quantizer.format].quantizer), quantizer.group
    rows, features = matrix.shape
    if group and features % group:
        raise ValueError(f"groups of {group} features do not divide {features}")
    if group is None or FORMATS[quantizer.format].in_rows:
        return make(matrix, quantizer)
    made = make(matrix.reshape(-1, group), quantizer)  # each group as a row
    groups = features // group
    return Quantized(*(None if part is None else part.reshape(rows, groups * part.shape[1]) for part in made))


def int8_matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply int8 codes exactly, (m, k) with (n, k) to int32 (m, n). out: contiguous memory for the result, on a CPU.

    Raises:
        ValueError: k could overflow int32.
    """
    if a.shape[1] > LARGEST_K:
        raise ValueError(f"{a.shape[1]} features could overflow an int32 sum; at most {LARGEST_K}")
    if a.is_cuda:
        return _padded_int_mm(a, b)
    if a.shape[1] == 1:  # torch._int_mm leaves the result of one feature uninitialized on CPUs (torch 2.13)
        return torch.mul(a.int(), b.int().t(), out=out)
    if torch.cpu._is_vnni_supported():
        row = a.flatten()[None] if len(a) == 1 else a  # with another stride torch._int_mm reads beyond it (torch 2.13)
        return torch._int_mm(row, b.t()) if out is None else torch._int_mm(row, b.t(), out=out)
    sums = _matmul_in_floats(a, b)  # without VNNI the int8 instructions saturate 16-bit pair sums
    return sums if out is None else out.copy_(sums)


def _matmul_in_floats(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply int8 codes through float32, which is exact for few enough products and twice as fast as float64."""
    room = a.new_empty(len(a), len(b), dtype=torch.float32)  # out= keeps autocast from changing the product
    pieces = zip(a.split(EXACT_IN_FLOATS, 1), b.split(EXACT_IN_FLOATS, 1), strict=True)
    products = (
        torch.mm(piece.float(), other_piece.float().T, out=room).to(torch.int32) for piece, other_piece in pieces
    )
    return reduce(torch.Tensor.add_, products)


def _padded_int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Call `torch._int_mm` with padding to sizes that cuBLASLt supports: more than 16 rows, and features and outputs in
    multiples of 8."""
    (m, k), n = a.shape, b.shape[0]
    rows, features, outputs = max(0, 17 - m), -k % 8, -n % 8
    a = torch.nn.functional.pad(a, (0, features, 0, rows)).contiguous()
    b = torch.nn.functional.pad(b, (0, features, 0, outputs)).contiguous()
    return torch._int_mm(a, b.t())[:m, :n]


def matmul(a: Quantized, b: Quantized) -> torch.Tensor:
    """Multiply two quantized matrices, (m, k) with (n, k) to float (m, n), dequantized (equations 5-7).

    Zeropoint terms are added to the int32 sums, so the one large product stays int8 × int8 and nothing is rounded
    before the scales are applied, those of `a` first; intermediate values beyond the largest float become infinite.
    With scales of groups of features, this is done group by group. If the codes of an operand are not int8, or every
    feature has a scale, the dequantized operands are multiplied.
    """
    if not (a.has_exact_sums and b.has_exact_sums):
        group = math.gcd(a.group or 0, b.group or 0)  # this many features lie in one group of both operands
        if a.codes.dtype != torch.int8 or b.codes.dtype != torch.int8 or group < 2:
            return a.dequantize() @ b.dequantize().T
        return reduce(torch.Tensor.add_, map(matmul, _parts(a, group), _parts(b, group)))
    sums = int8_matmul(a.codes, b.codes)
    if a.zero_point is not None or b.zero_point is not None:
        sums = _add_zero_point_terms(sums, with_zero_point(a), with_zero_point(b))
    return (sums * a.scale).mul_(b.scale.view(1, -1))


def _parts(matrix: Quantized, features: int) -> Iterator[Quantized]:
    """Split a quantized matrix into parts of a number of features, each of which lies in one group."""
    width = matrix.group or matrix.codes.shape[1]
    for start in range(0, matrix.codes.shape[1], features):
        codes, group = matrix.codes[:, start : start + features], slice(start // width, start // width + 1)
        if matrix.zero_point is None:
            yield Quantized(codes, matrix.scale[:, group])
        else:
            sums = codes.sum(1, keepdim=True, dtype=matrix.scale.dtype)
            yield Quantized(codes, matrix.scale[:, group], matrix.zero_point[:, group], sums)


def with_zero_point(matrix: Quantized) -> Quantized:
    """Return a matrix with an explicit zero point, even if it is 0."""
    if matrix.zero_point is not None:
        return matrix
    sums = matrix.codes.sum(1, keepdim=True, dtype=matrix.scale.dtype)
    return matrix._replace(zero_point=torch.zeros_like(matrix.scale), code_sums=sums)


def _add_zero_point_terms(sums: torch.Tensor, a: Quantized, b: Quantized) -> torch.Tensor:
    """Compute A_q·B_q − zp_a·colsum(B_q) − rowsum(A_q)·zp_b + k·zp_a·zp_b exactly."""
    k = a.codes.shape[1]
    # A range that includes 0 has |zero_point| ≤ 127; far from 0 the terms outgrow int32. NaN goes to float64 too.
    dtype = torch.int32 if largest_sum(k, a, b) < 2**31 else torch.float64
    sums = sums.to(dtype)
    # A single zero point is expanded, because torch is six times slower on a broadcast scalar.
    zero_a = a.zero_point.to(dtype).expand(len(a.codes), 1).contiguous()
    zero_b = b.zero_point.to(dtype).expand(len(b.codes), 1).contiguous().view(1, -1)
    sums.addcmul_(zero_a, k * zero_b - b.code_sums.to(dtype).view(1, -1))
    sums.addcmul_(a.code_sums.to(dtype), zero_b, value=-1)
    return sums if dtype == torch.int32 else sums.to(a.scale.dtype)


def largest_sum(features: int, a: Quantized, b: Quantized) -> torch.Tensor:
    """Bound all sums of this many products, zero points included: float64 (), NaN if a zero point is NaN."""
    largest = [CODE_MAX + operand.zero_point.abs().max().double() for operand in (a, b)]
    return features * largest[0] * largest[1]


def outlier_columns(hidden_states: torch.Tensor, threshold: float) -> torch.Tensor:
    """Flag the features of (tokens, features) with |x| ≥ threshold in some token: bool (features,) (section 3.2)."""
    # in float32, because the threshold would be rounded to 16 bits
    most, least = hidden_states.amax(0).float(), hidden_states.amin(0).float()
    return (most >= threshold) | (least <= -threshold)


def linear(
    hidden_states: torch.Tensor,
    weight: Quantized,
    bias: torch.Tensor | None = None,
    activations: Quantizer | None = ROWS,
    threshold: float | None = None,
    exact: Exact | None = None,
    multiply: Callable[[torch.Tensor, Quantized, None, Quantizer | None], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Compute a linear layer with quantized weights (LLM.int8(), equation 8).

    Features with an input of at least `threshold` in some token are multiplied in higher precision; the others are
    quantized, with scales taken over them alone. If only the codes of the weight remain, outlier features are
    multiplied with weights rebuilt from them, and the weights' scales are over all features, because they were fixed
    before the outliers were known. If groups of features share a scale, outlier features are set to zero in both
    operands instead of cut out, so that the others stay in their groups: a zero changes no absmax scale, and zeropoint
    ranges then include it.

    Args:
        hidden_states: float (tokens, features).
        weight: of (outputs, features), quantized or not.
        bias: (outputs,).
        activations: how the hidden states are quantized; None for not at all.
        threshold: magnitude of an outlier; None for no decomposition.
        exact: the unquantized weight, if available: outlier features are multiplied with it, and codes are made without
            them.
        multiply: another backend's product without a bias, which replaces the reference's.

    Returns:
        (tokens, outputs) in the dtype of `hidden_states`.
    """
    dtype, multiply = hidden_states.dtype, multiply or _product
    x = hidden_states if dtype == torch.float64 else hidden_states.float()
    outliers = None if threshold is None else outlier_columns(x, threshold)
    if outliers is None or not outliers.any():
        product = multiply(x, weight, None, activations)
    else:
        product = outlier_product(x, outliers, weight, exact)
        if not outliers.all():
            rest = _inliers(x, weight, outliers, activations, exact)
            product += multiply(*rest, None, activations)
    if bias is not None:
        product += bias
    return product.to(dtype)


def grouped_linear(
    rows: torch.Tensor, ends: torch.Tensor, weight: Quantized, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply each row with the weight of its expert, both quantized by absmax, a scale for each row and output.

    Args:
        rows: float (rows, features), sorted by expert.
        ends: how many rows the experts up to each one have together, int64 (experts,).
        weight: codes (experts, outputs, features) and scales (experts, outputs, 1).
        bias: (experts, outputs).

    Returns:
        (rows, outputs) in the dtype of `rows`.
    """
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    biases = [None] * len(sizes) if bias is None else bias
    parts = zip(rows.split(sizes), weight.codes, weight.scale, biases, strict=True)
    return torch.cat([linear(part, Quantized(codes, scale), one) for part, codes, scale, one in parts if len(part)])


def _inliers(
    x: torch.Tensor, weight: Quantized, outliers: torch.Tensor, activations: Quantizer | None, exact: Exact | None
) -> tuple[torch.Tensor, Quantized]:
    """Return the inputs and the weight without the outlier features: cut out, or zeroed if groups of features share a
    scale, whose boundaries must stay."""
    quantizers = activations, exact and exact.quantizer
    if weight.group is None and not any(quantizer and quantizer.group for quantizer in quantizers):
        rest = quantize(exact.weight[:, ~outliers], exact.quantizer) if exact else _columns(weight, ~outliers)
        return x[:, ~outliers], rest
    rest = quantize(exact.weight.masked_fill(outliers, 0), exact.quantizer) if exact else weight
    return x.masked_fill(outliers, 0), rest


def _product(x: torch.Tensor, weight: Quantized, _bias: None, activations: Quantizer | None) -> torch.Tensor:
    return matmul(quantize(x, activations), weight)


def outlier_product(
    hidden_states: torch.Tensor, outliers: torch.Tensor, weight: Quantized, exact: Exact | None = None
) -> torch.Tensor:
    """Multiply the outlier features in the precision of the weight's scales, or in 16 bits with an unquantized weight:
    float (tokens, outputs).

    outliers: the features, as flags or as places.
    """
    x = hidden_states[:, outliers]
    if exact is None:
        return x.to(weight.scale.dtype) @ _columns(weight, outliers).dequantize().T
    return _product_in_16_bits(x.to(torch.promote_types(x.dtype, torch.float32)), exact.weight[:, outliers])


def _product_in_16_bits(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply (m, k) with (n, k) to (m, n) in float16 on a GPU, and in float32 on a CPU, whose 16-bit units are too
    coarse (bfloat16) or missing (float16)."""
    dtype = torch.float16 if hidden_states.is_cuda and hidden_states.dtype == torch.float32 else hidden_states.dtype
    return (hidden_states.to(dtype) @ weight.to(dtype).T).to(hidden_states.dtype)


def quantize_bitsandbytes(matrix: torch.Tensor, threshold: float | None = None) -> tuple[Quantized, torch.Tensor]:
    """Quantize rows by absmax as bitsandbytes 0.50 does; return the codes, and which features are outliers, bool
    (features,).

    The matrix is cast to float16 before it is compared with the threshold and quantized. The scale of a row is over all
    its entries below the threshold, including those in outlier columns, whose codes are then zeroed.
    """
    matrix = matrix.half().float()
    hits = torch.zeros_like(matrix, dtype=torch.bool) if threshold is None else matrix.abs() >= threshold
    outliers = hits.any(0)
    absmax = matrix.masked_fill(hits, 0).abs().amax(1, keepdim=True)
    absmax = absmax.masked_fill(absmax == 0, CODE_MAX)
    codes = (matrix.masked_fill(outliers, 0) * (CODE_MAX / absmax)).round_()
    return Quantized(codes.to(torch.int8), absmax / CODE_MAX), outliers


def linear_bitsandbytes(
    hidden_states: torch.Tensor, weight: Quantized, bias: torch.Tensor | None = None, threshold: float | None = None
) -> torch.Tensor:
    """Compute LLM.int8() as bitsandbytes 0.50 does, with the arguments of `linear`. weight: from
    `quantize_bitsandbytes`."""
    quantized, outliers = quantize_bitsandbytes(hidden_states, threshold)
    product = matmul(quantized, weight)
    if outliers.any():
        product += outlier_product(hidden_states, outliers, weight)
    if bias is not None:
        product += bias
    return product.to(hidden_states.dtype)


def _columns(matrix: Quantized, features: torch.Tensor) -> Quantized:
    codes = matrix.codes[:, features]
    if matrix.group is not None:  # each with the scale of its group
        spread = (part if part is None else matrix._spread(part)[:, features] for part in matrix[1:3])
        return Quantized(codes, *spread)
    sums = None if matrix.zero_point is None else codes.sum(1, keepdim=True, dtype=matrix.scale.dtype)
    return matrix._replace(codes=codes, code_sums=sums)


# By name of an arithmetic: the function that quantizes a weight, and the layer.
WEIGHTS = {"exact": quantize, "bitsandbytes": lambda weight, _quantizer: quantize_bitsandbytes(weight)[0]}
LINEAR = {
    "exact": linear,
    "bitsandbytes": lambda x, weight, bias, _activations, threshold, _: linear_bitsandbytes(x, weight, bias, threshold),
}
