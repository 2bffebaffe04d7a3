"""The reference kernels against the equations, written once more in numpy float64."""

import warnings

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from outlier_kernels import cpu, dispatch, reference
from outlier_kernels.cpu import all_passes, packed
from outlier_kernels.formats import FORMATS, Quantizer, granularities

from tests.conftest import in_turn, pairwise
from tests.small_models import needs_int8_units

LARGEST, NORMAL, TINY = torch.finfo(torch.float32).max, 2.0**-126, 2.0**-149
# Where ranges and scales stop being numbers of float32, or normal ones; and numbers that are alike, and not.
EDGES = [0.0, TINY, 1e-40, NORMAL, 1e-37, 127 * NORMAL, 7.5e-37, 254 * NORMAL, 1.0, 2.0**127, 3.38e38, LARGEST]
finite_floats = st.one_of(
    st.sampled_from([sign * float(np.float32(edge)) for edge in EDGES for sign in (1, -1)]),
    st.floats(-254 * NORMAL, 254 * NORMAL, width=32),
    st.floats(width=32, allow_nan=False, allow_infinity=False),
)


def of_finite_floats(*shape: int):
    """Matrices over all of float32, whose rows are of one magnitude or of several."""
    row = st.one_of(
        arrays(np.float32, shape[1], elements=finite_floats),
        arrays(np.float32, shape[1], elements=st.floats(-254 * NORMAL, 254 * NORMAL, width=32)),
        arrays(np.float32, shape[1], elements=st.floats(-LARGEST, LARGEST, width=32)),
    )
    return st.lists(row, min_size=shape[0], max_size=shape[0]).map(lambda rows: torch.from_numpy(np.stack(rows)))


matrices = arrays(np.float64, array_shapes(min_dims=2, max_dims=2, max_side=9), elements=st.floats(-1e6, 1e6))


def int8(symmetric: bool = True, per_row: bool = True) -> Quantizer:
    return Quantizer("int8", "row" if per_row else "tensor", symmetric)


def numpy_quantize(matrix: np.ndarray, symmetric: bool, per_row: bool):
    """Codes, and the numbers they stand for, of each row or of a matrix as one group."""
    normal, axis = np.finfo(matrix.dtype).tiny, 1 if per_row else None
    low, high = matrix.min(axis, keepdims=True), matrix.max(axis, keepdims=True)
    if symmetric:
        largest = np.maximum(high, -low)
        scale = np.where(largest == 0, 1, np.maximum(largest / 127, normal))
        codes = np.rint(matrix / scale).clip(-127, 127)
        return codes, codes * scale
    dynamic_range = np.where(high == low, 1, np.minimum(254 / (high - low), 1 / normal))
    zero_point = -np.rint(dynamic_range * low) - 127
    codes = (np.rint(dynamic_range * matrix) + zero_point).clip(-127, 127)
    return codes, (codes - zero_point) / dynamic_range


@pytest.mark.parametrize("per_row", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
@given(matrix=matrices)
@example(matrix=np.zeros((2, 3)))
@example(matrix=np.full((2, 3), 7.3))
@example(matrix=np.array([[0.5, 1.5, 2.5, 127.0], [-0.5, -1.5, -2.5, -127.0]]))  # ties to even
@example(matrix=np.array([[1e-310, -1e-320], [-0.0, 0.0]]))
@settings(deadline=None)
def test_quantize_is_the_equation(symmetric, per_row, matrix):
    quantized = reference.quantize(torch.from_numpy(matrix), int8(symmetric, per_row))
    with np.errstate(over="ignore", divide="ignore"):
        codes, values = numpy_quantize(matrix, symmetric, per_row)
    np.testing.assert_array_equal(quantized.codes, codes)
    np.testing.assert_allclose(quantized.dequantize(), values, rtol=1e-12, atol=0)


def test_scales_are_normal_numbers_of_float32():
    small = torch.tensor([[0.0, 1e-37, -1e-37]])
    for symmetric in (True, False):
        assert reference.quantize(small, int8(symmetric)).scale.item() == NORMAL
    assert reference.quantize(small, int8()).codes.tolist() == [[0, 9, -9]]


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (24, 1, 32), (3, 7, 5), (17, 64, 8), (40, 5140, 9), (2, reference.LARGEST_K, 2)]
)
@pytest.mark.parametrize("path", ["native", "floats", "padded"])
def test_int8_matmul_is_exact(lacking, path, shape):
    m, k, n = shape
    a, b = torch.randint(-127, 128, (m, k), dtype=torch.int8), torch.randint(-127, 128, (n, k), dtype=torch.int8)
    a[-1], b[-1] = (torch.randint(-128, -100, (k,)) for _ in range(2))  # large sums, every other odd
    a[0], b[0] = 127, 127  # the largest sum that there is
    if path == "floats":
        lacking("torch.cpu._is_vnni_supported")
    product = reference._padded_int_mm if path == "padded" else reference.int8_matmul
    with torch.autocast("cpu", torch.bfloat16):  # which is for other products
        got = product(a, b)
    assert got.dtype == torch.int32
    np.testing.assert_array_equal(got, a.numpy().astype(np.int64) @ b.numpy().astype(np.int64).T)


