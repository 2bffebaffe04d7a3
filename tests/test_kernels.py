"""The reference kernels against the equations, written once more in numpy float64."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from outlier_kernels import reference

matrices = arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.floats(-1e6, 1e6))


def numpy_quantize(group: np.ndarray, symmetric: bool):
    """Codes, and the numbers they stand for, of one group."""
    if symmetric:
        scale = np.abs(group).max() / 127
        scale = 1.0 if scale == 0 else scale
        codes = np.rint(group / scale).clip(-127, 127)
        return codes, codes * scale
    span = group.max() - group.min()
    dynamic_range = 1.0 if span == 0 else 254 / span
    zero_point = -np.rint(dynamic_range * group.min()) - 127
    codes = (np.rint(dynamic_range * group) + zero_point).clip(-127, 127)
    return codes, (codes - zero_point) / dynamic_range


def numpy_quantize_matrix(matrix: np.ndarray, symmetric: bool, per_row: bool):
    """The same for a matrix, row by row or as one group."""
    if not per_row:
        return numpy_quantize(matrix, symmetric)
    parts = [numpy_quantize(row, symmetric) for row in matrix]
    return np.stack([codes for codes, _ in parts]), np.stack([values for _, values in parts])


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@given(matrix=matrices)
@example(matrix=np.zeros((2, 3)))
@example(matrix=np.full((2, 3), 7.3))
@example(matrix=np.array([[0.5, 1.5, 2.5, 127.0], [-0.5, -1.5, -2.5, -127.0]]))  # ties to even
@example(matrix=np.array([[1e-310, -1e-320], [-0.0, 0.0]]))
@settings(deadline=None)
def test_quantize_is_the_equation(symmetric, per_row, matrix):
    quantized = reference.quantize(torch.from_numpy(matrix), symmetric, per_row)
    with np.errstate(over="ignore", invalid="ignore"):
        codes, values = numpy_quantize_matrix(matrix, symmetric, per_row)
    if np.isfinite(values).all():
        np.testing.assert_array_equal(quantized.codes, codes)
        np.testing.assert_allclose(quantized.dequantize(), values, rtol=1e-12, atol=0)


@given(matrix=arrays(np.float32, (4, 6), elements=st.floats(-100, 100, width=32)))
@settings(deadline=None)
def test_absmax_error_is_at_most_half_a_step(matrix):
    quantized = reference.quantize(torch.from_numpy(matrix), symmetric=True, per_row=True)
    error = (quantized.dequantize() - torch.from_numpy(matrix)).abs()
    assert (error <= quantized.scale * 0.50001 + 1e-37).all()  # subnormal scales have few bits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_input_is_quantized_in_float32(dtype):
    matrix = torch.randn(5, 33).to(dtype)
    for symmetric in (True, False):
        got, want = (reference.quantize(m, symmetric, True) for m in (matrix, matrix.float()))
        assert torch.equal(got.codes, want.codes)
        assert torch.equal(got.scale, want.scale)


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 7, 5), (17, 64, 8), (40, 5140, 9), (2, reference.LARGEST_K, 2)])
@pytest.mark.parametrize("path", ["native", "float64", "padded"])
def test_int8_matmul_is_exact(monkeypatch, path, shape):
    m, k, n = shape
    a, b = torch.randint(-127, 128, (m, k), dtype=torch.int8), torch.randint(-127, 128, (n, k), dtype=torch.int8)
    a[0], b[0] = 127, 127  # the largest sum that there is
    if path == "float64":
        monkeypatch.setattr("torch.cpu._is_vnni_supported", lambda: False)
    product = reference._padded_int_mm if path == "padded" else reference.int8_matmul
    got = product(a, b)
    assert got.dtype == torch.int32
    np.testing.assert_array_equal(got, a.numpy().astype(np.int64) @ b.numpy().astype(np.int64).T)


def test_int8_matmul_refuses_what_it_cannot_do():
    codes = torch.zeros(2, 3, dtype=torch.int8)
    with pytest.raises(ValueError, match="int8"):
        reference.int8_matmul(codes, codes.float())
    with pytest.raises(ValueError, match=r"\(m, k\) and \(n, k\)"):
        reference.int8_matmul(codes, torch.zeros(2, 4, dtype=torch.int8))
    wide = torch.zeros(1, reference.LARGEST_K + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="overflow"):
        reference.int8_matmul(wide, wide)


@pytest.mark.parametrize("per_row", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("offset", [0, 3, 1e4])
def test_matmul_is_the_product_of_what_the_codes_stand_for(symmetric, per_row, offset):
    """With an offset far from 0 the zero points outgrow 8 bits, and their products int32."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(13, 50, generator=generator, dtype=torch.float64) + offset
    b = torch.randn(11, 50, generator=generator, dtype=torch.float64) + offset
    a, b = (reference.quantize(matrix, symmetric, rows) for matrix, rows in zip((a, b), per_row, strict=True))
    want = a.dequantize() @ b.dequantize().T
    torch.testing.assert_close(reference.matmul(a, b), want, rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_inf_are_not_hidden(symmetric, poison):
    a = torch.randn(4, 16)
    a[2, 5] = poison
    a, b = (reference.quantize(matrix, symmetric, True) for matrix in (a, torch.randn(3, 16)))
    product = reference.matmul(a, b)
    assert not torch.isfinite(product[2]).any()
    assert torch.isfinite(product[[0, 1, 3]]).all()


def test_outlier_columns_include_the_threshold():
    x = torch.zeros(3, 5)
    x[0, 1], x[2, 2], x[1, 4] = 6.0, -6.0, 5.9999
    assert reference.outlier_columns(x, 6.0).tolist() == [False, True, True, False, False]
