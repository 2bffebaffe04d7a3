"""Products that train, on every path, against the reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outlier_kernels import reference_products
from outlier_kernels.cpu import products as cpu_products

from tests.conftest import pairwise
from tests.kernels.test_kernels import of_finite_floats

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1, 1), (1, 4, 4), (5, 1, 3), (300, 33, 7), (700, 130, 600), (2, 3, 77, 5, 40), (3, 1, 40, 77, 1)]


def laid_out(*shape: int) -> dict[str, torch.Tensor]:
    """Random matrices that lie in memory in the ways in which they come."""
    *leading, rows, features = shape
    heads = torch.randn(*leading[:-1], rows, *leading[-1:], features)  # as those of an attention lie
    return {
        "rows": torch.randn(shape),
        "columns": torch.randn(*leading, features, rows).mT,
        "heads": heads.movedim(-2, -3) if leading else torch.randn(rows, 2 * features)[:, features:],
        "neither": torch.randn(*leading, rows, 2 * features)[..., ::2],
    }


def places(share: float, *shape: int) -> torch.Tensor | None:
    """Of each matrix others, and not as many."""
    if not share:
        return None
    found = torch.where(torch.rand(shape) < share, torch.arange(shape[-1]), -1).sort(-1).values
    return found[found >= 0] if found.ndim == 1 else found[..., -1 - int(share * shape[-1]) :]


# Share of outliers, share of exact columns, and seed.
PARTS = [(0.0, 0.0, None), (0.0, 0.0, 2**62 + 5), (0.0, 0.3, None), (0.1, 0.0, None), (0.3, 0.3, 7), (1.0, 1.0, None)]


@pairwise("shape parts layout dtype", SHAPES, PARTS, ["rows", "columns", "heads", "neither"], DTYPES)
def test_products_on_a_cpu_are_those_of_the_reference(shape, parts, layout, dtype):
    """Bit for bit where everything is multiplied in int8."""
    torch.manual_seed(0)
    share, of_columns, seed = parts
    *leading, m, k, n = shape
    left, right = laid_out(*leading, m, k)[layout].to(dtype), laid_out(*leading, n, k)[layout]
    given = left, right, places(share, *leading, k), places(of_columns, *leading, n), seed
    found, wanted = cpu_products.product(*given), reference_products.product(*given)
    assert found.dtype == dtype
    if not share and not of_columns:
        assert torch.equal(found, wanted)
    else:
        eps = torch.finfo(dtype).eps if dtype != torch.float32 else 0
        torch.testing.assert_close(found, wanted, rtol=eps, atol=1e-5)


@settings(max_examples=300, deadline=None)
@given(st.floats(2.0**-70, 2.0**70, width=32), st.integers(1, 126), st.integers(-2, 2), st.booleans())
def test_codes_are_those_of_a_division(largest, code, steps, transposed):
    """Also of values that are next to halfway between two codes, at scales from far below to far above 1."""
    tie = np.float32(np.float64(np.float32(largest) / np.float32(127)) * (code + 0.5))
    for _ in range(abs(steps)):
        tie = np.nextafter(tie, np.float32(math.copysign(np.inf, steps)))
    matrix = torch.tensor([[largest, tie, -tie, 0.0], [tie, 0.0, -largest, -tie]])
    wanted = reference_products.quantize_rows(matrix)
    codes, scale = cpu_products.quantize_rows(matrix.mT.contiguous().mT if transposed else matrix)
    assert torch.equal(scale[0, :, None], wanted.scale)
    assert torch.equal(codes[0], wanted.codes)


@settings(max_examples=200, deadline=None)
@given(of_finite_floats(3, 9), of_finite_floats(2, 9), st.booleans(), st.sampled_from([None, 3]))
def test_products_of_all_finite_numbers(left, right, transposed, seed):
    """Bit for bit, also where they are beyond float32, and never NaN."""
    if transposed:
        left, right = (one.mT.contiguous().mT for one in (left, right))
    codes, scale = cpu_products.quantize_rows(left, None, seed)
    wanted = reference_products.quantize_rows(left, None, seed)
    assert torch.equal(scale.view(-1, 1), wanted.scale)
    assert torch.equal(codes[0], wanted.codes)
    found = cpu_products.product(left, right, None, None, seed)
    assert not found.isnan().any()
    assert torch.equal(found, reference_products.product(left, right, None, None, seed))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_are_seen(poison, transposed):
    torch.manual_seed(0)
    left, right = torch.randn(4, 20), torch.randn(3, 20)
    left[2, 5] = poison
    found = cpu_products.product(left.mT.contiguous().mT if transposed else left, right)
    assert not torch.isfinite(found[2]).any()
    assert torch.isfinite(found[[0, 1, 3]]).all()


def test_philox():
    """By the known answers of Random123, its authors' own code."""
    found = reference_products.philox(torch.tensor(0), torch.tensor(0), 0)
    assert tuple(map(int, found)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)


def test_chances_are_even_and_those_of_a_seed():
    matrices = torch.empty(2, 3, 50, 1001)
    found = reference_products.chances(matrices, 3)
    assert torch.equal(found, reference_products.chances(matrices, 3))
    assert (found != reference_products.chances(matrices, 4)).float().mean() > 0.999
    assert found.unique().numel() > 0.98 * found.numel()
    assert found.min() >= 0 and found.max() < 1
    counts = torch.histc(found, 64, 0, 1)
    expected = found.numel() / 64
    assert ((counts - expected).square() / expected).sum() < 110  # chi-squared of 63 degrees, below 1 in 5,000
    neighbours = torch.corrcoef(torch.stack([found[..., 1:].flatten(), found[..., :-1].flatten()]))
    assert neighbours[0, 1].abs() < 0.01
