"""The reference for formats of serving systems with 4-bit integer codes: FireQ, QServe and COMET.

As in `outlier_kernels.reference_formats`, scales have the dtype of the matrix, float32 at least; NaN and inf make the
scale of a group or row NaN or inf, and zeros have scale 1.
"""

import torch

from outlier_kernels.formats import E4M3, FORMATS, Quantizer, large_groups
from outlier_kernels.reference_formats import LEAST_E4M3, power_of_two, round_mantissas, rounded, with_largest
from outlier_kernels.reference_integers import CODE_MAX, Quantized, absmax_scale

PROTECTIVE = 119  # largest code of a row before its groups are quantized: 119 + 16 / 2 = 127 (QServe, section 4.1)
LEAST_OF_MATRIX = 2.0**-117  # its product with the smallest value of e4m3 is a normal number
STEPS = 15  # largest unsigned 4-bit code


def quantize_int4_e4m3(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """Quantize to codes in [-8, 7] with scale max|g| / 7 in e4m3, times a power of two of the whole matrix (FireQ: Baek
    et al., 2025, per-tensor scaling).

    The power of two is the smallest at which no group's scale exceeds the largest value of e4m3, so that the fewest
    scales fall below its smallest.
    """
    matrix, largest = with_largest(matrix, quantizer)
    needed = (largest / 7).clamp_(min=torch.finfo(matrix.dtype).tiny)
    matrix_scale = power_of_two(needed.amax()).mul_(2.0**-E4M3.largest_exponent).clamp_(min=LEAST_OF_MATRIX)
    matrix_scale = torch.where(needed.amax() > E4M3.largest * matrix_scale, 2 * matrix_scale, matrix_scale)
    scale = rounded(needed / matrix_scale, E4M3).clamp_(min=LEAST_E4M3) * matrix_scale
    scale = scale.masked_fill(largest == 0, 1)
    return Quantized(round_mantissas(matrix / scale, FORMATS[quantizer.format]).to(torch.int8), scale)


def quantize_int4_in_int8(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """Quantize rows to int8 within [-119, 119], and groups of these codes to asymmetric 4 bits (QServe: Lin et al.,
    2024, section 4.1, progressive group quantization).

    The resulting int8 codes are (code - zero point) * step, with an integer step and a zero point of 4 bits. The range
    of a group includes 0, so that its zero point fits 4 bits. No code leaves int8: rounding moves it by at most half a
    step, 8.
    """
    matrix, largest = with_largest(matrix, quantizer)
    scale = absmax_scale(largest, PROTECTIVE)
    codes = (matrix / scale).round_()
    groups = codes.reshape(-1, quantizer.group or (matrix.shape[1] if quantizer.per_row else matrix.numel()))
    least, largest = groups.amin(1, keepdim=True).clamp_(max=0), groups.amax(1, keepdim=True).clamp_(min=0)
    step = ((largest - least) / STEPS).round_().clamp_(min=1)
    zero_point = (-least / step).round_().clamp_(max=STEPS)
    groups = (groups / step).round_().add_(zero_point).clamp_(0, STEPS)
    return Quantized(((groups - zero_point) * step).reshape(matrix.shape).to(torch.int8), scale)


def quantize_int4_int8(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """Quantize groups by absmax to int4, but the first groups of each row to int8, see `large_groups` (COMET: Liu et
    al., 2025, section 3.2, where sorting features by magnitude gathers outliers in few groups)."""
    matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
    groups = matrix.unflatten(1, (-1, quantizer.group or matrix.shape[1]))
    most = matrix.new_full((groups.shape[1], 1), 7)
    most[: large_groups(len(most))] = CODE_MAX
    scale = absmax_scale(groups.abs().amax(-1 if quantizer.per_row else (0, 1, 2), keepdim=True), most)
    codes = (groups / scale).round_().clamp_(-most, most).to(torch.int8)
    return Quantized(codes.flatten(1), scale.flatten(1))
