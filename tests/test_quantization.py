"""Schemes, the quantized layer against equation 8 in float64, whole models."""

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from outliers.errors import UserError
from outliers.models.anatomy import projections
from outliers.quantization.convert import quantize
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.schemes import SCHEMES, get_scheme
from tests.conftest import make_model
from tests.test_kernels import numpy_quantize_matrix

EIGHT_BIT = [name for name, scheme in SCHEMES.items() if scheme.bits == 8]

# Outlier columns of 20 features.
OUTLIERS = {"none": [], "some": [3, 11], "all": list(range(20))}


def equation(x: torch.Tensor, weight: torch.Tensor, name: str) -> torch.Tensor:
    """A scheme in float64, by its name alone: x (tokens, features), weight (outputs, features)."""
    symmetric, decomposed = "zeropoint" not in name, "decomp" in name or "llm" in name
    by_row = name not in ("absmax", "zeropoint")
    by_column = by_row and "row" not in name
    outliers = (x.abs() >= 6).any(0) & decomposed
    product = x[:, outliers] @ weight[:, outliers].T
    if outliers.all():
        return product
    _, x8 = numpy_quantize_matrix(x[:, ~outliers].numpy(), symmetric, by_row)
    _, w8 = numpy_quantize_matrix(weight[:, ~outliers].numpy(), symmetric, by_column)
    return product + torch.from_numpy(x8) @ torch.from_numpy(w8).T


def test_the_nine_schemes():
    assert list(SCHEMES) == [
        "fp32",
        "absmax",
        "zeropoint",
        "absmax-row",
        "absmax-vector",
        "zeropoint-vector",
        "absmax-row-decomp",
        "llm.int8",
        "llm.int8-zeropoint",
    ]
    assert get_scheme("llm.int8", alpha=4).outlier_threshold == 4
    assert get_scheme("absmax", alpha=4).outlier_threshold is None


@pytest.mark.parametrize(
    ("name", "alpha", "message"),
    [
        ("llm.int9", 6, r"unknown scheme 'llm.int9'; did you mean llm.int8"),
        ("bogus", 6, "known: fp32, absmax"),
        ("llm.int8", 0, "alpha is 0"),
        ("llm.int8", float("nan"), "alpha is nan"),
    ],
)
def test_unknown_schemes(name, alpha, message):
    with pytest.raises(UserError, match=message):
        get_scheme(name, alpha)


@pytest.mark.parametrize("conv1d", [False, True])
@pytest.mark.parametrize("outliers", OUTLIERS)
@pytest.mark.parametrize("name", EIGHT_BIT)
def test_layer_is_the_equation(name, outliers, conv1d):
    torch.manual_seed(0)
    projection = (Conv1D(30, 20) if conv1d else nn.Linear(20, 30)).double()
    nn.init.normal_(projection.bias)
    weight = projection.weight.T if conv1d else projection.weight
    x = torch.randn(2, 8, 20, dtype=torch.float64)
    x[0, 5, OUTLIERS[outliers]] = -9.0
    want = equation(x.flatten(0, 1), weight.detach(), name) + projection.bias
    with torch.no_grad():
        got = QuantizedLinear(projection, get_scheme(name))(x)
    torch.testing.assert_close(got, want.detach().view(2, 8, 30), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", EIGHT_BIT)
def test_layer_keeps_shape_and_dtype(name, dtype):
    projection = nn.Linear(16, 24).to(dtype)
    x = torch.randn(1, 3, 4, 16, dtype=dtype)
    x[..., 2] *= 9
    out = QuantizedLinear(projection, get_scheme(name))(x)
    assert out.shape == (1, 3, 4, 24)
    assert out.dtype == dtype
    assert (out - projection(x)).abs().max() < 0.15 * x.abs().max()


def test_one_outlier_ruins_absmax_and_not_the_decomposition():
    torch.manual_seed(0)
    projection = nn.Linear(64, 64)
    x = torch.randn(32, 64)
    x[:, 7] = 300.0
    with torch.no_grad():
        errors = {
            name: (QuantizedLinear(projection, get_scheme(name))(x) - projection(x)).norm().item()
            for name in ("absmax", "absmax-vector", "llm.int8")
        }
    assert errors["llm.int8"] < 0.05 * errors["absmax-vector"]
    assert errors["absmax-vector"] < 1.1 * errors["absmax"]


def test_model_is_quantized_and_the_original_is_not(model, blocks):
    before = model(blocks).logits
    quantized = quantize(model, "absmax")
    assert {type(p.module) for p in projections(quantized)} == {QuantizedLinear}
    assert not any(isinstance(module, QuantizedLinear) for module in model.modules())
    after = quantized(blocks).logits
    assert torch.equal(model(blocks).logits, before)
    assert not torch.equal(after, before)
    assert (after - before).norm() < 0.2 * before.norm()
    assert quantized.num_parameters() == model.num_parameters()


def test_quantized_model_shares_storage_but_not_fate():
    model = make_model("gpt2")
    quantized = quantize(model, "absmax")
    assert quantized.transformer.wte.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
    assert quantized.lm_head.weight is quantized.transformer.wte.weight
    quantized.half()
    assert model.dtype == torch.float32


def test_codes_follow_the_weights_to_another_dtype(blocks):
    quantized = quantize(make_model("gpt2"), "absmax-vector")
    quantized(blocks)
    assert "quantized_weight" in vars(quantized.transformer.h[0].mlp.c_fc)
    quantized.double()
    assert quantized.transformer.h[0].mlp.c_fc.quantized_weight.scale.dtype == torch.float64


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_codes_made_in_inference_mode_serve_outside_of_it(name, blocks):
    quantized = quantize(make_model("gpt2"), name)
    with torch.inference_mode():
        inside = quantized(blocks).logits
    outside = quantized(blocks).logits
    assert torch.equal(outside.detach(), inside)
    assert not quantized.transformer.h[0].mlp.c_fc.quantized_weight.scale.requires_grad


def test_generation_with_a_cache_equals_generation_without():
    quantized = quantize(make_model("llama"), "absmax-vector")
    prompt = torch.arange(5)[None]
    cached, plain = (quantized.generate(prompt, max_new_tokens=8, do_sample=False, use_cache=c) for c in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("name", SCHEMES)
def test_rescheming_equals_quantizing_afresh(name, blocks):
    model = make_model("llama")
    for start in SCHEMES:
        first = quantize(model, start)
        first(blocks)
        assert torch.equal(quantize(first, name)(blocks).logits, quantize(model, name)(blocks).logits)


def test_codes_are_shared_between_schemes_that_agree_on_them(blocks):
    first = quantize(make_model("gpt2"), "absmax-vector")
    first(blocks)
    codes = first.transformer.h[1].attn.c_attn.quantized_weight.codes
    shared = quantize(first, "llm.int8").transformer.h[1].attn.c_attn
    assert shared.quantized_weight.codes is codes
    other = quantize(first, "zeropoint-vector").transformer.h[1].attn.c_attn
    assert "quantized_weight" not in vars(other)
