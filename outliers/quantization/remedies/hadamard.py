"""An orthogonal change of the features spreads a large value over all of them (QuaRot: Ashkboos et al., 2024)."""

from functools import cache

import torch

RADIX = 32  # features that one small product takes together: the fewest instructions, and few passes over memory


def drawn(weight: torch.Tensor, seed: float) -> torch.Tensor:
    """The random parts of a rotation of so many features, in float32 at least: random signs (features,), and behind
    them the random orthogonal factor (m, m) row by row, m the odd part of the width. One width has one rotation a
    seed."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return _drawn(weight.shape[1], int(seed)).to(weight.device, dtype, copy=True)


@cache
def _drawn(width: int, seed: int) -> torch.Tensor:
    generator, odd = torch.Generator().manual_seed(seed), width // _power_of_two(width)
    signs = torch.randint(2, (width,), generator=generator, dtype=torch.float64) * 2 - 1
    factor = torch.ones(1, 1, dtype=torch.float64)
    if odd > 1:  # its columns' signs make it uniform among the orthogonal matrices (Mezzadri, 2007)
        factor, upper = torch.linalg.qr(torch.randn(odd, odd, generator=generator, dtype=torch.float64))
        factor = factor * upper.diagonal().sign()
    return torch.cat([signs, factor.flatten()])


def rotate(matrix: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    """Rows (rows, features) times D · (H/√n ⊗ Q): D the signs, H the Hadamard matrix of n, the power of two in the
    width, Q the orthogonal factor.

    It is its own inverse on the other operand: an orthogonal T is its T⁻ᵀ. H is a Kronecker product of small Hadamard
    matrices, and each is applied along an axis of its own, the last one together with Q.
    """
    rows, width = matrix.shape
    power = _power_of_two(width)
    signs, factor = made[:width], made[width:].view(width // power, -1)
    matrix = (matrix.to(made.dtype) * signs).contiguous()
    done = 1  # features that the factors so far tell apart
    while power > RADIX:
        matrix = _hadamard(RADIX, factor) @ matrix.view(rows * done, RADIX, -1)
        done, power = done * RADIX, power // RADIX
    last = _kron(_hadamard(power, factor), factor)
    return (matrix.reshape(-1, len(last)) @ last).view(rows, width)


def _power_of_two(width: int) -> int:
    """The largest power of two that divides a width."""
    return width & -width


def _hadamard(size: int, like: torch.Tensor) -> torch.Tensor:
    """Sylvester's matrix (size, size), orthogonal."""
    once, matrix = like.new_tensor([[1, 1], [1, -1]]) / 2**0.5, like.new_ones(1, 1)
    while len(matrix) < size:
        matrix = _kron(matrix, once)
    return matrix


def _kron(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The Kronecker product of two square matrices."""
    return (a[:, None, :, None] * b[None, :, None, :]).reshape(len(a) * len(b), -1)
