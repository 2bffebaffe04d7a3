"""Number formats: by definition, against ml_dtypes and torchao, their products, schemes of them, and ties in draws."""

import itertools
import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from outlier_kernels import dispatch, reference
from outlier_kernels.formats import E2M1, E2M3, E3M2, E4M3, E5M2, FORMATS, Quantizer, granularities
from outlier_kernels.reference import Exact, Quantized
from outlier_kernels.reference_formats import rounded
from torch import nn

from outliers import UserError, quantize
from outliers.quantization.fields import row_fields
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.magnitudes import InputSummary
from outliers.quantization.schemes import Scheme, get_scheme, is_builtin, parse_grouped
from tests.fake import values_of, values_under
from tests.kernels.test_kernels import of_finite_floats
from tests.small_models import make_model

ELEMENTS = {
    "float8_e4m3fn": E4M3,
    "float8_e5m2": E5M2,
    "float6_e2m3fn": E2M3,
    "float6_e3m2fn": E3M2,
    "float4_e2m1fn": E2M1,
}
QUANTIZERS = [
    Quantizer(name, granularity, symmetric)
    for name, format in FORMATS.items()
    for granularity in dict.fromkeys(granularities(name, "activations") + granularities(name, "weights"))
    for symmetric in format.symmetric
]
FEATURES = 64  # which every group divides
every_format = pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)


