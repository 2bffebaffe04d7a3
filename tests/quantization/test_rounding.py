"""What is chosen from a calibration: codes by GPTQ, scales by AWQ, numbers of remedies by a search."""

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from outlier_kernels.formats import FORMATS, Quantizer
from outlier_kernels.reference import Quantized as Codes
from outlier_kernels.reference import quantize as quantize_matrix
from torch import nn

from outliers import UserError, load_model, load_text, load_tokenizer, quantize
from outliers.models.anatomy import projections
from outliers.quantization.calibration import calibrate
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear, operand_of, stored_weight
from outliers.quantization.magnitudes import InputSummary
from outliers.quantization.remedies import REMEDIES, Transform, awq, clip, gptq, smoothing
from outliers.quantization.schemes import SCHEMES, get_scheme
from tests.small_models import make_model

MODEL = "pocket/gpt2-0.1m"
COLUMNS = Quantizer("int4", "column")
GRID = REMEDIES["smoothing"].number.grid
ALL = "w4+gptq", "absmax+clip=search"  # which need the two costly statistics
QUANTIZERS = [
    *(Quantizer("int4", *rest) for rest in itertools.product(("column", "group-8"), (True, False))),
    *(Quantizer("int6", "tensor"), Quantizer("int8", "tensor", False)),
]


@cache
def a_layer(role: str = "ffn_out", layer: int = 1) -> tuple[torch.Tensor, torch.Tensor, InputSummary]:
    """The weight (outputs, features) and inputs (tokens, features) of a projection of a trained model, and what a
    calibration on them finds."""
    model, seen = load_model(MODEL), []
    blocks = load_text("sample", load_tokenizer(MODEL), 64, 4)
    found = next(one for one in projections(model) if (one.layer, one.role) == (layer, role))
    with found.module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].flatten(0, 1))):
        magnitudes = calibrate(model, blocks, ALL).of(found)
    return stored_weight(found.module).detach(), torch.cat(seen).detach(), magnitudes


def error(weight: torch.Tensor, rounded: torch.Tensor, x: torch.Tensor) -> float:
    return float((x.double() @ (rounded - weight).double().T).square().sum())


# Calibration


@pytest.mark.parametrize("role", ["attn_in", "attn_out", "ffn_in", "ffn_out"])
def test_what_a_calibration_keeps_for_schemes(role):
    weight, x, found = a_layer(role)
    assert torch.allclose(found.gram.double(), x.double().T @ x.double(), rtol=1e-5, atol=1e-5 * float(x.norm() ** 2))
    assert torch.allclose(found.sums, x.abs().sum(0), rtol=1e-5)
    assert torch.equal(found.inputs, x.abs().amax(0))
    assert torch.equal(found.weights, weight.abs().amax(0))
    assert torch.equal(found.rows, x), "few tokens are kept altogether"


def test_rows_are_evenly_spaced(blocks):
    model = make_model("gpt2")
    whole = calibrate(model, blocks, ["w4+awq"]).magnitudes[1, "ffn_out"].rows
    many = calibrate(model, blocks.repeat(30, 1), ["w4+awq"]).magnitudes[1, "ffn_out"].rows
    assert len(many) == 90 * 6, "512 of 90 blocks, rounded up"
    assert torch.allclose(many[:6], whole[0:24:4])


def test_only_what_schemes_need_is_kept(blocks):
    model = make_model("llama")
    for schemes, kept in (([], []), (["w4+gptq"], ["gram"]), (["w4+awq"], ["rows"]), (ALL, ["gram", "rows"])):
        found = calibrate(model, blocks, schemes)
        for one in found.magnitudes.values():
            assert [name for name in ("gram", "rows") if getattr(one, name) is not None] == kept
        assert found.lacks(get_scheme("w4a8+clip=search+gptq")) == [one for one in ("gram", "rows") if one not in kept]


def test_calibrations_are_merged(blocks):
    model = make_model("llama")
    whole, plain = calibrate(model, blocks, ALL), calibrate(model, blocks[1:])
    halves = calibrate(model, blocks[:1], ALL).merge(calibrate(model, iter(blocks[1:]), ALL))
    assert torch.equal(halves.blocks, blocks)
    for place, one in whole.magnitudes.items():
        for name in ("inputs", "weights", "sums", "gram", "rows"):
            assert torch.allclose(getattr(one, name), getattr(halves.magnitudes[place], name), rtol=1e-5, atol=1e-5)
    less = calibrate(model, blocks[:1], ALL, keys=True).merge(plain)
    assert less.keys == {}
    assert less.lacks(get_scheme("w4+gptq")) == ["gram"], "what is known of one half is not known of both"