def test_a_row_whose_stride_is_that_of_a_column():
    column = torch.arange(1, 6, dtype=torch.int8)[:, None]
    assert reference.int8_matmul(column.T, column.T).tolist() == [[55]]


def test_int8_matmul_refuses_sums_that_could_overflow():
    wide = torch.zeros(1, reference.LARGEST_K + 1, dtype=torch.int8)
    with pytest.raises(ValueError, match="overflow"):
        reference.int8_matmul(wide, wide)


def test_outlier_columns_include_the_threshold():
    x = torch.zeros(3, 5)
    x[0, 1], x[2, 2], x[1, 4] = 6.0, -6.0, 5.9999
    assert reference.outlier_columns(x, 6.0).tolist() == [False, True, True, False, False]
    assert not reference.outlier_columns(torch.full((1, 1), 6.0).bfloat16(), 6.01).any(), "bfloat16 would round it to 6"


DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def small_layer(m: int, k: int, n: int):
    """Hidden states, a weight and a bias."""
    generator = torch.Generator().manual_seed(m * k + n)
    return (torch.randn(size, generator=generator) for size in ((m, k), (n, k), (n,)))


@needs_int8_units
@pytest.mark.parametrize("tokens", [3, 64])
@pytest.mark.parametrize("k", [1, 77, 4096, 66_000])
def test_cpu_sums_are_exact(k, tokens):
    """With scales of 1 the outputs are the int32 sums as float32 holds them, here even the largest that there are."""
    codes = torch.randint(-127, 128, (tokens, k), generator=torch.Generator().manual_seed(k)).to(torch.int8)
    rows = torch.randint(-127, 128, (16, k), generator=torch.Generator().manual_seed(k + 1)).to(torch.int8)
    rows[0] = 127 - 254 * (torch.arange(k) % 2)
    codes[0], codes[1] = rows[0], -rows[0]
    weight = reference.Quantized(rows, torch.ones(16, 1))
    assert packed.can_pack(weight)
    got = packed._product((codes.to(torch.int16) + 128).to(torch.uint8), packed.pack(weight), torch.ones(16))
    want = codes.double() @ rows.double().T
    small = want.abs() <= 2**23
    assert torch.equal(got[small], want[small].float())
    assert torch.allclose(got.double(), want, rtol=2**-22, atol=0)


@needs_int8_units
def test_the_largest_weight_stays_finite():
    """Rebuilt from its code, and multiplied with zeros: in a feature that is an outlier of another token."""
    weight = reference.quantize(torch.tensor([[LARGEST, 1.0, -LARGEST], [1.0, 2.0, 3.0]]), int8())
    x = torch.tensor([[0.0, 0.25, 0.0], [8.0, 0.5, -8.0], [0.0, 0.125, 1e-40]])
    want = reference.linear(x, weight, threshold=6.0)
    assert want.isfinite().tolist() == [[True, True], [False, True], [True, True]]
    assert torch.equal(packed.linear(x, packed.pack(weight), threshold=6.0), want)


