"""Randomized Hadamard transforms, which spread a large value over all features (QuaRot: Ashkboos et al., 2024)."""

from functools import cache

import torch

# Number of features that one small product combines, by device: few instructions and passes over memory on a CPU, two
# launches on a GPU.
RADIX = {"cpu": 32, "cuda": 128}


def random_rotation(weight: torch.Tensor, seed: float) -> torch.Tensor:
    """Return the random parts of a rotation of a weight's features, in float32 at least.

    These are random signs (features,), followed by the random orthogonal factor (m, m) row by row, where m is the odd
    part of the width. A width has one rotation per seed.
    """
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


def rotate(matrix: torch.Tensor, fitted: torch.Tensor) -> torch.Tensor:
    """Multiply rows (rows, features) of a weight or of hidden states by D · (H/√n ⊗ Q).

    D are the signs and Q is the orthogonal factor of `fitted`, the result of `random_rotation`; H is the Hadamard
    matrix of size n, the largest power of two that divides the width. One function transforms both operands of a
    product, because T⁻ᵀ = T for an orthogonal T. H is a
    Kronecker product of small Hadamard matrices; each is applied along its own axis, the last one together with Q.
    """
    rows, width = matrix.shape
    power = _power_of_two(width)
    signs, factor = fitted[:width], fitted[width:].view(width // power, -1)
    matrix = (matrix.to(fitted.dtype) * signs).contiguous()
    done, radix = 1, RADIX.get(matrix.device.type, 32)  # done: the product of the sizes of the factors applied so far
    while power > radix:
        matrix = _hadamard(radix, factor.dtype, factor.device) @ matrix.view(rows * done, radix, -1)
        done, power = done * radix, power // radix
    last = _hadamard(power, factor.dtype, factor.device)
    last = torch.kron(last, factor) if len(factor) > 1 else last
    return (matrix.reshape(-1, len(last)) @ last).view(rows, width)


def _power_of_two(width: int) -> int:
    """Return the largest power of two that divides a width."""
    return width & -width


@cache
@torch.inference_mode(False)
def _hadamard(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return Sylvester's Hadamard matrix (size, size), scaled to be orthogonal."""
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    once = torch.tensor([[1, 1], [1, -1]], dtype=dtype, device=device) / 2**0.5
    while len(matrix) < size:
        matrix = torch.kron(matrix, once)
    return matrix