def random_matrix(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(shape, generator=generator, dtype=dtype).mul_(3).exp_()
    return torch.randn(shape, generator=generator, dtype=dtype).mul_(sizes)


@pytest.mark.parametrize("name", ELEMENTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_element_is_rounded_as_ml_dtypes_rounds(name, dtype):
    """All values, the ties between them, and the nearest numbers on either side of each; subnormal ones too."""
    values, element = values_of(getattr(ml_dtypes, name)), ELEMENTS[name]
    ties = (values[1:] + values[:-1]) / 2
    single = np.concatenate([values, ties, np.linspace(-element.largest, element.largest, 9999)]).astype(np.float32)
    near = [np.nextafter(single, np.float32(way)) for way in (-np.inf, np.inf)]
    asked = np.concatenate([single, *near, [1e-30, -1e-40, 0.0]]).astype(np.float32)
    asked = asked.clip(-element.largest, element.largest)
    want = asked.astype(getattr(ml_dtypes, name)).astype(np.float32)
    got = rounded(torch.from_numpy(asked).to(dtype), element)
    np.testing.assert_array_equal(got, want)
    assert len(np.unique(got)) == len(values), "every value comes up"
    beyond = torch.tensor([1.1, 2.0, 1e30], dtype=dtype) * element.largest
    assert torch.equal(rounded(beyond, element), torch.full_like(beyond, element.largest))
    assert torch.equal(rounded(-beyond, element), torch.full_like(beyond, -element.largest))
    assert element.largest_exponent == math.floor(math.log2(values.max()))


def test_a_float64_is_rounded_once():
    """Rounded to float32 first, it would be a tie."""
    values = torch.tensor([1.0625 + 1e-12, 1.0625 - 1e-12, 1.0625], dtype=torch.float64)
    assert rounded(values, E4M3).tolist() == [1.125, 1.0, 1.0]


@every_format
def test_values_are_those_of_the_definition(quantizer):
    """Of a script in float64, which makes each group by itself."""
    x = random_matrix(1, 40, FEATURES, dtype=torch.float64)
    found = reference.quantize(x, quantizer)
    np.testing.assert_allclose(found.dequantize(), values_under(x.numpy(), quantizer), rtol=1e-12)
    assert (found.codes.dtype == torch.int8) == FORMATS[quantizer.format].integers


@every_format
@settings(deadline=None, max_examples=10)
@given(matrix=of_finite_floats(3, FEATURES))
def test_finite_numbers_stay_finite(quantizer, matrix):
    found = reference.quantize(matrix, quantizer)
    assert found.scale.isfinite().all()
    assert (found.scale > 0).all()
    assert found.dequantize().isfinite().all()


@pytest.mark.parametrize(
    "quantizer", [one for one in QUANTIZERS if one.granularity not in ("tensor", "column")], ids=str
)
def test_the_largest_numbers_of_float32(quantizer):
    """Each of the largest, alone in its group or beside others, of either sign."""
    top = torch.tensor([torch.finfo(torch.float32).max]).view(torch.int32) - torch.arange(1024)[:, None]
    top = top.to(torch.int32).view(torch.float32) * torch.tensor([1.0] + 63 * [0.25])
    for matrix in (top, -top, torch.cat([top, -top], 1)):
        rows = matrix[:, None] if FORMATS[quantizer.format].tensor_bits else [matrix]
        for one in rows:
            values = reference.quantize(one, quantizer).dequantize()
            assert values.isfinite().all()
            assert (values[:, 0].abs() > 0.7 * one[:, 0].abs()).all()


@every_format
def test_groups_that_have_no_scale(quantizer):
    """Of nothing but zeros, too small for a scale, or with what is no number: as int8 has it."""
    x = random_matrix(2, 4, 2 * FEATURES)
    x[1], x[2] = 0.0, 1e-45
    found = reference.quantize(x, quantizer)
    assert torch.isfinite(found.dequantize()).all()
    if quantizer.symmetric and quantizer.per_row:
        assert (found.scale[1] == 1).all()
        assert not found.dequantize()[1].any()
    smallest = reference.quantize(torch.full((2, FEATURES), 1e-45), quantizer)
    assert (smallest.scale > 0).all()
    assert torch.isfinite(smallest.dequantize()).all()
    zeros = reference.quantize(torch.zeros(2, FEATURES), quantizer)
    assert (zeros.scale == 1).all()
    assert not zeros.dequantize().any()
    for bad in (torch.nan, torch.inf, -torch.inf):
        x[3, 70] = bad
        values = reference.quantize(x, quantizer).dequantize()
        group = slice(70 - 70 % (quantizer.group or 128), 70 + 1)
        assert not torch.isfinite(values[3, group]).any(), "nothing of the group is hidden"
        product = reference.linear(x, reference.quantize(torch.ones(2, 128), quantizer), None, quantizer)
        assert not torch.isfinite(product[3]).any()
        assert torch.isfinite(product[:3]).all() == (quantizer.per_row and not FORMATS[quantizer.format].tensor_bits)
    if quantizer.per_row and not FORMATS[quantizer.format].tensor_bits:
        assert reference.quantize(x[:0], quantizer).dequantize().shape == (0, 2 * FEATURES)
    assert dispatch.linear(x[:0], reference.quantize(x, quantizer), None, quantizer).shape == (0, 4)


def test_scales_end_where_their_own_formats_end():
    """A shared exponent at 2^-127, and a scale in e4m3 at its smallest positive number."""
    found = reference.quantize(torch.full((1, 32), 2.0**-130), Quantizer("mxfp8-e4m3", "block"))
    assert (found.scale.item(), found.codes[0, 0].item()) == (2.0**-127, 0.125)
    x = torch.full((1, 32), 6.0 * 448.0)
    x[:, 16:] = 0.9 * 6 * 2.0**-10  # for which the scale is nearer to 0
    found = reference.quantize(x, Quantizer("nvfp4", "block"))
    assert found.scale.tolist() == [[448.0, 2.0**-9]]
    assert (found.codes[0, 0], found.codes[0, 16]) == (6.0, 3.0)


def test_products_of_integers_are_those_of_what_their_codes_stand_for():
    """With zero points, which outgrow 8 bits far from 0, and their products int32; also where groups differ."""
    whole = [
        Quantizer("int8", granularity, symmetric) for granularity in ("tensor", "row") for symmetric in (True, False)
    ]
    groups = [("int4", "group-24"), ("int8", "group-32", False), ("int4", "group-64", False), ("mxint8", "block")]
    quantizers = [*whole, *(Quantizer(*one) for one in groups)]
    for offset in (0, 3, 1e4):
        x, weight = (random_matrix(rows, rows, 192, dtype=torch.float64) + offset for rows in (6, 5))
        for of_x, of_weight in itertools.product(quantizers, quantizers):
            a, b = reference.quantize(x, of_x), reference.quantize(weight, of_weight)
            want = a.dequantize() @ b.dequantize().T
            assert (reference.matmul(a, b) - want).abs().max() <= 1e-12 * want.abs().max()


def test_sums_of_groups_outgrow_float32():
    """A sum of 2,048 products near 127², which float32 would round, stays exact."""
    codes = torch.full((1, 4096), 127, dtype=torch.int8)
    codes[0, ::2] = 126
    one = Quantized(codes, torch.ones(1, 2, dtype=torch.float64))
    assert reference.matmul(one, one).item() == 2048 * (127**2 + 126**2)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", ["w4a8-g32", "w4-g16", "mxfp4", "nvfp4", "bfp6", "w6a6", "fp8-e4m3", "qserve-g32"])
def test_outlier_features_leave_groups_in_their_places(name, exact):
    """They are zero in both operands where there are groups, else cut out, and multiplied exactly."""
    scheme, x, weight = get_scheme(name), random_matrix(5, 7, 64).double(), torch.randn(9, 64, dtype=torch.float64)
    outliers = (x.abs() >= 30).any(0)
    assert 0 < outliers.sum() < 64
    made = reference.quantize(weight, scheme.weights)
    given_weight = Exact(weight, scheme.weights) if exact else None
    got = reference.linear(x, made, None, scheme.activations, 30.0, given_weight)
    kept = ~outliers if scheme.group is None else slice(None)
    zero = outliers[kept]
    rest = reference.quantize(x[:, kept].masked_fill(zero, 0), scheme.activations).dequantize()
    alone = reference.quantize(weight[:, kept].masked_fill(zero, 0), scheme.weights).dequantize()
    source, values = (weight, alone) if exact else (made.dequantize(), made.dequantize()[:, kept])
    want = x[:, outliers] @ source[:, outliers].T + rest @ values.T
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-9)


def test_bits_of_a_value_count_what_groups_share():
    for written, bits in (
        ("int4 group-64 absmax", 4.25),
        ("int4 group-64 zeropoint", 4 + 20 / 64),
        ("int8 column absmax", 8 + 32 / 512),
        ("int8 row zeropoint", 8 + 40 / 512),
        ("int8 tensor absmax", 8 + 32 / (512 * 256)),
        ("mxfp4 block absmax", 4.25),
        ("mxfp6-e2m3 block absmax", 6.25),
        ("nvfp4 block absmax", 4.5 + 32 / (512 * 256)),
        ("bfp4 group-16 absmax", 4.5),
        ("int4-int8 group-128 absmax", 4 + 4 / 4 + 16 / 128),  # one of four groups has eight bits
        ("int4-in-int8 group-128 absmax", 4 + 12 / 128 + 32 / 512),
        ("int4-e4m3 group-128 absmax", 4 + 8 / 128 + 32 / (512 * 256)),
    ):
        assert Quantizer.read(written).bits(512, 256) == bits, written
        assert str(Quantizer.read(written)) == written
    assert Quantizer.read("nvfp4 block absmax").bits(512) == 4.5


# What torchao makes of small matrices, as `python scripts/torchao_values.py` writes it; the file names the versions.
TORCHAO = json.loads((Path(__file__).parent / "torchao_values.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [name for name in TORCHAO["microscaling"] if name != "x"])
def test_microscaling_is_that_of_torchao(name):
    """Bit for bit, but for the scale of zeros, here 1. It has no mxint8, and its scales end at 2^-126, not 2^-127."""
    x, want = torch.tensor(TORCHAO["microscaling"]["x"]), TORCHAO["microscaling"][name]
    found = reference.quantize(x, Quantizer(name, "block"))
    assert torch.equal(found.dequantize(), torch.tensor(want["values"]))
    zeros = (x.view(6, 2, 32) == 0).all(2)
    assert zeros.sum() == 1
    assert torch.equal(found.scale[~zeros], torch.tensor(want["scale"])[~zeros])


def test_nvfp4_is_that_of_torchao():
    """But for ties, because it multiplies by reciprocals, and for scales subnormal in e4m3, which it has not."""
    x, scale, values = (torch.tensor(TORCHAO["nvfp4"][part]) for part in ("x", "scale", "values"))
    found = reference.quantize(x, Quantizer("nvfp4", "block"))
    normal = scale / scale.max() * 448 > 2.0**-6
    assert normal.float().mean() > 0.8
    torch.testing.assert_close(found.scale[normal], scale[normal], rtol=1e-6, atol=0)
    got, want = (one.view(6, 4, 16)[normal] for one in (found.dequantize(), values))
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)


# Schemes


def test_names_of_schemes_with_groups():
    for name, parts in (
        ("w4a4-g64", "int4 row absmax × int4 group-64 absmax, exact"),
        ("w4-g32", "exact × int4 group-32 absmax, exact"),
        ("bfp4-g16", "bfp4 group-16 absmax × bfp4 group-16 absmax, exact"),
        ("w8a8", "int8 row absmax × int8 column absmax, exact"),
        ("nvfp4", "nvfp4 block absmax × nvfp4 block absmax, exact"),
        ("qserve", "int8 row absmax × int4-in-int8 group-128 absmax, exact"),
        ("fireq-g64", "fp8-e4m3 row absmax × int4-e4m3 group-64 absmax, exact"),
        ("comet", "int4-int8 group-128 absmax × int4 group-128 absmax, exact, reorder"),
        ("flexq-g64", "int6 group-64 absmax × int6 group-64 absmax, exact, activations=8@ffn_out"),
    ):
        scheme = get_scheme(name)
        assert scheme.description == parts
        assert is_builtin(scheme)
        assert not is_builtin(Scheme(name, scheme.activations, Quantizer("int8", "tensor")))
    for name in ("w4a4-g0", "w4a4-g064", "w4a4-g", "mxfp4-g64", "nvfp4-g8", "fp8-e4m3-g64", "llm.int8-g64", "fp32-g8"):
        assert parse_grouped(name) is None
        with pytest.raises(UserError, match=f"unknown scheme '{name}'; did you mean"):
            get_scheme(name)


@pytest.mark.parametrize(
    ("quantizer", "message"),
    [
        (Quantizer("mxfp4", "group-64"), "granularity of the weights .* is 'group-64'; expected 'block'"),
        (Quantizer("int4", "block"), "is 'block'; expected 'tensor' or 'column' or 'group-64'"),
        (Quantizer("int4", "group-0"), "is 'group-0'; expected"),
        (Quantizer("mxfp4", "block", False), "symmetric of the weights .* is False; expected True"),
    ],
)
def test_granularities_that_a_format_or_a_matrix_has_not(quantizer, message):
    with pytest.raises(UserError, match=message):
        Scheme("mine", None, quantizer)
    assert Scheme("mine", Quantizer("int4", "group-48"), Quantizer("int8", "group-32")).group == 96
    with pytest.raises(ValueError, match="groups of 64 features do not divide 100"):
        reference.quantize(torch.ones(2, 100), Quantizer("int4", "group-64"))


def test_what_rows_say_of_formats():
    model = make_model("gpt2")
    for name, said in (("w4a4", None), ("bfp8", None), ("w4", "simulated"), ("mxfp4", "simulated")):
        assert row_fields(get_scheme(name)).get("arithmetic") == said
    shared = row_fields(get_scheme("w4a8"), make_model("llama"))  # q, k, v, and gate and up, count what they share
    assert shared["activation_bits"] == round(8 + 7 * 32 / (6 * 32 + 48), 4)
    assert "activation_bits" not in row_fields(get_scheme("w4-g32"), model)
    assert "weight_bits" in row_fields(get_scheme("w8a8"), model)
    assert set(row_fields(get_scheme("absmax-vector"), model)) == {"kernels"}, "rows of the paper's are as they were"
    skipped = row_fields(get_scheme("w4a8"), quantize(model, "w4a8", skip=["*.mlp.c_proj"]), ["*.mlp.c_proj"])
    assert (skipped["weight_bits"], skipped["activation_bits"]) == (5.0, 9.0)
    small = quantize(model, "w4a8", keep="int8")
    before = row_fields(get_scheme("w4a8"), small)
    small(torch.zeros(1, 4, dtype=torch.int64))
    assert row_fields(get_scheme("w4a8"), small) == before


def test_groups_that_do_not_divide_a_model():
    message = (
        "groups of 20 features, as scheme 'w4-g20' has them, do not divide the 32 of 'transformer.h.0.attn.c_attn'; "
        "expected groups such as 16, which divide all"
    )
    model = make_model("gpt2")
    for keep in ("exact", "int8"):
        with pytest.raises(UserError, match=message):
            quantize(model, "w4-g20", keep)
    with pytest.raises(UserError, match="do not divide the 32 of 'transformer"):
        quantize(model, "w4-g128", skip=["transformer.h.0"])
    quantize(model, "w4-g128", skip=["*.attn", "*.c_fc"])


# Draws

BETWEEN = {  # by format: the largest of a group, and what then lies between two codes
    **dict.fromkeys(("int4", "int4-e4m3", "int4-int8"), (7.0, 2.5)),
    **dict.fromkeys(("mxfp4", "nvfp4"), (6.0, 2.5)),
    **dict.fromkeys(("fp8-e4m3", "mxfp8-e4m3"), (448.0, 2.125)),
    "int8": (127.0, 2.5),
    "int6": (31.0, 2.5),
    "fp8-e5m2": (57344.0, 2.25),
    "int4-in-int8": (119.0, 8.5),
}


def with_tie(scheme: str) -> torch.Tensor:
    """A weight with a single entry between two codes, at [1, 70], by the format's largest value in each row."""
    most, tie = BETWEEN[get_scheme(scheme).weights.format]
    weight = torch.full((4, 128), 1.0)
    weight[:, ::32], weight[:, 1::32] = most, -most
    weight[1, 70] = tie
    return weight


@pytest.mark.parametrize(
    "scheme",
    [
        *("absmax", "absmax-vector", "zeropoint", "llm.int8", "llm.int8-bnb", "w4a4", "w4a8-g64", "w4a4+gptq"),
        *("mxfp4", "nvfp4", "mxfp8-e4m3", "qserve", "fireq", "comet", "flexq", "fp8-e5m2", "w4", "w6a6"),
    ],
)
def test_a_tie_falls_either_way_and_nothing_else_moves(scheme):
    projection, ones = nn.Linear(128, 4, bias=False), torch.ones(128)
    projection.weight = nn.Parameter(with_tie(scheme))
    layer = QuantizedLinear(projection, get_scheme(scheme), None, InputSummary(ones, ones, gram=torch.eye(128)))
    plain, in_draws = layer.quantized_weight.dequantize(), []
    for layer.draw in range(1, 13):
        in_draws.append(layer.quantized_weight.dequantize())
    moved = torch.stack([(values - plain).abs() > 1e-4 for values in in_draws])
    assert moved.any(0).nonzero().tolist() == [[1, 70]]
    assert 0 < int(moved[:, 1, 70].sum()) < 12
    layer.draw = 0
    assert torch.equal(layer.quantized_weight.dequantize(), plain)