@needs_int8_units
@pytest.mark.parametrize("threads", [1, 3])
@pairwise(
    "shape dtype outliers granularity bias",
    # Tokens, features, outputs: one token, parts of tiles, of words and of blocks, several strips and pieces.
    [(1, 576, 192), (5, 30, 70), (7, 1, 1), (200, 300, 130), (97, 1030, 65), (9, 40, all_passes().STRIP + 300)],
    [*DTYPES, torch.float64],
    [0, 1, 2, 3, packed.FEW, packed.FEW + 1],
    ["row", "tensor"],
    [None, torch.float32, torch.bfloat16, torch.float64],
)
def test_a_layer_in_one_pass(threads, shape, dtype, outliers, granularity, bias):
    """Bit by bit what oneDNN's product and the passes around it give."""
    tokens, features, _ = shape
    x, weight, added = small_layer(*shape)
    x[tokens // 2, :: features // 9 + 1][:outliers] = 20.0
    weight = packed.pack(reference.quantize(weight, int8()))
    assert weight.address, "the layout is not the one that the passes read"
    given = None if bias is None else added.to(bias), Quantizer("int8", granularity)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for threshold in (None, 6.0, 1e60):
            ways = weight, weight._replace(address=0)
            found, expected = (packed.linear(x.to(dtype), operand, *given, threshold) for operand in ways)
            assert found.dtype == dtype
            assert torch.equal(found, expected)
    finally:
        torch.set_num_threads(before)


def test_what_the_int8_units_cannot_multiply():
    weight = torch.randn(4, 24, generator=torch.Generator().manual_seed(0))
    rows = reference.quantize(weight, int8())
    wide = torch.zeros(1, packed.LARGEST_K + 1, dtype=torch.int8)
    assert packed.can_pack(rows)
    assert packed.can_pack(reference.Quantized(wide[:, 1:], torch.ones(1, 1)))
    assert not any(packed.can_pack(rows, activations) for activations in (None, int8(False)))
    for other in (
        reference.quantize(weight.double(), int8()),  # scales of more digits than it has
        reference.quantize(weight, int8(False)),
        reference.Quantized(wide, torch.ones(1, 1)),
        # Codes that are nearly all of one sign: oneDNN's AMX path would round their sums twice.
        *(reference.Quantized(torch.full((4, 1000), code, dtype=torch.int8), torch.ones(4, 1)) for code in (100, -100)),
    ):
        assert not packed.can_pack(other)
        assert dispatch.prepare(other) is other


@needs_int8_units
def test_packing_and_back():
    for shape in ((1, 1), (33, 700), (100, 64)):
        codes = torch.randint(-127, 128, shape, generator=torch.Generator().manual_seed(0)).to(torch.int8)
        weight = reference.Quantized(codes, torch.rand(shape[0], 1))
        assert torch.equal(packed.unpack(packed.pack(weight)).codes, codes)
        transposed = reference.Quantized(codes.T.contiguous().T, weight.scale)
        assert torch.equal(packed.unpack(packed.pack(transposed)).codes, codes), "a weight may be stored transposed"


ROW, ZEROPOINT = int8(), int8(False)
# Activations, weights, dtype and arithmetic of a layer, and which of the backends that there may be runs it.
SERVED = {
    "absmax": (ROW, "int8 column absmax", torch.float16, "exact", "plain triton"),
    "zero points": (ZEROPOINT, "int8 column zeropoint", torch.float32, "exact", "plain triton"),
    "one zero point": (ZEROPOINT, "int8 column absmax", torch.float32, "exact", "plain"),
    "float64": (ROW, "int8 column absmax", torch.float64, "exact", ""),
    "bitsandbytes": (ROW, "int8 column absmax", torch.float16, "bitsandbytes", ""),
    "exact activations": (None, "int8 column absmax", torch.float32, "exact", ""),
    "groups of activations": (Quantizer("int8", "group-16"), "int8 column absmax", torch.float32, "exact", "formats"),
    "groups of weights": (ROW, "int8 group-16 absmax", torch.float32, "exact", "formats"),
    **{
        name: (
            Quantizer(name, granularities(name, "activations")[-1]),
            "int8 column absmax",
            torch.float32,
            "exact",
            "" if name.startswith("int4-") else "formats",
        )
        for name in FORMATS
        if name != "int8"
    },
}


@pytest.mark.parametrize(
    "forced", ["triton", pytest.param("packed", marks=needs_int8_units), "plain", "cpu", "reference"]
)
@pytest.mark.parametrize("case", SERVED)
def test_the_first_backend_that_serves_a_layer_runs(monkeypatch, forced, case):
    """Of those that OUTLIERS_KERNELS asks for; Triton's interpreter stands for a GPU."""
    monkeypatch.setenv("OUTLIERS_KERNELS", forced)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if forced == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    activations, weights, dtype, arithmetic, served = SERVED[case]
    weight = reference.quantize(torch.ones(3, 32), Quantizer.read(weights))
    runs = dispatch.backend_of(weight, activations, arithmetic, dtype).name
    asked = {"cpu": "plain", "packed": "", "triton": "triton formats"}.get(forced, forced)  # packed ones are prepared
    assert runs == next((name for name in asked.split() if name in served.split()), "reference")
    prepared = dispatch.prepare(weight, activations, arithmetic)
    packs = forced in ("packed", "cpu") and case in ("absmax", "float64") and cpu.has_int8_units()
    assert isinstance(prepared, packed.Packed) == packs
    assert torch.equal(dispatch.restore(prepared).codes, weight.codes)


def test_backends_of_a_device(monkeypatch):
    monkeypatch.delenv("OUTLIERS_KERNELS", raising=False)
    names = [one.name for one in dispatch.backends(torch.device("cpu"))]
    assert names == ["packed"] * cpu.has_int8_units() + ["plain", "reference"]
    assert [one.row_name for one in dispatch.backends(torch.device("mps"))] == ["reference"]
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("OUTLIERS_KERNELS", "triton")
    with pytest.raises(ValueError, match="'triton', which does not run on 'cpu' here"):
        dispatch.backends(torch.device("cpu"))
    monkeypatch.setenv("OUTLIERS_KERNELS", "cuda")
    with pytest.raises(ValueError, match="expected one of triton, formats, packed, cpu, plain, reference"):
        dispatch.backends(torch.device("cpu"))


def test_a_prepared_weight_stays_with_its_backend(monkeypatch):
    """Also where another one is asked for since."""
    x, weight, bias = small_layer(5, 24, 8)
    monkeypatch.delenv("OUTLIERS_KERNELS", raising=False)
    weight = reference.quantize(weight, ROW)
    prepared = dispatch.prepare(weight)
    wanted = dispatch.linear(x, prepared, bias, threshold=1.0)
    monkeypatch.setenv("OUTLIERS_KERNELS", "reference")
    assert torch.equal(dispatch.linear(x, prepared, bias, threshold=1.0), wanted)
    assert torch.allclose(dispatch.linear(x, weight, bias, threshold=1.0), wanted, atol=1e-5)


def test_without_int8_units_the_passes_run_around_a_product_in_floats_and_say_so_once(monkeypatch, lacking):
    monkeypatch.delenv("OUTLIERS_KERNELS", raising=False)
    lacking("torch.cpu._is_vnni_supported")
    weight, x = reference.quantize(torch.randn(5, 7), ROW), torch.randn(3, 7)
    kept = dispatch._kernels, dispatch._warn_without_units
    for function in kept:
        function.cache_clear()
    try:
        with pytest.warns(UserWarning, match="this CPU has no int8 units"):
            assert dispatch.backend_of(weight).name == "plain"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert dispatch.prepare(weight) is weight, "which only those units multiply faster in another layout"
            assert torch.equal(dispatch.linear(x, weight), reference.linear(x, weight))
    finally:
        for function in kept:
            function.cache_clear()


@pytest.mark.parametrize("x", [torch.ones(2, 5), torch.ones(2, 4, dtype=torch.int32), torch.ones(1, 2, 4)])
def test_dispatch_refuses(x):
    weight = reference.quantize(torch.ones(3, 4), int8(True, True))
    for prepared in (weight, dispatch.prepare(weight)):
        with pytest.raises(ValueError, match=r"linear takes floating-point \(tokens, 4\), got"):
            dispatch.linear(x, prepared)


@in_turn("dtype symmetric", DTYPES, [True, False])
def test_the_operator_is_what_it_says(dtype, symmetric):
    """Neither writes to its operands nor hands them on, and has the output that its shape-only form has."""
    x, weight, bias = small_layer(5, 32, 9)
    quantized = reference.quantize(weight, int8(symmetric, True))
    for scheme in ((str(int8(symmetric)), None, "exact"), (str(int8(symmetric)), 1.0, "exact"), (None, 1.0, "exact")):
        for some in (bias, None):
            torch.library.opcheck(dispatch.linear_plain, (x.to(dtype), *quantized, some, *scheme, None, None))
    if symmetric:
        quantized, _ = reference.quantize_bitsandbytes(weight)
        torch.library.opcheck(
            dispatch.linear_plain, (x.to(dtype), *quantized, bias, str(int8()), 1.0, "bitsandbytes", None, None)
        )


@needs_int8_units
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operator_of_packed_weights_is_what_it_says(dtype):
    x, weight, bias = small_layer(5, 32, 9)
    weight = packed.pack(reference.quantize(weight, int8(True, True)))
    operands = (x.to(dtype), weight.blocks, weight.scale, bias, 9, weight.address != 0, str(int8()), 1.0)
    # opcheck's other tests look at the memory of all operands, and oneDNN's layout does not show its own.
    torch.library.opcheck(dispatch.linear_packed, operands, test_utils="test_aot_dispatch_dynamic")
    before = [operand.clone() for operand in (operands[0], weight.scale, bias)]
    got = dispatch.linear_packed(*operands)
    assert all(torch.equal(*pair) for pair in zip(before, (operands[0], weight.scale, bias), strict=True))
    assert torch.equal(got, dispatch.linear(operands[0], weight, bias, threshold=1.0))


# Outliers by their places, and in the feature of some the largest entry of another token, which is none.
SOME = [{}, {(0, 3): 6.0, (1, 5): -6.0}, {(2, 7): 40.0, (4, 7): 9.0, (1, 0): -300.0, (3, 7): 5.5}]


@pairwise("outliers dtype threshold", SOME, DTYPES, [0.0, 6.0])
def test_against_bitsandbytes(outliers, dtype, threshold):
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="compares with bitsandbytes, which is not installed")
    x, weight, bias = small_layer(19, 128, 40)
    for place, value in outliers.items():
        x[place] = value
    x[7] = 0
    x = x.to(dtype)
    peer = bitsandbytes.nn.Linear8bitLt(128, 40, has_fp16_weights=False, threshold=threshold)
    peer.load_state_dict({"weight": weight, "bias": bias})
    peer = peer.to("cpu").eval()
    with torch.no_grad():
        want = peer(x.clone()).float()
    threshold = threshold or None
    codes, _, columns = bitsandbytes.functional.int8_vectorwise_quant(x.half(), threshold=threshold or 0.0)
    quantized, found = reference.quantize_bitsandbytes(x, threshold)
    assert quantized.scale[7] == 1, "of a token of zeros"
    assert (quantized.codes.int() - codes.int()).abs().max() <= 1
    assert found.nonzero()[:, 0].tolist() == ([] if columns is None else columns.tolist())
    quantized, _ = reference.quantize_bitsandbytes(weight)
    assert torch.equal(quantized.codes, peer.state.CB)
    how = {"arithmetic": "bitsandbytes"}
    got = dispatch.linear(x, dispatch.prepare(quantized, **how), bias, threshold=threshold, **how).float()
    # in 16 bits bitsandbytes rounds the int8 part before it adds the outliers' part
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    assert (got - want).abs().max() <= tolerance * want.abs().max()
