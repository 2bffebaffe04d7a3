"""Products with plain int8 codes: exact int32 sums, bit-identical to those of the reference.

Under decomposition, most rows of a weight keep their codes without its outlier features. The codes of the hidden states
are zero there, and removing a feature changes the codes of a scale's group only if the feature holds an extreme of the
group, which has one of the outermost codes.
"""

from functools import partial

import torch

from outlier_kernels import reference
from outlier_kernels.cpu import all_passes, codes
from outlier_kernels.cpu.compiled import KINDS
from outlier_kernels.formats import ROWS, Quantizer, is_int8
from outlier_kernels.reference import Exact, Quantized

OUTERMOST = 126  # the smallest code to which the largest value of a zeropoint group can be rounded
ORDINARY = (1e-30, 1e30)  # range of scales in which the extremes of a group have the outermost codes
LARGEST_ZERO_POINT = 2**20  # zero points beyond which float32 is too coarse for the outermost codes


def serves(weight: Quantized, activations: Quantizer | None, dtype: torch.dtype) -> bool:
    """Return whether both operands are int8 with float32 scales, and the passes can write outputs of this dtype."""
    if not is_int8(activations) or dtype not in KINDS:
        return False
    return weight.has_exact_sums and weight.scale.dtype == torch.float32


def linear(
    hidden_states: torch.Tensor,
    weight: Quantized,
    bias: torch.Tensor | None = None,
    activations: Quantizer = ROWS,
    threshold: float | None = None,
    exact: Exact | None = None,
) -> torch.Tensor:
    """Compute `reference.linear`, (tokens, features) to (tokens, outputs)."""
    x = codes.as_rows(hidden_states)
    outliers = codes.outlier_features(x, threshold)
    by_reference = partial(reference.linear, hidden_states, weight, bias, activations, threshold, exact)
    if not x.numel() or len(outliers) == x.shape[1]:
        return by_reference()
    if len(outliers) and exact is not None and not is_int8(exact.quantizer):  # its codes may depend on any entry
        return by_reference()
    room = x.new_empty(x.shape, dtype=torch.int8)
    quantized = codes.quantize_without(x, activations, outliers, room)
    added = None
    if len(outliers) and exact is not None:
        values, columns = (operand.index_select(1, outliers).float() for operand in (x, exact.weight))
        added = values @ columns.T
        weight = _quantized_without(weight, outliers, exact)
    elif len(outliers):
        added = reference.outlier_product(x, outliers, weight)
    result = _multiply(quantized, weight, outliers, added, bias, hidden_states.dtype)
    return by_reference() if result is None else result


def _quantized_without(weight: Quantized, outliers: torch.Tensor, exact: Exact) -> Quantized:
    """Return the weight as if quantized without the outlier features, whose own codes are arbitrary, because they are
    multiplied with zeros."""
    changed = _with_extremes_in(weight, outliers).nonzero()[:, 0]
    if not len(changed):
        return weight
    per_row = exact.quantizer.per_row
    rows = codes.as_rows(exact.weight[changed] if per_row else exact.weight)
    remade = codes.quantize_without(rows, exact.quantizer, outliers, rows.new_empty(rows.shape, dtype=torch.int8))
    if not per_row:
        return remade
    parts = zip(weight, remade, strict=True)
    return Quantized(*(None if old is None else old.index_copy(0, changed, new) for old, new in parts))


def _with_extremes_in(weight: Quantized, features: torch.Tensor) -> torch.Tensor:
    """Return which rows of a weight may have another scale without these features, bool (outputs,)."""
    least, most = ORDINARY
    changed = (weight.codes.index_select(1, features).abs() >= OUTERMOST).any(1)
    changed |= ~((weight.scale > least) & (weight.scale < most))[:, 0]
    if weight.zero_point is not None:
        changed |= ~(weight.zero_point.abs() < LARGEST_ZERO_POINT)[:, 0]
    return changed


def _multiply(
    quantized: Quantized,
    weight: Quantized,
    outliers: torch.Tensor,
    added: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor | None:
    """Multiply codes that are 0 in the outlier features; return None if the zero points are too large for int32."""
    terms = _zero_point_terms(quantized, weight, outliers)
    if terms is None:
        return None
    sums = reference.int8_matmul(quantized.codes, weight.codes)
    result = sums.new_empty(sums.shape, dtype=dtype)
    outputs = sums.shape[1]
    column_scales = weight.scale.flatten().expand(outputs).contiguous()
    bias = None if bias is None else bias.float().contiguous()
    arguments = {"sums": sums, "scales": (quantized.scale, column_scales), "zero_points": terms}
    all_passes().finish_sums(*sums.shape, **arguments, added=added, bias=bias, result=result)
    return result


def _zero_point_terms(a: Quantized, b: Quantized, outliers: torch.Tensor) -> tuple[torch.Tensor | None, ...] | None:
    """Return zero points and code sums of the rows, and their factors for each column, over all features but the
    outliers, in int32.

    The result is four times None if both operands are symmetric, and None if the terms are too large for int32.
    """
    if a.zero_point is None and b.zero_point is None:
        return None, None, None, None
    a, b = reference.with_zero_point(a), reference.with_zero_point(b)
    inliers = a.codes.shape[1] - len(outliers)
    if not reference.largest_sum(inliers, a, b) < 2**31:
        return None
    outputs = len(b.codes)
    of_sums = b.zero_point.to(torch.int32).expand(outputs, 1)
    of_inliers = b.code_sums - b.codes[:, outliers].sum(1, keepdim=True, dtype=torch.float32)
    of_zeros = inliers * of_sums - of_inliers.to(torch.int32)
    row_zeros, row_sums = (a.zero_point.to(torch.int32), a.code_sums.to(torch.int32))
    return row_zeros, row_sums, of_zeros.contiguous(), of_sums.contiguous()
