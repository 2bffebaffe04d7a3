"""GPTQ (Frantar et al., 2022): the rounding error of one weight is compensated by weights not yet rounded."""

import torch
from outlier_kernels.formats import FORMATS, Quantizer
from outlier_kernels.reference import Quantized, function_of

from outliers.quantization.magnitudes import InputSummary

BLOCK = 128  # features whose errors are passed on to later features together


def compensated(
    weight: torch.Tensor, nearest: Quantized, known: InputSummary, quantizer: Quantizer, damping: float
) -> Quantized:
    """Return the codes of a weight that change its outputs little, with the scales of the codes rounded to nearest.

    Features are rounded one after another, those with the largest inputs first ("act-order"; groups keep the scales of
    the exact weight, "static groups"). With U the upper Cholesky factor of H⁻¹ in this order, the error of feature j
    changes each later feature k by (w_j − ŵ_j) · U_jk / U_jj (algorithm 1 of the paper).

    Args:
        weight: float (outputs, features).
        nearest: the weight, rounded to nearest.
        known: statistics of its inputs, with XᵀX. H is XᵀX with `damping` times its mean diagonal added to the
            diagonal.
        quantizer: of `nearest`.
        damping: above 0.
    """
    gram = known.gram.to(weight.device, torch.float64)
    order = gram.diagonal().argsort(descending=True, stable=True)
    upper = _upper_factor(gram[order][:, order], damping)
    width, scale, zero_point = weight.shape[1], *nearest[1:3]
    scale, zero_point = (_spread(part, width)[:, order] if part is not None else None for part in (scale, zero_point))
    format = FORMATS[quantizer.format]
    rounding, left = function_of(format.rounding), weight[:, order].double()
    codes = torch.empty_like(left)
    for start in range(0, width, BLOCK):
        end = min(start + BLOCK, width)
        errors = left.new_empty(len(left), end - start)
        for feature in range(start, end):
            at = slice(feature, feature + 1)
            zero = None if zero_point is None else zero_point[:, at]
            codes[:, at] = rounding(left[:, at] / scale[:, at], format, zero)
            rounded = (codes[:, at] if zero is None else codes[:, at] - zero) * scale[:, at]
            errors[:, feature - start : feature - start + 1] = (left[:, at] - rounded) / upper[feature, feature]
            left[:, feature:end] -= errors[:, feature - start, None] * upper[feature, feature:end]
        left[:, end:] -= errors @ upper[start:end, end:]
    codes = codes[:, order.argsort()].to(nearest.codes.dtype)
    if nearest.code_sums is None:
        return nearest._replace(codes=codes)
    sums = codes.view(len(codes), nearest.code_sums.shape[1], -1).sum(2, dtype=nearest.code_sums.dtype)
    return nearest._replace(codes=codes, code_sums=sums)


def _upper_factor(gram: torch.Tensor, damping: float) -> torch.Tensor:
    """Return U, upper triangular with H⁻¹ = Uᵀ U: the inverse of the upper triangular R with H = R Rᵀ."""
    added = damping * gram.diagonal().mean()
    added = added if added > 0 else 1.0  # all inputs were zero
    damped = gram + added * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    factor = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    return torch.linalg.solve_triangular(factor, torch.eye(len(gram)).to(factor), upper=True)


def _spread(values: torch.Tensor, width: int) -> torch.Tensor:
    """Repeat the values of groups for each of their features: float64 (rows or 1, features)."""
    return values.double().repeat_interleave(width // values.shape[1], 1)
