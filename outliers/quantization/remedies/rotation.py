"""Rotations that are learned on calibration text (SpinQuant: Liu et al., 2024), starting from random Hadamard matrices.

R1, of the residual stream, is shared by the inputs of q, k, v and of the first feed-forward projection in all layers;
R2 is shared by all heads of a layer, at the input of the attention's output projection; R4, at the input of the second
feed-forward projection, stays a Hadamard matrix. R3 belongs to caches, `kv=int4/hadamard`. `outliers.calibrate` learns
the rotations, see `outliers.quantization.remedies.learning`.
"""

import torch

from outliers.quantization.magnitudes import InputSummary
from outliers.quantization.remedies.hadamard import random_rotation, rotate

SEED = 0  # of the matrices that learning starts from


def fit(weight: torch.Tensor, magnitudes: InputSummary, _steps: float) -> torch.Tensor:
    """Return the learned matrix (size, size) of an input, where size is its features or a head's; or the parts of a
    Hadamard matrix if nothing was learned."""
    fitted = random_rotation(weight, SEED)
    return fitted if magnitudes.learned is None else magnitudes.learned.to(fitted)


def multiply(matrix: torch.Tensor, fitted: torch.Tensor) -> torch.Tensor:
    """Multiply rows (rows, features) by the fitted matrix, in chunks of its size; the same function serves both
    operands, see `rotate`."""
    if fitted.ndim == 1:
        return rotate(matrix, fitted)
    return (matrix.to(fitted.dtype).unflatten(1, (-1, len(fitted))) @ fitted).flatten(1)
