"""The compiled passes on CPUs against the reference, bit by bit, with hostile inputs."""

import numpy as np
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from outlier_kernels import reference
from outlier_kernels.cpu import codes, plain
from outlier_kernels.formats import Quantizer
from outlier_kernels.reference import Exact, Quantized

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TINY = 2.0**-149  # the smallest subnormal of float32
UNITS = (1.0, 0.05, 3e7, 1e36, 2.6e36, 1e-6, 1e-38, TINY, 3 * TINY)  # an entry is up to 130 of them
OFFSETS = (0.0, 0.0, -40.0, 1e3, -1e5, 2.0**22, 3e9, 1e38)  # how far from 0, in units
HOSTILE = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, TINY, -TINY, 1e-38, 65504.0, -65520.0, 3.4e38, 6.0)
THRESHOLDS = st.sampled_from([None, 6.0, 0.1, 64.0, 1e-40, 1e30, float("inf")])
SIDES = st.integers(1, 7)
# One after the other, what a view of a matrix is to have: rows of columns, columns of rows, and rows that are the same.
LAYOUTS = {
    "contiguous": lambda matrix: matrix.contiguous(),
    "columns of a wider one": lambda matrix: torch.nn.functional.pad(matrix, (3, 2), value=7.0)[:, 3:-2],
    "every other column": lambda matrix: matrix.repeat_interleave(2, 1)[:, ::2],
    "transposed": lambda matrix: matrix.T.contiguous().T,
    "rows of a longer one": lambda matrix: matrix.repeat_interleave(3, 0)[::3],
    "one row in all places": lambda matrix: matrix[:1].expand(matrix.shape),
    "negated when it is read": lambda matrix: torch._neg_view(-matrix),
}


@st.composite
def matrices(draw, rows: int, features: int, dtypes=DTYPES) -> torch.Tensor:
    """Whole and half numbers of some unit around an offset, row by row, among them what is hostile."""
    whole = draw(arrays(np.float64, (rows, features), elements=st.integers(-260, 260).map(lambda number: number / 2)))
    unit, offset = (
        draw(arrays(np.float64, (rows, 1), elements=st.sampled_from(values), fill=st.nothing()))
        for values in (UNITS, OFFSETS)
    )
    if draw(st.booleans()):  # most groups as they are in models
        unit[:], offset[:] = draw(st.sampled_from(UNITS)), 0
    with np.errstate(over="ignore", invalid="ignore"):
        matrix = ((whole + offset) * unit).astype(np.float32)
    places = st.tuples(st.integers(0, rows - 1), st.integers(0, features - 1))
    for place, value in draw(st.lists(st.tuples(places, st.sampled_from(HOSTILE)), max_size=3)):
        matrix[place] = value
    for feature, value in draw(
        st.dictionaries(st.integers(0, features - 1), st.sampled_from([6.0, 70.0, 1e31]), max_size=2)
    ).items():
        matrix[draw(st.integers(0, rows - 1)), feature] = value
    layout = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))]
    return layout(torch.from_numpy(matrix).to(draw(st.sampled_from(dtypes))))


def quantizers(operand: str):
    return st.builds(Quantizer, st.just("int8"), st.sampled_from(["tensor", operand]), st.booleans())


