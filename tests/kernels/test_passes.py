"""The compiled passes on CPUs against the reference, bit by bit, with hostile inputs."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from outlier_kernels import dispatch, reference
from outlier_kernels.cpu import codes, packed, plain
from outlier_kernels.formats import ROWS, Quantizer
from outlier_kernels.reference import Exact, Quantized

from tests.conftest import pairwise
from tests.kernels.test_kernels import TINY, of_finite_floats
from tests.small_models import needs_int8_units

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
UNITS = (1.0, 0.05, 3e7, 1e36, 2.6e36, 1e-6, 1e-38, TINY, 3 * TINY)  # an entry is up to 130 of them
OFFSETS = (0.0, 0.0, -40.0, 1e3, -1e5, 2.0**22, 3e9, 1e38)  # how far from 0, in units
HOSTILE = (float("nan"), float("inf"), -float("inf"), 0.0, -0.0, TINY, -TINY, 1e-38, 65504.0, -65520.0, 3.4e38, 6.0)
THRESHOLDS = st.sampled_from([None, 6.0, 0.1, 64.0, 1e-40, 1e30, float("inf")])
SIDES = st.integers(1, 7)
# The same matrix by other strides, and two whose memory holds other numbers than their entries.
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
def of_units(draw, rows: int, features: int) -> torch.Tensor:
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
    return layout(torch.from_numpy(matrix).to(draw(st.sampled_from(DTYPES))))


def matrices(rows: int, features: int):
    """As they are in models and next to what could go wrong, and over all of float32."""
    return of_units(rows, features) | of_finite_floats(rows, features)


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


def assert_same_codes(found: Quantized, expected: Quantized) -> None:
    """The same scales, and where they are numbers, the same codes, zero points and sums of codes.

    found: codes of uint8 are 128 larger. Either may be without the sums of its codes.
    """
    assert_same(found.scale, expected.scale)
    sums = None if found.code_sums is None else expected.codes.sum(1, keepdim=True, dtype=torch.float32)
    offset = 128 * (found.codes.dtype == torch.uint8)
    found = found._replace(codes=found.codes.to(torch.int16) - offset)
    hidden = ~found.scale.isfinite()
    for one, other in zip(found, expected._replace(code_sums=sums), strict=True):
        if one is not None or other is not None:
            assert_same(*(value.float().masked_fill(hidden, 0) for value in (one, other)))


@given(st.data(), SIDES, SIDES, quantizers("row"), st.sampled_from([torch.int8, torch.uint8]))
@settings(deadline=None, max_examples=150)
def test_quantize(data, rows, features, quantizer, dtype):
    x = data.draw(matrices(rows, features))
    outliers = torch.tensor(data.draw(st.lists(st.booleans(), min_size=features, max_size=features)))
    if not quantizer.symmetric:
        dtype = torch.int8
        assume(not outliers.all())
    room = torch.empty(x.shape, dtype=dtype)
    found = codes.quantize_without(codes.as_rows(x), quantizer, outliers.nonzero()[:, 0], room)
    whole = torch.zeros(x.shape, dtype=torch.int8)
    if outliers.all():
        expected = Quantized(whole, torch.ones(1, 1))
    else:
        expected = reference.quantize(x[:, ~outliers], quantizer)
        whole[:, ~outliers] = expected.codes
    assert_same_codes(found, expected._replace(codes=whole))


@given(st.data(), SIDES, SIDES, SIDES, quantizers("row"), quantizers("column"), THRESHOLDS)
@settings(deadline=None, max_examples=200)
def test_linear(data, tokens, features, outputs, activations, weights, threshold):
    x, exact = data.draw(matrices(tokens, features)), data.draw(matrices(outputs, features))
    bias = data.draw(st.none() | matrices(1, outputs).map(lambda row: row[0].resolve_neg()))
    weight, made = reference.quantize(exact, weights), codes.quantize(exact, weights)
    assert [part is None for part in made] == [part is None for part in weight]
    assert_same_codes(made, weight)
    for of_exact in (None, Exact(exact, weights)):
        given = x, weight, bias, activations, threshold, of_exact
        assert_same(numbers(plain.linear(*given)), numbers(reference.linear(*given)))


def ordinary(rows: int, features: int):
    """Finite matrices whose groups have no scale that is too large or too small to be multiplied in another order."""
    return of_units(rows, features).map(lambda matrix: matrix.nan_to_num(1.0, 1.0, 1.0).clamp(-1e4, 1e4))


@needs_int8_units
@given(st.data(), SIDES, SIDES, SIDES, st.sampled_from(["tensor", "row"]), THRESHOLDS)
@settings(deadline=None, max_examples=100)
def test_packed_weights(data, tokens, features, outputs, granularity, threshold):
    """Scaled in another order than the reference does it, so equal within the rounding of the parts of each output."""
    x, exact = data.draw(of_units(tokens, features)), data.draw(ordinary(outputs, features))
    assume(not (x.isfinite() & (x.abs() > 1e30)).any())  # which overflow in one order and not in the other
    bias = data.draw(st.none() | ordinary(1, outputs).map(lambda row: row[0].resolve_neg()))
    weight = reference.quantize(exact, Quantizer("int8", "column"))
    given = bias, Quantizer("int8", granularity), threshold
    found = numbers(packed.linear(x, packed.pack(weight), *given))
    expected = numbers(reference.linear(x, weight, *given))
    assert torch.equal(found.isnan(), expected.isnan())
    known = x.float().nan_to_num(0, 0, 0).abs()
    parts = (known + known.amax()) @ weight.dequantize().abs().T + (0 if bias is None else bias.float().abs())
    apart = (found.float() - expected.float()).nan_to_num(0).abs()
    kind = torch.finfo(x.dtype)
    rounding = kind.eps * expected.float().nan_to_num(0).abs() + kind.eps * kind.tiny
    assert (apart <= rounding + 1e-6 * parts + 1e-37).all()


WIDE = [(3, 129, 300), (200, 300, 2049), (64, 777, 65)]  # tokens, features, outputs: more than a strip, several threads
KINDS = [(symmetric, per_row) for symmetric in (True, False) for per_row in (True, False)]


@pytest.fixture
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pairwise("shape layout kind", WIDE, ["contiguous", "transposed"], KINDS)
def test_wide_layers(several_threads, shape, layout, kind):
    (tokens, features, outputs), (symmetric, per_row) = shape, kind
    x, exact = torch.randn(tokens, features) + 0.5, LAYOUTS[layout](torch.randn(outputs, features))
    x[tokens // 2, [1, 7, features - 1]] = torch.tensor([30.0, -50.0, 8.0])
    exact[: outputs // 2, 7] *= 20  # the extremes of some rows and not of others
    activations = Quantizer("int8", "row" if per_row else "tensor", symmetric)
    for of_weight in KINDS:
        weights = Quantizer("int8", "column" if of_weight[1] else "tensor", of_weight[0])
        weight, made = reference.quantize(exact, weights), codes.quantize(exact, weights)
        assert_same_codes(made, weight)
        for threshold, of_exact in ((None, None), (6.0, None), (6.0, Exact(exact, weights))):
            given = LAYOUTS[layout](x), weight, torch.randn(outputs), activations, threshold, of_exact
            assert_same(plain.linear(*given), reference.linear(*given))


ROWS_OF_WEIGHTS = {  # whose third feature is an outlier
    "its largest is there": [1.0, -2.0, 3.0, 0.5],
    "its least is there": [1.0, 2.0, -3.0, 0.5],
    "its second largest is there": [1.0, -4.0, 3.0, 4.0],
    "tied with one outside": [3.0, -2.0, 3.0, -3.0],
    "nearly the largest": [1.0, -2.0, 2.99999976, 3.0],
    "its largest is there, of code 126": [-1.185336709022522, 0.05, 0.11520548164844513, -0.5],
    "and far from 0": [9.897614479064941, 9.95, 10.211216926574707, 10.0],
    "constant": [3.0, 3.0, 3.0, 3.0],
    "zeros": [0.0, -0.0, 0.0, 0.0],
    "far from 0": [1e7, 1e7 + 1, 1e7 + 9, 1e7 + 2],
    "too far from 0": [1e7, 1e7 + 4, 1e7 + 1, 1e7 + 2],
    "subnormal": [1e-44, 190 * TINY, 100 * TINY, 0.0],
    "no number there": [1.0, 2.0, float("nan"), 3.0],
    "infinity elsewhere": [-float("inf"), 2.0, 1.0, 3.0],
    "a range that overflows": [-3e38, 3e38, 0.0, 1.0],
}


@needs_int8_units
def test_a_token_does_not_depend_on_how_many_there_are():
    torch.manual_seed(0)
    weight, x = packed.pack(reference.quantize(torch.randn(80, 40), ROWS)), torch.randn(20, 40)
    outputs = packed.linear(x, weight)
    for tokens in range(1, len(x)):
        assert torch.equal(packed.linear(x[:tokens], weight), outputs[:tokens])


@pytest.mark.parametrize("weights", [Quantizer("int8", "column", symmetric) for symmetric in (True, False)], ids=str)
@pytest.mark.parametrize("row", ROWS_OF_WEIGHTS)
def test_weights_without_an_outlier_feature(weights, row):
    """A row whose range stands in the feature comes out as if it had never had it."""
    exact = torch.tensor([[0.5, 9.0, -1.0, -9.0], ROWS_OF_WEIGHTS[row]])
    x = torch.tensor([[1.0, -0.5, 7.0, 0.25], [0.125, -1.0, 0.0, 1.0]])
    weight = reference.quantize(exact, weights)
    assert not plain._with_extremes_in(weight, torch.tensor([2]))[0], "the other row is left as it is"
    given = x, weight, None, Quantizer("int8", "row"), 6.0, Exact(exact, weights)
    assert_same(numbers(plain.linear(*given)), numbers(reference.linear(*given)))


def test_more_entries_than_int32_counts():
    """Rows that are 2^30 entries apart, of which three pages are touched."""
    try:
        room = torch.empty(2 * (2**30 + 7) + 64, dtype=torch.bfloat16)
    except RuntimeError:
        pytest.skip("needs 4 GiB of address space")
    x = room.as_strided((3, 64), (2**30 + 7, 1))
    x.copy_(torch.randn(3, 64))
    x[2, 5] = 20.0
    weight = reference.quantize(torch.randn(9, 64), Quantizer("int8", "column"))
    for threshold in (None, 6.0):
        expected = reference.linear(x.clone(), weight, threshold=threshold)
        assert_same(plain.linear(x, weight, threshold=threshold), expected)
        assert_same(
            dispatch.linear(x, dispatch.prepare(weight), threshold=threshold),
            dispatch.linear(x.clone(), dispatch.prepare(weight), threshold=threshold),
        )


def test_outputs_between_two_numbers_of_bfloat16_become_the_even_one():
    weight = Quantized(torch.ones(1, 3, dtype=torch.int8), torch.ones(1, 1))
    x = torch.tensor([[127.0, 127, 3], [127, 127, 5]], dtype=torch.bfloat16)  # sums of 257 and 259
    assert plain.linear(x, weight).tolist() == [[256], [260]]


def test_a_weight_whose_format_does_not_say_what_leaving_features_out_does_to_it():
    exact = torch.randn(5, 6)
    weight = reference.quantize(exact, Quantizer("int8", "column"))
    x = torch.tensor([[1.0, -2.0, 9.0, 0.5, 0.25, -0.75]])
    given = x, weight, None, Quantizer("int8", "row"), 6.0, Exact(exact, None)
    assert_same(plain.linear(*given), reference.linear(*given))
