"""The reference for integers: quantized matrices, and absmax and zeropoint codes in plain torch.

Rounding is to nearest, ties to even; codes of 8 bits are clipped to [-127, 127] (LLM.int8(), section 2.1). Weights are
stored as in `torch.nn.Linear`, (outputs, features), so a group of either operand is a row, a part of a row, or the
whole tensor.
"""

from typing import NamedTuple

import torch

from outlier_kernels.formats import FORMATS, Format, Quantizer

CODE_MAX = 127


class Quantized(NamedTuple):
    """A matrix in a number format: `matrix ≈ (codes - zero_point) * scale`.

    codes: (rows, features), int8 or another dtype. scale: float (rows, 1), (1, 1), or (rows, groups) if groups of
    consecutive features of a row have their own. zero_point: float whole numbers in the shape of `scale`, not clipped
    to 8 bits. code_sums: float whole numbers (rows, groups), the sum of each group's codes. The last two are None for a
    symmetric format.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None = None
    code_sums: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """Return the matrix that the codes stand for: float (rows, features), with values of integer codes clamped to
        the largest float.

        Rounding can put the largest value of a group beyond it. Floating-point codes need no clamp, because the product
        of the scale and the largest code is exact.
        """
        if self.codes.is_floating_point():
            return self.codes.to(self.scale.dtype) * self._spread(self.scale)
        values = self.codes.to(self.scale.dtype)
        values = values if self.zero_point is None else values - self._spread(self.zero_point)
        scale = self._spread(self.scale + 0 * self.scale)  # NaN where it is infinite, which no clamp hides
        largest = torch.finfo(scale.dtype).max
        return (values * scale).clamp_(-largest, largest)

    @property
    def has_exact_sums(self) -> bool:
        """Whether products with the matrix are sums of int8 codes over all features, which are scaled afterwards."""
        return self.codes.dtype == torch.int8 and self.group is None

    @property
    def group(self) -> int | None:
        """How many consecutive features of a row share a scale; None if all of them do."""
        groups = self.scale.shape[1]
        return None if groups == 1 else self.codes.shape[1] // max(groups, 1)

    def _spread(self, of_groups: torch.Tensor) -> torch.Tensor:
        return of_groups if self.group in (None, 0, 1) else of_groups.repeat_interleave(self.group, 1)


def quantize_integers(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """Quantize a floating-point matrix (rows, features) to integers, absmax or zeropoint (equations 1-3).

    Codes of B bits are in [-(2^(B-1) - 1), 2^(B-1) - 1]; 8 bits are the paper's. Scales are float32 (float64 for
    float64 input) and at least the smallest normal number. An all-zero absmax group has scale 1, a constant zeropoint
    group has normalized dynamic range 1. NaN and inf are not refused: they make the group's scale NaN or inf, so that
    every product with it is NaN or inf too and nothing is hidden.
    """
    matrix = matrix if matrix.dtype == torch.float64 else matrix.float()
    format = FORMATS[quantizer.format]
    code_max = largest_code(format)
    dims = 1 if quantizer.per_row else (0, 1)
    low, high = matrix.amin(dims, keepdim=True), matrix.amax(dims, keepdim=True)
    if quantizer.symmetric:
        scale = absmax_scale(torch.maximum(high, -low), code_max)
        return Quantized(round_integers(matrix / scale, format).to(torch.int8), scale)
    dynamic_range, zero_point = dynamic_range_and_zero_point(low, high, code_max)
    codes = round_integers(matrix * dynamic_range, format, zero_point)
    # The sums are exact in float32: LARGEST_K · 127 < 2^24.
    return Quantized(codes.to(torch.int8), 1 / dynamic_range, zero_point, codes.sum(1, keepdim=True))


def largest_code(format: Format) -> int:
    """Return the largest code of an integer format; the smallest is its negative."""
    return 2 ** (format.bits - 1) - 1


def round_integers(scaled: torch.Tensor, format: Format, zero_point: torch.Tensor | None = None) -> torch.Tensor:
    """Round values divided by their scale to codes, in place."""
    codes = scaled.round_() if zero_point is None else scaled.round_().add_(zero_point)
    return codes.clamp_(-largest_code(format), largest_code(format))


def absmax_scale(largest: torch.Tensor, code_max: float = CODE_MAX) -> torch.Tensor:
    """Return the scales of groups with these largest magnitudes (equation 3), at least the smallest normal number,
    because subnormal numbers have few digits."""
    scale = (largest / code_max).clamp_(min=torch.finfo(largest.dtype).tiny)
    return scale.masked_fill_(largest == 0, 1)


def dynamic_range_and_zero_point(
    low: torch.Tensor, high: torch.Tensor, code_max: int = CODE_MAX
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normalized dynamic ranges and zero points of groups with these smallest and largest entries (equations 1,
    2)."""
    half = high / 2 - low / 2  # half of the range, because the range may exceed the largest float
    dynamic_range = torch.full_like(half, code_max).div_(half).clamp_(max=1 / torch.finfo(half.dtype).tiny)
    dynamic_range.masked_fill_(high - low == 0, 1)
    return dynamic_range, -(dynamic_range * low).round_() - code_max