def assert_same(result: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    """Bit by bit but for the signs of zeros, and where there are no numbers."""
    if expected is None:
        assert result is None
        return
    assert result.dtype == expected.dtype
    torch.testing.assert_close(result, expected.expand(result.shape), rtol=0, atol=0, equal_nan=True)


def numbers(outputs: torch.Tensor) -> torch.Tensor:
    """NaN for all that is no number: which infinity or NaN comes out depends on what meets a scale that is none."""
    return outputs.masked_fill(~outputs.isfinite(), torch.nan)


@given(st.data(), SIDES, SIDES)
@settings(deadline=None, max_examples=150)
def test_extremes(data, rows, features):
    x = codes.as_rows(data.draw(matrices(rows, features)))
    for found, expected in zip(codes.extremes(x), (x.float().amin(0), x.float().amax(0)), strict=True):
        assert_same(found, expected)


@given(st.data(), SIDES, SIDES, THRESHOLDS)
@settings(deadline=None, max_examples=150)
def test_outlier_features(data, rows, features, threshold):
    x = data.draw(matrices(rows, features))
    none = torch.zeros(features, dtype=torch.bool)
    expected = none if threshold is None else reference.outlier_columns(x.float(), threshold)
    assert codes.outlier_features(codes.as_rows(x), threshold).tolist() == expected.nonzero()[:, 0].tolist()
    found = codes.outlier_features(codes.as_rows(x), threshold, in_float16=True)
    assert found.tolist() == reference.quantize_bitsandbytes(x, threshold)[1].nonzero()[:, 0].tolist()


def where_finite(quantized: Quantized) -> Quantized:
    """Codes and zero points of groups whose scale is a number; where it is none, they mean nothing."""
    scale = quantized.scale.expand(len(quantized.codes), 1)
    known = scale.isfinite()
    given = zip(Quantized._fields, quantized, strict=True)
    return Quantized(
        *(
            None if value is None else scale if name == "scale" else value.float().masked_fill(~known, 0)
            for name, value in given
        )
    )


@given(st.data(), SIDES, SIDES, quantizers("row"), st.sampled_from([torch.int8, torch.uint8]))
@settings(deadline=None, max_examples=150)
def test_quantize(data, rows, features, quantizer, dtype):
    x = data.draw(matrices(rows, features))
    outliers = torch.tensor(data.draw(st.lists(st.booleans(), min_size=features, max_size=features)))
    if not quantizer.symmetric:
        dtype = torch.int8
        assume(not outliers.all())
    found = codes.quantize(codes.as_rows(x), quantizer, outliers.nonzero()[:, 0], torch.empty(x.shape, dtype=dtype))
    whole = torch.zeros(x.shape, dtype=torch.int8)
    if outliers.all():
        expected = Quantized(whole, torch.ones(1, 1))
    else:
        expected = reference.quantize(x[:, ~outliers], quantizer)
        whole[:, ~outliers] = expected.codes
    expected = expected._replace(codes=whole, code_sums=whole.sum(1, keepdim=True, dtype=torch.float32))
    found = found._replace(codes=found.codes.to(torch.int16) - 128 * (dtype == torch.uint8))
    for one, other in zip(where_finite(found), where_finite(expected), strict=True):
        assert_same(one, other)


@given(st.data(), SIDES, SIDES, THRESHOLDS, st.sampled_from([torch.int8, torch.uint8]))
@settings(deadline=None, max_examples=150)
def test_quantize_bitsandbytes(data, rows, features, threshold, dtype):
    x = data.draw(matrices(rows, features))
    expected, outliers = reference.quantize_bitsandbytes(x, threshold)
    rows_of = codes.as_rows(x)
    found = codes.quantize_bitsandbytes(rows_of, threshold, outliers.nonzero()[:, 0], torch.empty(x.shape, dtype=dtype))
    found = found._replace(codes=found.codes.to(torch.int16) - 128 * (dtype == torch.uint8))
    expected = expected._replace(code_sums=expected.codes.sum(1, keepdim=True, dtype=torch.float32))
    for one, other in zip(where_finite(found), where_finite(expected), strict=True):
        assert_same(one, other)


@given(st.data(), SIDES, SIDES, SIDES, quantizers("row"), quantizers("column"), THRESHOLDS)
@settings(deadline=None, max_examples=150)
def test_linear(data, tokens, features, outputs, activations, weights, threshold):
    x, exact = data.draw(matrices(tokens, features)), data.draw(matrices(outputs, features))
    bias = data.draw(st.none() | matrices(1, outputs).map(lambda row: row[0].resolve_neg()))
    weight = reference.quantize(exact, weights)
    for of_exact in (None, Exact(exact, weights)):
        given = x, weight, bias, activations, threshold, of_exact
        assert_same(numbers(plain.linear(*given)), numbers(reference.linear(*given)))


@given(st.data(), SIDES, SIDES, SIDES, THRESHOLDS)
@settings(deadline=None, max_examples=150)
def test_linear_bitsandbytes(data, tokens, features, outputs, threshold):
    x, exact = data.draw(matrices(tokens, features)), data.draw(matrices(outputs, features))
    bias = data.draw(st.none() | matrices(1, outputs).map(lambda row: row[0].resolve_neg()))
    weight = reference.quantize_bitsandbytes(exact)[0]
    given = x, weight, bias, threshold
    assert_same(numbers(plain.linear_bitsandbytes(*given)), numbers(reference.linear_bitsandbytes(*given)))
