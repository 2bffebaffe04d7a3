"""Fake quantization in numpy float64, written from the definitions of the formats; nothing of ours computes in it."""

from functools import partial

import ml_dtypes
import numpy as np
import torch
from outlier_kernels.formats import Quantizer

INTEGERS = {"int8": 127, "int6": 31, "int4": 7}  # the largest code
MANTISSAS = {"mxint8": 8, "bfp8": 8, "bfp6": 6, "bfp4": 4}  # bits, in two's complement
TYPES = {
    **dict.fromkeys(("fp8-e4m3", "mxfp8-e4m3"), ml_dtypes.float8_e4m3fn),
    **dict.fromkeys(("fp8-e5m2", "mxfp8-e5m2"), ml_dtypes.float8_e5m2),
    "mxfp6-e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp6-e3m2": ml_dtypes.float6_e3m2fn,
    **dict.fromkeys(("mxfp4", "nvfp4"), ml_dtypes.float4_e2m1fn),
}
E4M3_LARGEST = 448


def values_of(kind: type) -> np.ndarray:
    """All finite values of a type of ml_dtypes, in order."""
    values = np.arange(2 ** ml_dtypes.finfo(kind).bits, dtype=np.uint8).view(kind).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def nearest(numbers: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Each number replaced by the nearest of some values, in order."""
    return values[np.searchsorted((values[1:] + values[:-1]) / 2, numbers)]


def values_under(matrix: np.ndarray, quantizer: Quantizer) -> np.ndarray:
    """What becomes of a matrix (rows, features)."""
    name, axis = quantizer.format, None if quantizer.granularity == "tensor" else -1
    groups = matrix.reshape(len(matrix), -1, quantizer.group or matrix.shape[1])
    of_group = partial(np.max, axis=axis, keepdims=True)
    largest = of_group(np.abs(groups))
    if name in INTEGERS and quantizer.symmetric:
        scale = largest / INTEGERS[name]
        values = np.rint(groups / scale) * scale
    elif name in INTEGERS:
        most, span = INTEGERS[name], of_group(groups) + of_group(-groups)
        step = np.where(span == 0, 1, span / (2 * most))
        zero_point = np.rint(of_group(-groups) / step) - most
        values = ((np.rint(groups / step) + zero_point).clip(-most, most) - zero_point) * step
    elif name in MANTISSAS:
        half = 2 ** (MANTISSAS[name] - 1)
        scale = 2 ** (np.floor(np.log2(largest)) + 2 - MANTISSAS[name])
        values = np.rint(groups / scale).clip(-half, half - 1) * scale
    elif name in TYPES:
        known = values_of(TYPES[name])
        values = nearest(groups / (scale := scale_of_floats(name, largest, known[-1])), known) * scale
    elif name == "int4-e4m3":  # FireQ: scales in e4m3 times a power of two of the matrix
        power = 2 ** np.ceil(np.log2(largest.max() / 7 / E4M3_LARGEST))
        scale = nearest(largest / 7 / power, values_of(ml_dtypes.float8_e4m3fn)) * power
        values = np.rint(groups / scale).clip(-8, 7) * scale
    elif name == "int4-in-int8":  # QServe, section 4.1: rows to [-119, 119], and their groups to [0, 15]
        scale = np.abs(matrix).max(axis, keepdims=True)[..., None] / 119
        codes = np.rint(groups / scale)
        most, least = of_group(codes), -of_group(-codes)
        step = np.rint((most - least) / 15).clip(1)
        zero_point = np.rint(-least / step).clip(0, 15)
        values = ((np.rint(codes / step) + zero_point).clip(0, 15) - zero_point) * step * scale
    else:  # COMET, section 3.2: a fifth of the groups, but one at least, in 8 bits
        most = np.where(np.arange(groups.shape[1]) < max(1, groups.shape[1] // 5), 127, 7)[:, None]
        values = np.rint(groups * most / largest) * largest / most
    return values.reshape(matrix.shape)


def scale_of_floats(name: str, largest: np.ndarray, most: float) -> np.ndarray:
    """The scales of groups with these largest magnitudes, for elements of which the largest is `most`."""
    if name.startswith("fp8"):
        return largest / most
    if name.startswith("mx"):
        return 2 ** (np.floor(np.log2(largest)) - np.floor(np.log2(most)))
    of_matrix = largest.max() / (most * E4M3_LARGEST)  # nvfp4
    return nearest(largest / most / of_matrix, values_of(ml_dtypes.float8_e4m3fn)) * of_matrix


def product_under(
    x: torch.Tensor,
    weight: torch.Tensor,
    activations: Quantizer | None,
    weights: Quantizer | None,
    threshold: float | None = None,
) -> torch.Tensor:
    """The product of x (tokens, features) and a weight (outputs, features), both float64, with features that hold an
    outlier multiplied as they are."""
    outliers = (x.abs() >= (threshold or torch.inf)).any(0)
    product = x[:, outliers] @ weight[:, outliers].T
    if outliers.all():
        return product
    operands = (x[:, ~outliers], activations), (weight[:, ~outliers], weights)
    x, weight = (torch.from_numpy(values_under(of.numpy(), by)) if by else of for of, by in operands)
    return product + x @ weight.T


def product_of_bitsandbytes(x: torch.Tensor, weight: torch.Tensor, threshold: float) -> torch.Tensor:
    """The product of LLM.int8() as bitsandbytes has it: in float16, with scales of what is below the threshold."""
    halves, weight = (matrix.float().half().float().numpy() for matrix in (x, weight))
    outliers = (np.abs(halves) >= threshold).any(0)
    # A reciprocal times 127, because values of float16 often lie halfway between two codes.
    steps = 1 / np.abs(halves * (np.abs(halves) < threshold)).max(1, keepdims=True) * np.float32(127)
    steps_of_weight = 1 / np.abs(weight).max(1, keepdims=True) * np.float32(127)
    codes, codes_of_weight = np.rint(halves * steps), np.rint(weight * steps_of_weight)
    product = codes[:, ~outliers] @ codes_of_weight[:, ~outliers].T / steps / steps_of_weight.T
    return torch.from_numpy(product + x.numpy()[:, outliers] @ (codes_of_weight / steps_of_weight)[:, outliers].T)