def test_what_is_known_behind_transforms():
    """XᵀX of inputs behind a transform, from XᵀX in front of it, and the largest magnitudes."""
    weight, _, found = a_layer()
    for name in ("smoothing+reorder+hadamard", "awq=0.5+hadamard", "smoothing+reorder+awq=0.5"):
        changed, operand = found, operand_of(weight, get_scheme(f"w8+{name}"), found)
        for one, of_one in zip(get_scheme(f"w8+{name}").transforms, operand.fitted, strict=True):
            changed = changed.transform(one, of_one)
        assert torch.allclose(changed.gram, changed.rows.T @ changed.rows, rtol=1e-3, atol=1e-5 * changed.gram.max())
        mixed = "hadamard" in name
        assert (changed.inputs is None) == (changed.sums is None) == (changed.weights is None) == mixed
        if not mixed:
            assert torch.allclose(changed.sums, changed.rows.abs().sum(0), rtol=1e-4)
            assert torch.allclose(changed.inputs, changed.rows.abs().amax(0), rtol=1e-5)
            assert torch.allclose(changed.weights, operand.exact.abs().amax(0), rtol=1e-5)


# GPTQ


def one_by_one(weight: torch.Tensor, gram: torch.Tensor, nearest: Codes, limit: int, damping: float) -> torch.Tensor:
    """Optimal brain surgeon in float64: after each feature the inverse of what is left of H is computed anew (Frantar
    et al., 2022, equation 2)."""
    width = weight.shape[1]
    h = gram.double() + damping * gram.double().diagonal().mean() * torch.eye(width, dtype=torch.float64)
    w, codes, left = weight.double().clone(), torch.zeros(weight.shape, dtype=torch.float64), list(range(width))
    zero = torch.zeros_like(nearest.scale) if nearest.zero_point is None else nearest.zero_point
    spread = [part.repeat_interleave(width // part.shape[1], 1).expand(weight.shape) for part in (nearest.scale, zero)]
    scale, zero = (part.double() for part in spread)
    for feature in gram.diagonal().argsort(descending=True, stable=True).tolist():
        inverse, place = torch.linalg.inv(h[left][:, left])[left.index(feature)], left.index(feature)
        code = ((w[:, feature] / scale[:, feature]).round() + zero[:, feature]).clamp(-limit, limit)
        codes[:, feature] = code
        lost = w[:, feature] - (code - zero[:, feature]) * scale[:, feature]
        w[:, left] -= lost[:, None] / inverse[place] * inverse
        left.remove(feature)
    return codes


@pytest.mark.parametrize("quantizer", QUANTIZERS, ids=str)
def test_gptq_is_the_optimal_brain_surgeon(quantizer):
    weight, _, found = a_layer("ffn_in", 0)
    limit = 2 ** (FORMATS[quantizer.format].bits - 1) - 1
    nearest = quantize_matrix(weight, quantizer)
    got = gptq.compensated(weight, nearest, found, quantizer, 0.01)
    expected = one_by_one(weight, found.gram, nearest, limit, 0.01)
    assert (got.codes != expected).sum() <= 1, "but for ties"
    assert not torch.equal(got.codes, nearest.codes)
    assert torch.equal(got.scale, nearest.scale)
    assert got.codes.dtype == torch.int8
    if not quantizer.symmetric:
        sums = got.codes.view(len(weight), nearest.code_sums.shape[1], -1).sum(2)
        assert torch.equal(got.code_sums, sums.to(got.code_sums.dtype))


def test_gptq_of_more_features_than_are_compensated_at_once():
    torch.manual_seed(0)
    weight, x, quantizer = torch.randn(8, 2 * gptq.BLOCK + 9), torch.randn(400, 2 * gptq.BLOCK + 9), COLUMNS
    nearest, gram = quantize_matrix(weight, quantizer), x.T @ x
    got = gptq.compensated(weight, nearest, InputSummary(gram=gram), quantizer, 0.01)
    assert (got.codes != one_by_one(weight, gram, nearest, 7, 0.01)).float().mean() < 0.01, "but for ties"


@pytest.mark.parametrize("format", [name for name, format in FORMATS.items() if format.rounding])
def test_gptq_in_every_format(format):
    torch.manual_seed(0)
    x = torch.randn(300, 64) @ torch.randn(64, 64)
    weight, group = torch.randn(24, 64), FORMATS[format].group
    quantizer = Quantizer(format, "block" if group else "group-16")
    nearest = quantize_matrix(weight, quantizer)
    got = gptq.compensated(weight, nearest, InputSummary(gram=x.T @ x), quantizer, 0.01)
    assert error(weight, got.dequantize(), x) < 0.7 * error(weight, nearest.dequantize(), x)
    assert got.codes.dtype == nearest.codes.dtype
    assert got.codes.unique().numel() <= 2 ** FORMATS[format].bits


def test_gptq_rounds_what_it_has_not_seen_to_nearest():
    torch.manual_seed(0)
    weight, x, quantizer = torch.randn(8, 12), torch.randn(50, 12), COLUMNS
    nearest = quantize_matrix(weight, quantizer)
    assert torch.equal(
        gptq.compensated(weight, nearest, InputSummary(gram=torch.zeros(12, 12)), quantizer, 0.01).codes,
        nearest.codes,
    )
    x[:, 3:7] = 0
    got = gptq.compensated(weight, nearest, InputSummary(gram=x.T @ x), quantizer, 0.01)
    assert torch.equal(got.codes[:, 3:7], nearest.codes[:, 3:7])
    assert not torch.equal(got.codes, nearest.codes)


def test_a_layer_under_gptq_has_its_codes():
    """Behind the transforms, with XᵀX behind them."""
    weight, x, found = a_layer()
    quantizer, rotated = SCHEMES["w4"].weights, operand_of(weight, get_scheme("w4+hadamard"))
    turned = get_scheme("w4+hadamard").transforms[0].call("hidden_states", x, rotated.fitted[0])
    expected = gptq.compensated(rotated.exact, rotated.codes, InputSummary(gram=turned.T @ turned), quantizer, 0.05)
    for kind in (QuantizedLinear, Int8Linear):
        projection = nn.Linear(*weight.T.shape)
        projection.weight.data = weight
        layer = kind(projection, get_scheme("w4+hadamard+gptq=0.05"), "ffn_out", found)
        codes = layer.operand.codes if kind is QuantizedLinear else layer._quantized()
        assert (codes.codes != expected.codes).float().mean() < 0.01, "XᵀX is rounded in another order"
        assert (codes.codes != rotated.codes.codes).float().mean() > 0.05


# AWQ and searches


def test_awq_by_hand():
    """Lin et al., equation 5, divided by the mean of all: (1, 4, 16) / 7."""
    found = InputSummary(sums=torch.tensor([1.0, 4.0, 16.0]))
    assert torch.allclose(awq.factors(torch.zeros(2, 3), found, 0.5), torch.tensor([1.0, 2.0, 4.0]) / 7**0.5)
    assert awq.factors(torch.zeros(2, 3), found, 0.0).tolist() == [1.0, 1.0, 1.0]
    assert awq.factors(torch.zeros(2, 3).double(), found, 0.5).dtype == torch.float64
    for silent in ([0.0, 4.0, 16.0], [0.0, 0.0, 0.0]):
        assert awq.factors(torch.zeros(2, 3), InputSummary(sums=torch.tensor(silent)), 0.5)[0] == 1
    assert len(REMEDIES["awq"].number.grid) == 20
    assert REMEDIES["awq"].number.grid[::19] == (0.0, 0.95)


def absmax(matrix: torch.Tensor, limit: int, group: int) -> torch.Tensor:
    parts = matrix.reshape(-1, group)
    scale = parts.abs().amax(1, keepdim=True) / limit
    return ((parts / scale).round() * scale).view_as(matrix)


def test_awq_has_the_least_error_of_its_grid():
    """tr(Δ H Δᵀ) with Δ = Q(W·s)/s − W, written down once more."""
    weight, x, found = a_layer()
    errors = {}
    for exponent in REMEDIES["awq"].number.grid:
        factors = (x.abs().mean(0) / x.abs().mean()).pow(exponent)
        delta = (absmax(weight * factors, 7, 8) / factors - weight).double()
        errors[exponent] = float((delta @ x.double().T @ x.double() * delta).sum())
    best = min(errors, key=errors.get)
    assert 0 < best < 0.95, "a choice that says something"
    got = operand_of(weight, get_scheme("w4-g8+awq"), found)
    assert torch.allclose(got.fitted[0], (x.abs().mean(0) / x.abs().mean()).pow(best), rtol=1e-4)
    assert errors[best] < 0.9 * errors[0.0]


def test_clip_has_the_least_error_of_its_grid():
    weight, x, found = a_layer()
    grid = (1, 0.9999, 0.999, 0.995, 0.99, 0.98, 0.95, 0.9)
    errors = {}
    for quantile in grid:
        product = absmax(clip.clip(x, quantile, True), 7, x.shape[1]) @ absmax(weight, 7, x.shape[1]).T
        errors[quantile] = float((product - x @ weight.T).double().square().sum())
    got = operand_of(weight, get_scheme("w4a4+clip=search"), found).fitted
    assert len(got) == 1
    assert got[0].dtype == torch.float64
    assert errors[float(got[0])] == pytest.approx(min(errors.values()), rel=1e-3)
    projection = nn.Linear(*weight.T.shape, bias=False)
    projection.weight.data = weight
    expected = QuantizedLinear(projection, get_scheme(f"w4a4+clip={float(got[0])}"))(x)
    for kind in (QuantizedLinear, Int8Linear):
        assert torch.equal(kind(projection, get_scheme("w4a4+clip=search"), None, found)(x), expected)


def test_several_searches_go_one_after_the_other():
    """Smoothing before clipping is known, clipping behind the smoothing that was found."""
    weight, _, found = a_layer()
    got = operand_of(weight, get_scheme("w4a4+smoothing=search+hadamard+clip=search+gptq"), found)
    smoothed = operand_of(weight, get_scheme("w4a4+smoothing=search+hadamard"), found)
    assert torch.equal(got.fitted[0], smoothed.fitted[0])
    assert GRID[::10] == (0.0, 0.5, 1.0)
    strength = next(one for one in GRID if torch.equal(smoothing.factors(weight, found, one), smoothed.fitted[0]))
    clipped = operand_of(weight, get_scheme(f"w4a4+smoothing={strength}+hadamard+clip=search"), found)
    assert torch.equal(got.fitted[2], clipped.fitted[2])
    assert torch.equal(got.exact, clipped.exact)
    assert not torch.equal(got.codes.codes, clipped.codes.codes)


# All together


TRANSFORMS = {name: kind for name, kind in REMEDIES.items() if isinstance(kind, Transform)}
PAIRS = {f"{one}+{other}": (one, other) for one, other in itertools.permutations(TRANSFORMS, 2)}
MIXED_BEFORE = [
    pair for pair, (one, other) in PAIRS.items() if TRANSFORMS[other].calibrated and not TRANSFORMS[one].by_feature
]


@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair not in MIXED_BEFORE])
def test_two_transforms_keep_the_function(as_they_are, pair):
    """X T (T⁻¹ W) = X W on layers of a trained model, in a format in which nothing is rounded."""
    scheme = replace(as_they_are, remedies=pair.split("+"))
    for role in ("attn_in", "attn_out", "ffn_in", "ffn_out"):
        weight, x, found = a_layer(role)
        projection = nn.Linear(*weight.T.shape, bias=False)
        projection.weight.data = weight
        got, exact = QuantizedLinear(projection, scheme, role, found)(x), x.double() @ weight.double().T
        assert (got - exact).norm() <= 1e-5 * exact.norm()
        assert not torch.equal(got, projection(x)), "and they are applied"


# Mistakes


def test_a_calibration_that_does_not_know_enough(blocks):
    model, llama = make_model("gpt2"), make_model("llama")
    found = calibrate(model, blocks)
    for name, lacking in (("w4+gptq", "gram"), ("w4+awq", "rows"), ("w4a8+awq+gptq", "gram and rows")):
        with pytest.raises(UserError, match=f"needs the {lacking} of the inputs, which this calibration did not keep"):
            quantize(model, name, calibration=found)
    with pytest.raises(UserError, match=r"'w4.gptq' needs the magnitudes .*calibrate\(model, blocks, \[scheme\]\)"):
        quantize(model, "w4+gptq")
    with pytest.raises(UserError, match=r"lacks 48 features of 'model.layers.0.mlp.down_proj'"):
        quantize(llama, "w4+gptq", calibration=calibrate(model, blocks, ["w4+gptq"]))
