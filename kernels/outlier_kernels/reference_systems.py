"""Formats of serving systems, whose codes are integers of 4 bits: those of FireQ, QServe and COMET.

As in `outlier_kernels.reference_formats`, what a format states is the dtype of a matrix, float32 at least; NaN and inf
make the scale of a group or row NaN or inf, and zeros have scale 1.
"""

import torch

from outlier_kernels.formats import E4M3, FORMATS, Quantizer, large_groups
from outlier_kernels.reference_formats import LEAST_E4M3, power_of_two, round_mantissas, rounded, with_largest
from outlier_kernels.reference_integers import CODE_MAX, Quantized, absmax_scale

PROTECTIVE = 119  # of rows whose groups are quantized again: 119 + 16 / 2 = 127 (QServe, section 4.1)
LEAST_OF_MATRIX = 2.0**-117  # so that its product with the least of e4m3 is a normal number
STEPS = 15  # of a code of 4 bits without a sign


def quantize_int4_e4m3(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """Codes in [-8, 7] under max|g| / 7 in e4m3, times a power of two of the whole matrix, the smallest with which none
    of these scales exceeds the largest of e4m3, so that the fewest fall below its smallest (FireQ: Baek et al., 2025,
    per-tensor scaling)."""
    matrix, largest = with_largest(matrix, quantizer)
    needed = (largest / 7).clamp_(min=torch.finfo(matrix.dtype).tiny)
    of_matrix = power_of_two(needed.amax()).mul_(2.0**-E4M3.largest_exponent).clamp_(min=LEAST_OF_MATRIX)
    of_matrix = torch.where(needed.amax() > E4M3.largest * of_matrix, 2 * of_matrix, of_matrix)
    scale = rounded(needed / of_matrix, E4M3).clamp_(min=LEAST_E4M3) * of_matrix
    scale = scale.masked_fill(largest == 0, 1)
    return Quantized(round_mantissas(matrix / scale, FORMATS[quantizer.format]).to(torch.int8), scale)


def quantize_int4_in_int8(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """Rows in int8, within [-119, 119], and groups of their codes in 4 bits, asymmetric: the int8 codes that
    (code - zero point) * step gives back, with a whole step and a zero point of 4 bits (QServe: Lin et al., 2024,
    section 4.1, progressive group quantization).

    The range of a group includes 0, so that its zero point has 4 bits. No code leaves int8: what it becomes is at most
    half a step, 8, beyond it.
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
    """Absmax groups of int4, but for the first ones of each row in int8, see `large_groups` (COMET: Liu et al., 2025,
    section 3.2, where features in the order of their magnitudes put outliers into few groups)."""
    matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
    groups = matrix.unflatten(1, (-1, quantizer.group or matrix.shape[1]))
    most = matrix.new_full((groups.shape[1], 1), 7)
    most[: large_groups(len(most))] = CODE_MAX
    scale = absmax_scale(groups.abs().amax(-1 if quantizer.per_row else (0, 1, 2), keepdim=True), most)
    codes = (groups / scale).round_().clamp_(-most, most).to(torch.int8)
    return Quantized(codes.flatten(1), scale.flatten(1))
