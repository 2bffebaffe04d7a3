"""Rotations that are learned on calibration text (SpinQuant: Liu et al., 2024), starting from random Hadamard matrices.

R1, of the residual stream, is one for the inputs of q, k, v and of the first feed-forward projection in all layers; R2
is one for all heads of a layer, at the input of the attention's output projection; R4, at the input of the second
feed-forward projection, stays a Hadamard matrix. R3 is that of caches, `kv=int4/hadamard`. `outliers.calibrate` learns
them, see `outliers.quantization.remedies.learning`.
"""

import torch

from outliers.quantization.magnitudes import Magnitudes
from outliers.quantization.remedies.hadamard import drawn, rotate

SEED = 0  # of the matrices that learning starts from


def fit(weight: torch.Tensor, magnitudes: Magnitudes, _steps: float) -> torch.Tensor:
    """The matrix (features or head size, the same) that was learned for an input, or what a Hadamard one is made of."""
    made = drawn(weight, SEED)
    return made if magnitudes.learned is None else magnitudes.learned.to(made)


def turn(matrix: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Rows (rows, features) times the matrix, in parts of as many features as it has; it is its own inverse on the
    other operand, see `rotate`."""
    if made.ndim == 1:
        return rotate(matrix, made)
    return (matrix.to(made.dtype).unflatten(1, (-1, len(made))) @ made).flatten(1)
