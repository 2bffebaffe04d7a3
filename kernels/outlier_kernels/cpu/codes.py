"""Int8 codes of hidden states and weights from one read, after another read that finds outlier features."""

import torch

from outlier_kernels.cpu import all_passes
from outlier_kernels.cpu.compiled import KINDS
from outlier_kernels.formats import Quantizer, is_int8
from outlier_kernels.reference_integers import Quantized, absmax_scale, dynamic_range_and_zero_point

STRIP = 512  # largest number of features whose extremes one piece finds


def as_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix as the passes read it: in one of their dtypes, with contiguous rows and materialized negation."""
    matrix = matrix.resolve_neg() if matrix.dtype in KINDS else matrix.float()
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def extremes(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest entry of each feature of (rows, features), float32 (features,)."""
    rows, features = matrix.shape
    low, high = matrix.new_empty(2, features, dtype=torch.float32)
    strip = min(STRIP, max(64, features // (4 * torch.get_num_threads()) // 64 * 64))
    all_passes().feature_extremes(-(-features // strip), rows * strip, x=matrix, width=strip, low=low, high=high)
    return low, high


def outlier_features(matrix: torch.Tensor, threshold: float | None) -> torch.Tensor:
    """Return the places of features with |x| ≥ threshold in some row, int64; `reference.outlier_columns` flags the
    same."""
    if threshold is None or not matrix.numel():
        return matrix.new_empty(0, dtype=torch.int64)
    low, high = extremes(matrix)
    return ((high >= threshold) | (low <= -threshold)).nonzero()[:, 0]


def quantize_without(
    matrix: torch.Tensor, quantizer: Quantizer, outliers: torch.Tensor, room: torch.Tensor
) -> Quantized:
    """Quantize a matrix (rows, features) like `reference.quantize`, but without its outlier features, whose codes are
    0.

    Args:
        matrix: see `as_rows`.
        quantizer: to int8.
        outliers: places of the outlier features, int64 in order; not of all features for zeropoint.
        room: memory for the codes, (rows, features) contiguous, int8; or uint8, for codes shifted by 128.

    Returns:
        The codes with scales, zero points and code sums of each row, (rows, 1), even if all rows share a scale.
    """
    scale, sums = matrix.new_empty(2, len(matrix), 1, dtype=torch.float32)
    shared = None if quantizer.per_row else _shared_scale(matrix, quantizer, outliers)
    arguments = {"x": matrix, "outliers": outliers, "made": (room, 128 * (room.dtype == torch.uint8), scale, sums)}
    if quantizer.symmetric:
        all_passes().absmax_codes(*matrix.shape, **arguments, scale_of_all=shared)
        return Quantized(room, scale, None, sums)
    zero_point = torch.empty_like(scale)
    first = int((outliers == torch.arange(len(outliers), device=outliers.device)).sum())  # first inlier
    all_passes().zeropoint_codes(*matrix.shape, **arguments, inlier=first, range_of_all=shared, zero_points=zero_point)
    return Quantized(room, scale, zero_point, sums)


def _shared_scale(matrix: torch.Tensor, quantizer: Quantizer, outliers: torch.Tensor) -> torch.Tensor:
    """Return the scale that all rows share, or the normalized dynamic range and zero point that they share."""
    low, high = extremes(matrix)
    if quantizer.symmetric:
        return absmax_scale(torch.maximum(high, -low).index_fill_(0, outliers, 0).amax())
    inliers = torch.ones_like(low, dtype=torch.bool).index_fill_(0, outliers, False)
    return torch.stack(dynamic_range_and_zero_point(low[inliers].amin(), high[inliers].amax()))


def quantize(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """Compute `reference.quantize` to int8."""
    rows = as_rows(matrix.detach())
    no_features = torch.empty(0, dtype=torch.int64, device="cpu")
    made = quantize_without(rows, quantizer, no_features, rows.new_empty(rows.shape, dtype=torch.int8))
    groups = len(rows) if quantizer.per_row else 1
    zero_point = None if quantizer.symmetric else made.zero_point[:groups]
    sums = None if quantizer.symmetric else made.code_sums
    return Quantized(made.codes, made.scale[:groups].clone(), zero_point, sums)


def serves(matrix: torch.Tensor, quantizer: Quantizer | None) -> bool:
    return is_int8(quantizer) and matrix.dtype in KINDS and matrix.numel() > 0
