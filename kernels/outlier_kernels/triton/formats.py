"""Absmax codes of every format whose groups are rows, parts of rows or everything: a kernel that rounds a tile."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from outlier_kernels import reference
from outlier_kernels.formats import E4M3, FORMATS, Format, Quantizer
from outlier_kernels.reference_formats import LEAST_E4M3, LEAST_SHARED
from outlier_kernels.reference_integers import Quantized
from outlier_kernels.states import DTYPES
from outlier_kernels.triton import launch
from outlier_kernels.triton.outlier_features import find_outliers
from outlier_kernels.triton.quantization import join_limits, load_inliers, round_to_even

ENTRIES = 2048  # in a tile
STRIP = 2048  # features at once, at most
TINY, LEAST, OF_E4M3 = (tl.constexpr(number) for number in (torch.finfo(torch.float32).tiny, LEAST_SHARED, LEAST_E4M3))


class Rounding(NamedTuple):
    """The steps from a group's largest magnitude to its scale, and from values divided by the scale to codes.

    divisor: the scale is the largest magnitude divided by it; if 0, the scale is the largest magnitude's power of two
    times `first` and `second`, where the first product is clamped to e8m0. of_matrix: divisor of the matrix's largest
    magnitude, which gives the scale of scales in e4m3; 0 for none. mantissa_bits: of floating-point codes, -1 for
    integers. least_step: smallest step of floating-point codes. smallest, largest: codes.
    """

    divisor: float
    first: float
    second: float
    of_matrix: float
    mantissa_bits: int
    least_step: float
    smallest: float
    largest: float


def rounding_of(format: Format) -> Rounding | None:
    """Return the rounding of a format; None if the kernel does not support it."""
    element, half = format.element, 2.0 ** (format.bits - 1)
    if format.quantizer == "quantize_integers":
        return Rounding(half - 1, 1.0, 1.0, 0.0, -1, 0.0, 1 - half, half - 1)
    if format.quantizer == "quantize_mantissas":
        return Rounding(0.0, 1.0, 2 / half, 0.0, -1, 0.0, -half, half - 1)
    if format.quantizer not in ("quantize_scaled", "quantize_microscaling", "quantize_nvfp4"):
        return None
    least_step = 2.0 ** (element.least_exponent - element.mantissa_bits)
    codes = (element.mantissa_bits, least_step, -element.largest, element.largest)
    if format.quantizer == "quantize_microscaling":
        return Rounding(0.0, 2.0**-element.largest_exponent, 1.0, 0.0, *codes)
    of_matrix = element.largest * E4M3.largest if format.quantizer == "quantize_nvfp4" else 0.0
    return Rounding(element.largest, 1.0, 1.0, of_matrix, *codes)


def serves(matrix: torch.Tensor | Quantized, quantizer: Quantizer | None, dtype: torch.dtype | None = None) -> bool:
    """Return whether `quantize` takes a matrix, or `linear` a weight with activations of a dtype."""
    if quantizer is None or not quantizer.symmetric or rounding_of(FORMATS[quantizer.format]) is None:
        return False
    return dtype in DTYPES if dtype else matrix.dtype in DTYPES and matrix.numel() > 0


def linear(hidden_states: torch.Tensor, *given) -> torch.Tensor:
    """Compute `reference.linear` with hidden states quantized by this kernel."""
    return reference.linear(hidden_states, *given, multiply=_product)


def _product(x: torch.Tensor, weight: Quantized, _bias: None, activations: Quantizer) -> torch.Tensor:
    return reference.matmul(quantize(x, activations) if x.numel() else reference.quantize(x, activations), weight)


def quantize(matrix: torch.Tensor, quantizer: Quantizer) -> Quantized:
    """Compute `reference.quantize`, bit for bit."""
    format, (rows, features) = FORMATS[quantizer.format], matrix.shape
    group = quantizer.group or features
    if features % group:
        raise ValueError(f"groups of {group} features do not divide {features}")
    rounding, groups = rounding_of(format), matrix.reshape(-1, group)
    whole = not quantizer.per_row or rounding.of_matrix
    limits = find_outliers(matrix, None, True).limits if whole else None
    codes = matrix.new_empty(rows, features, dtype=torch.float32 if format.element else torch.int8)
    scale = matrix.new_empty((rows, features // group) if quantizer.per_row else (1, 1), dtype=torch.float32)
    width = min(triton.next_power_of_2(group), STRIP)
    height = max(1, ENTRIES // width)
    launch(
        *(round_tile, (triton.cdiv(len(groups), height),), groups, limits, codes, scale),
        (*groups.shape, *groups.stride()),
        **{name.upper(): number for name, number in rounding._asdict().items()},
        PER_ROW=quantizer.per_row,
        ROWS=height,
        FEATURES=width,
    )
    return Quantized(codes, scale)


@triton.jit
def round_tile(
    matrix,
    limits,
    codes,
    scale,
    sizes,
    PER_ROW: tl.constexpr,
    DIVISOR: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    OF_MATRIX: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    LEAST_STEP: tl.constexpr,
    SMALLEST: tl.constexpr,
    LARGEST: tl.constexpr,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
):
    rows, features, row_stride, feature_stride = sizes
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    inside = row < rows
    matrix += row[:, None] * row_stride
    low, high = tl.full((ROWS,), float("inf"), tl.float32), tl.full((ROWS,), float("-inf"), tl.float32)
    if PER_ROW:
        for start in range(0, features, FEATURES):
            feature = start + tl.arange(0, FEATURES)
            value, inlier = load_inliers(matrix, None, inside, feature, features, feature_stride)
            low, high = join_limits(low, high, value, inlier)
    else:
        low, high = tl.zeros_like(low) + tl.load(limits), tl.zeros_like(low) + tl.load(limits + 1)
    largest = tl.where((high > -low) | (high != high), high, -low)
    step = scale_of(largest, DIVISOR, FIRST, SECOND)
    if OF_MATRIX > 0:
        most, least = tl.load(limits + 1), tl.load(limits)
        most = tl.where((most > -least) | (most != most), most, -least)
        of_matrix = tl.zeros_like(low) + scale_of(most, OF_MATRIX, 1.0, 1.0)
        of_group = tl.div_rn(tl.div_rn(largest, tl.zeros_like(low) + DIVISOR), of_matrix)
        of_group = rounded(of_group, 3, 0.001953125, -448.0, 448.0)
        step = tl.where(of_group < OF_E4M3, OF_E4M3, of_group) * of_matrix
        step = tl.where(largest == 0, 1.0, step)
    tl.store(scale + row * PER_ROW, step, mask=inside)
    for start in range(0, features, FEATURES):
        feature = start + tl.arange(0, FEATURES)
        value, inlier = load_inliers(matrix, None, inside, feature, features, feature_stride)
        value = tl.div_rn(value, tl.zeros_like(value) + step[:, None])
        code = rounded(value, MANTISSA_BITS, LEAST_STEP, SMALLEST, LARGEST)
        address = codes + row[:, None] * features + feature[None, :]
        tl.store(address, code.to(codes.dtype.element_ty), mask=inlier)


@triton.jit
def scale_of(largest, DIVISOR: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """Return the scale of a group; 1 for a group of zeros."""
    if DIVISOR > 0:
        step = tl.div_rn(largest, tl.zeros_like(largest) + DIVISOR)
        step = tl.where(step < TINY, TINY, step)
    else:
        step = power_of_two(largest) * FIRST
        step = tl.where(step < LEAST, LEAST, step) * SECOND
    return tl.where(largest == 0, 1.0, step)


@triton.jit
def power_of_two(value):
    """Compute `reference_formats.power_of_two`."""
    return (value.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def rounded(
    value, MANTISSA_BITS: tl.constexpr, LEAST_STEP: tl.constexpr, SMALLEST: tl.constexpr, LARGEST: tl.constexpr
):
    """Compute `reference_formats.rounded`, or round to integers."""
    if MANTISSA_BITS >= 0:
        step = power_of_two(value)
        step *= 1.0 / (1 << MANTISSA_BITS)
        step = tl.where(step < LEAST_STEP, LEAST_STEP, step)
        code = signed_round(tl.div_rn(value, step)) * step
    else:
        code = signed_round(value)
    return tl.where(code > LARGEST, LARGEST, tl.where(code < SMALLEST, SMALLEST, code))


@triton.jit
def signed_round(value):
    """Round to the nearest integer, ties to even, keeping negative zero."""
    magnitude = tl.abs(value)
    sign = value.to(tl.int32, bitcast=True) ^ magnitude.to(tl.int32, bitcast=True)
    return (round_to_even(magnitude).to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
