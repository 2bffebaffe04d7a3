"""The reference for number formats beyond plain integers: floating-point elements, shared exponents, scales of scales.

Rounding is to nearest, ties to even, by exact arithmetic with powers of two: torch's own casts lack some of these
elements, and some of them round a float64 twice. Codes of floating-point formats are the values of the elements, in the
dtype of the scales. NaN and inf make a group's scale NaN or inf, as in
`outlier_kernels.reference_integers.quantize_integers`, and a group of zeros has scale 1. Each format has a smallest
scale, at which smaller scales are clamped.
"""

import torch

from outlier_kernels.formats import E4M3, FORMATS, Element, Format, Quantizer
from outlier_kernels.reference_integers import Quantized, absmax_scale

LEAST_SHARED = 2.0**-127  # the smallest scale that is only an exponent (e8m0)
LEAST_E4M3 = 2.0**-9  # the smallest positive value of e4m3, a subnormal one
EXPONENT_BITS = {torch.float32: (torch.int32, 0xFF << 23), torch.float64: (torch.int64, 0x7FF << 52)}


def quantize_scaled(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """Quantize to floating-point elements, scaled so that the largest value of a group is the largest element: fp8."""
    element = FORMATS[quantizer.format].element
    matrix, largest = with_largest(matrix, quantizer)
    return _elements(matrix, absmax_scale(largest, element.largest), element)


def quantize_microscaling(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """Quantize to floating-point elements with a power of two as scale, which maps the exponent of the group's largest
    value to the elements' largest exponent (OCP Microscaling Formats 1.0, section 6.3)."""
    element = FORMATS[quantizer.format].element
    matrix, largest = with_largest(matrix, quantizer)
    return _elements(matrix, _shared(largest, element.largest_exponent), element)


def quantize_nvfp4(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """Quantize to floating-point elements with a scale in e4m3, at least its smallest value, times a scale of the whole
    matrix."""
    element = FORMATS[quantizer.format].element
    matrix, largest = with_largest(matrix, quantizer)
    of_matrix = absmax_scale(largest.amax(), element.largest * E4M3.largest)
    of_group = rounded(largest / element.largest / of_matrix, E4M3).clamp_(min=LEAST_E4M3)
    return _elements(matrix, (of_group * of_matrix).masked_fill(largest == 0, 1), element)


def quantize_mantissas(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """Quantize to integers in two's complement with the shared exponent of the group's largest value: block floating
    point of B bits, whose scale is 2^(exponent + 2 - B), and thus mxint8."""
    format = FORMATS[quantizer.format]
    matrix, largest = with_largest(matrix, quantizer)
    scale = (_shared(largest, 0) * 2.0 ** (2 - format.bits)).masked_fill(largest == 0, 1)
    return Quantized(round_mantissas(matrix / scale, format).to(torch.int8), scale)


def round_mantissas(scaled: torch.Tensor, format: Format, _zero_point: None = None) -> torch.Tensor:
    """Round values divided by their scale to signed integer codes of the format's bits, in place."""
    half = 2 ** (format.bits - 1)
    return scaled.round_().clamp_(-half, half - 1)


def round_elements(scaled: torch.Tensor, format: Format, _zero_point: None = None) -> torch.Tensor:
    """Round values divided by their scale to codes."""
    return rounded(scaled, format.element)


def rounded(values: torch.Tensor, element: Element) -> torch.Tensor:
    """Round values, float32 or float64, to elements: to nearest, ties to even, saturating at the largest."""
    step = power_of_two(values).clamp_(min=2.0**element.least_exponent).mul_(2.0**-element.mantissa_bits)
    return (values / step).round_().mul_(step).clamp_(-element.largest, element.largest)


def power_of_two(values: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two not above each magnitude; 0 for zeros and subnormal numbers, inf for NaN and
    inf."""
    integers, mask = EXPONENT_BITS[values.dtype]
    return (values.view(integers) & mask).view(values.dtype)


def with_largest(matrix: torch.Tensor, quantizer: Quantizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrix in float32 at least, and the largest magnitude of each row, (rows, 1), or of the matrix, (1,
    1)."""
    matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
    return matrix, matrix.abs().amax(1 if quantizer.per_row else (0, 1), keepdim=True)


def _shared(largest: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return 2^(exponent of the largest - exponent), clamped to e8m0; 1 for a group of zeros."""
    shared = power_of_two(largest).mul_(2.0**-exponent).clamp_(min=LEAST_SHARED)
    return shared.masked_fill_(largest == 0, 1)


def _elements(matrix: torch.Tensor, scale: torch.Tensor, element: Element) -> Quantized:
    return Quantized(rounded(matrix / scale, element), scale)
