"""Remedies: transforms that keep the function, clipping, exact tokens, and the calibration that some of them need."""

import json
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from outlier_kernels.formats import Quantizer
from torch import nn
from transformers.pytorch_utils import Conv1D

from outliers import SCHEMES, Scheme, Sweep, calibrate, quantize, sweep
from outliers.commands.latency import Latency
from outliers.config.files import make_experiment, read_experiment
from outliers.errors import BrokenModel, UserError
from outliers.models.anatomy import projections
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.magnitudes import InputSummary
from outliers.quantization.remedies import REMEDIES, Remedy, RemedyKind, Transform
from outliers.quantization.remedies.clip import clip
from outliers.quantization.remedies.hadamard import random_rotation, rotate
from outliers.quantization.remedies.smoothing import factors
from outliers.quantization.schemes import get_scheme, read_scheme, write_scheme
from outliers.text.blocks import tokens_hash
from outliers.views.perplexity import perplexity_table
from tests.small_models import make_model, names_of, sample_blocks

ROW, COLUMN = Quantizer("int8", "row"), Quantizer("int8", "column")
MODEL = "pocket/gpt2-0.1m"
SMALL = {"models": [MODEL], "block": 32, "blocks": 2}


# Rotation


@pytest.mark.parametrize("width", [1, 2, 4, 32, 64, 512, 2048])
def test_a_rotation_is_hadamards_where_the_width_is_a_power_of_two(width):
    x, made = torch.randn(5, width, dtype=torch.float64), random_rotation(torch.empty(1, width, dtype=torch.float64), 0)
    signs = made[:width]
    assert made.shape == (width + 1,)
    assert made[width] == 1
    assert set(signs.tolist()) <= {-1.0, 1.0}
    if width > 30:
        assert 0.3 < (signs > 0).double().mean() < 0.7
    expected = (x * signs).numpy() @ scipy.linalg.hadamard(width) / math.sqrt(width)
    assert np.allclose(rotate(x, made).numpy(), expected, rtol=0, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**40))
def test_a_rotation_is_orthogonal_and_spreads_what_is_large(width, seed):
    made = random_rotation(torch.empty(3, width, dtype=torch.float64), seed)
    turned = rotate(torch.eye(width, dtype=torch.float64), made)
    assert torch.allclose(turned @ turned.T, torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-12)
    spread = 1 / math.sqrt(width & -width)  # of what is large, where the orthogonal factor spreads nothing
    assert turned.abs().max() <= spread * 1.001
    assert torch.equal(made, random_rotation(torch.empty(7, width, dtype=torch.float64), seed)), (
        "one width, one rotation"
    )


def test_a_rotation_is_drawn_evenly():
    """Q of a QR decomposition alone has a first entry that is never positive: R takes its sign."""
    first = torch.stack([random_rotation(torch.empty(1, 9), seed)[9] for seed in range(20)])
    assert 5 <= (first > 0).sum() <= 15


# Smoothing and reordering


def test_smoothing_by_hand():
    """Xiao et al., equation 4: 16^½ / 4^½ = 2, 9^½ / 1 = 3, 4^½ / 16^½ = ½."""
    found = InputSummary(torch.tensor([16.0, 9.0, 4.0]), torch.tensor([4.0, 1.0, 16.0]))
    weight = torch.zeros(2, 3)
    assert factors(weight, found, 0.5).tolist() == [2.0, 3.0, 0.5]
    assert factors(weight, found, 1.0).tolist() == [16.0, 9.0, 4.0]
    assert factors(weight, found, 0.0).tolist() == [1 / 4, 1.0, 1 / 16]
    assert factors(weight.double(), found, 0.5).dtype == torch.float64
    silent = InputSummary(torch.tensor([0.0, 9.0, 1e-40]), torch.tensor([4.0, 0.0, 16.0]))
    for strength in (0.0, 0.5, 1.0):
        assert factors(weight, silent, strength).tolist() == [1.0, 1.0, 1.0], "what is silent keeps its scale"


# All transforms


def test_what_is_nan_stays_seen():
    """A row with NaN is NaN in every output, whatever the remedy, and no other row is."""
    torch.manual_seed(0)
    projection, x = nn.Linear(24, 8), torch.randn(4, 24)
    x[1, 3] = torch.nan
    for name in ("smoothing", "hadamard", "tokens=2", "clip=0.9", "tokens=3+smoothing+hadamard+clip=0.99"):
        scheme = get_scheme(f"absmax-vector+{name}")
        out = QuantizedLinear(projection, scheme, None, InputSummary(torch.ones(24), torch.ones(24)))(x)
        assert out[1].isnan().all(), name
        assert out[[0, 2, 3]].isfinite().all(), name
    assert QuantizedLinear(projection, get_scheme("absmax+tokens=2+clip=0.9"))(x).isnan().sum() >= 8


# Tokens and clipping


@pytest.mark.parametrize("scheme", ["absmax", "llm.int8", "zeropoint-vector", "absmax+hadamard", "llm.int8-bnb"])
def test_tokens_with_large_values_are_exact(scheme):
    torch.manual_seed(0)
    x = torch.randn(2, 6, 24)
    x[0, 2, 5], x[1, 3, 0], x[1, 4, 7] = 40.0, -30.0, 20.0
    base, *others = scheme.split("+")
    under, large = "+".join([base, "tokens={}", *others]), [2, 9, 10]
    others = [number for number in range(12) if number not in large]
    for projection in (nn.Linear(24, 8), Conv1D(8, 24)):
        nn.init.normal_(projection.bias)
        out = QuantizedLinear(projection, get_scheme(under.format(20)))(x).reshape(-1, 8)
        plain = QuantizedLinear(projection, get_scheme(scheme))
        assert torch.equal(out[large], projection(x.reshape(-1, 24)[large]))
        assert torch.equal(out[others], plain(x.reshape(-1, 24)[others])), "their scales are without the large ones"
        for threshold, expected in ((1e-9, projection(x)), (1e9, plain(x))):
            layer = QuantizedLinear(projection, get_scheme(under.format(threshold)))
            assert torch.equal(layer(x), expected)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 64), st.booleans(), st.integers(0, 99))
def test_clipping_at_a_quantile(tokens, features, share, per_row, seed):
    """Against numpy's quantile of the same definition, with products that binary fractions hold."""
    quantile = share / 64
    x = torch.randn(tokens, features, generator=torch.Generator().manual_seed(seed)) ** 3
    axis = 1 if per_row else None
    limit = np.quantile(x.abs().numpy(), quantile, axis=axis, keepdims=True, method="inverted_cdf")
    assert torch.equal(clip(x, quantile, per_row), x.clamp(-torch.from_numpy(limit), torch.from_numpy(limit)))


def test_a_quantile_is_the_decimal_number_that_was_written():
    """Although 0.55 · 100 is more than 55 in binary."""
    x = torch.arange(1.0, 101.0)[None]
    assert torch.equal(clip(x, 0.55, True), x.clamp(max=55))


def test_what_is_clipped():
    x = torch.tensor([[1.0, -2.0, 3.0, 100.0], [0.1, 0.2, -50.0, 0.4]])
    without = torch.tensor([[1.0, -1.0, 3.0, 100.0], [0.1, 0.2, -50.0, 0.4]])
    assert torch.equal(clip(x, 0.75, False, threshold=6.0), without), "outlier features are not quantized"
    assert torch.equal(clip(x, 0.5, True, threshold=0.01), x)
    x[0, 0], x[1, 1] = torch.inf, torch.nan
    assert clip(x, 0.5, True)[0, 0] == torch.inf
    assert clip(x, 0.5, True)[1, 1].isnan()
    assert clip(x[:0], 0.5, False).shape == (0, 4)
    assert clip(x.bfloat16(), 0.5, True).dtype == torch.float32
    torch.manual_seed(0)
    projection, x = nn.Linear(24, 8), torch.randn(5, 24) ** 5
    for name, per_row in (("absmax", False), ("absmax-vector", True)):
        for kind in (QuantizedLinear, Int8Linear):
            layer = kind(projection, get_scheme(f"{name}+clip=0.9"))
            assert torch.equal(layer(x), kind(projection, get_scheme(name))(clip(x, 0.9, per_row)))


@pytest.mark.parametrize("kind", [QuantizedLinear, Int8Linear])
def test_what_is_rotated_is_clipped_and_decomposed(kind):
    """Features are outliers by their values behind the rotation, and clipping leaves these features as they are."""
    torch.manual_seed(0)
    plain, rotated, y = nn.Linear(24, 8), nn.Linear(24, 8), torch.randn(5, 24)
    turn = random_rotation(plain.weight, 0)
    y[2, 3], y[4, 6] = 40.0, -7.0
    x = y @ rotate(torch.eye(24), turn).T
    rotated.weight.data, rotated.bias = rotate(plain.weight.detach(), turn), plain.bias
    expected = kind(rotated, get_scheme("llm.int8"))(clip(rotate(x, turn), 0.9, True, threshold=6.0))
    assert torch.equal(kind(plain, get_scheme("llm.int8+hadamard+clip=0.9"))(x), expected)


# Names


@pytest.mark.parametrize(
    ("name", "remedies"),
    [
        ("absmax+smoothing", [("smoothing", 0.5)]),
        ("absmax+hadamard@ffn_out/ffn_in", [("hadamard", 0.0, ("ffn_in", "ffn_out"))]),
        ("absmax+tokens=50+hadamard", [("hadamard", 0.0), ("tokens", 50.0)]),
        ("llm.int8+reorder+hadamard=3", [("reorder", None), ("hadamard", 3.0)]),
        ("w4a8+awq+gptq", [("awq", "search"), ("gptq", 0.01)]),
        ("w4a8+awq=0.5@ffn_in+gptq=0.1@ffn_out", [("awq", 0.5, ("ffn_in",)), ("gptq", 0.1, ("ffn_out",))]),
    ],
)
def test_a_name_says_its_remedies(name, remedies):
    scheme, base = get_scheme(name), SCHEMES[name.partition("+")[0]]
    assert scheme == replace(base, name=name, remedies=[Remedy(*one) for one in remedies])
    assert get_scheme("llm.int8+hadamard", 4.0).outlier_threshold == 4.0


EARLIER = {"activations": vars(ROW), "weights": vars(COLUMN), "outlier_threshold": None, "arithmetic": "exact"}


def test_a_model_saved_before_schemes_had_a_list_of_remedies():
    """The fields of transforms and of the others had each their own names."""
    name = "w8a8+tokens=20@ffn_out+smoothing=0.75@ffn_in+hadamard+clip=search+gptq=0.05+attention@scores"
    fields = {"token_threshold": 20.0, "token_roles": ["ffn_out"], "transform": "smoothing=0.75@ffn_in+hadamard"}
    fields |= {"clip": "search", "clip_roles": [], "activation_bits": None, "activation_roles": [], "gptq": 0.05}
    fields |= {"gptq_roles": [], "attention": 0.0, "attention_products": ["scores"]}
    scheme = get_scheme(name)
    assert read_scheme(json.dumps({"name": name, "label": "as tables called it", **EARLIER, **fields})) == scheme
    oldest = {"name": "w8a8", "label": "W8A8", **EARLIER, "transform": None}
    assert read_scheme(json.dumps(oldest)) == SCHEMES["w8a8"]


def test_remedies_at_some_roles():
    scheme = get_scheme("absmax+tokens=20@ffn_out+smoothing=0.7@ffn_in+hadamard@ffn_out/ffn_in+clip=0.9@attn_in")
    assert scheme.at(None) is scheme
    at = {role: scheme.at(role) for role in ("attn_in", "attn_out", "ffn_in", "ffn_out")}
    said = {role: "+".join(map(str, one.remedies)) for role, one in at.items()}
    assert said == {
        "attn_in": "clip=0.9",
        "attn_out": "",
        "ffn_in": "smoothing=0.7+hadamard=0",
        "ffn_out": "hadamard=0+tokens=20",
    }
    assert [one.needs_calibration for one in at.values()] == [False, False, True, False]
    beside = get_scheme("absmax+tokens=20@ffn_out+hadamard").at("ffn_in")
    assert list(map(str, beside.remedies)) == ["hadamard=0"]
    everywhere = get_scheme("absmax+tokens=20+hadamard")
    assert everywhere.at("ffn_in") is everywhere
    model = quantize(make_model("llama"), "absmax+hadamard@ffn_out")
    turned = {one.path.rpartition(".")[2] for one in projections(model) if one.module.operand.fitted}
    assert turned == {"down_proj"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (None, "unknown scheme 'None'"),
        ("absmax+", "unknown remedy ''; known: awq, hadamard, reorder, rotation, smoothing, tokens, clip, activations"),
        ("absmax+smoothing=2", "the number of 'smoothing=2' is 2; expected a strength from 0 to 1"),
        ("absmax+smoothing=", "remedy 'smoothing=' has '' as its number"),
        ("absmax+hadamard=0.5", "the number of 'hadamard=0.5' is 0.5; expected a seed"),
        ("absmax+reorder=3", "'reorder' takes no number, got 3; write 'reorder'"),
        ("absmax+tokens", "remedy 'tokens' has no number; expected one, as in tokens=20"),
        ("absmax+tokens=-1", "the number of 'tokens=-1' is -1; expected a positive number"),
        ("absmax+clip=2", "the number of 'clip=2' is 2; expected a quantile above 0, at most 1"),
        ("absmax+hadamard@ffn_ou", "unknown role 'ffn_ou'; did you mean ffn_out"),
        ("absmax+tokens=1+tokens=2", "has 'tokens' twice; expected it once"),
        ("absmax+hadamard+hadamard=1@ffn_in", "has 'hadamard' twice; expected it once at a role"),
        ("absmax+hadamard+smoothing", "'smoothing' comes after 'hadamard', whose outputs no calibration has seen"),
        ("absmax+clip=0.99+hadamard@ffn_out", "'clip=0.99.hadamard@ffn_out'; .* write 'hadamard@ffn_out.clip=0.99'"),
        ("fp32+hadamard", "scheme 'fp32.hadamard' has 'hadamard' where no operand is quantized; leave it out"),
        ("fp32+clip=0.5", "'fp32.clip=0.5' has 'clip' where no input is quantized"),
        ("fp32+gptq", "'fp32.gptq' has 'gptq' where no weight is quantized; leave it out"),
        ("llm.int8+gptq", "has 'gptq' with outlier features, without which weights are rounded anew"),
        ("llm.int8-bnb+gptq", "has 'gptq' with arithmetic 'bitsandbytes'"),
        ("w4+gptq=0", "the number of 'gptq=0' is 0; expected a damping above 0, at most 1"),
        ("w4+gptq+hadamard", "expected the order in which remedies act, .*: write 'hadamard.gptq'"),
        ("w4+awq=2", "the number of 'awq=2' is 2; expected an exponent from 0 to 1"),
        ("w4a8+clip", "remedy 'clip' has no number; expected one, as in clip=0.999 or clip=search"),
        ("w4+hadamard=search", "the number of 'hadamard=search' is search; expected a seed"),
        ("w4a4+rotation+smoothing", "'smoothing' comes after 'rotation'"),
        ("w4a4+rotation=0.5", "the number of 'rotation=0.5' is 0.5; expected a number of steps"),
        ("fp32+attention=1", "is 1; expected the share of its products that stays in 16 bits"),
        ("fp32+attention@ffn_in", "unknown role 'ffn_in'; known: scores, values"),
        ("absmax+tokens=6@scores", "unknown role 'scores'"),
        ("w4+activations=8", "'w4.activations=8' has 'activations' where activations are no integers; leave it out"),
        ("w4a4+activations=5", "the number of 'activations=5' is 5; expected 8 or 6 or 4 bits"),
        ("flexq+activations=6", "has 'activations' twice; expected it once"),
    ],
)
def test_a_mistake_is_one_line(name, message):
    with pytest.raises(UserError, match=message):
        get_scheme(name)


@pytest.mark.parametrize(
    ("remedies", "message"),
    [
        ("hadamard", "remedies of scheme 'mine' is 'hadamard'; expected a list of remedies"),
        ([5], "5 as a remedy; expected text such as 'clip=0.999', or a Transform"),
        ([REMEDIES["hadamard"]], "a custom transform has no name"),
        ([f"hadamard@{role}" for role in ("ffn_in", "ffn_out", "attn_in", "attn_out")], "at most 3"),
    ],
)
def test_parts_that_do_not_go_with_a_scheme(remedies, message):
    with pytest.raises(UserError, match=message):
        Scheme("mine", ROW, COLUMN, remedies=remedies)


def test_gptq_in_a_format_that_nothing_is_rounded_to_at_a_given_scale(as_they_are):
    with pytest.raises(UserError, match=r"scheme 'same' has 'gptq' with weights in same; leave it out"):
        replace(as_they_are, remedies=["gptq"])


# Calibration


def test_a_calibration_that_cannot_be(blocks):
    model = make_model("gpt2")
    found, llama = calibrate(model, blocks), make_model("llama")
    for message, attempt in {
        "no blocks to calibrate on": lambda: calibrate(model, blocks[:0]),
        "blocks of several lengths to calibrate on": lambda: calibrate(model, [blocks[0], blocks[1][:5]]),
        "keeps only int8 codes of .*; calibrate": lambda: calibrate(quantize(model, "absmax", "int8"), blocks),
        "cannot merge calibrations of different models": lambda: found.merge(calibrate(llama, blocks)),
        "of blocks of 24 and 5 tokens": lambda: found.merge(calibrate(model, blocks[:, :5])),
    }.items():
        with pytest.raises(UserError, match=message):
            attempt()
    model.transformer.h[1].ln_2.weight.data[3] = torch.nan
    with pytest.raises(BrokenModel, match="NaN or inf in the hidden states of layer 1, role ffn_in, feature 3"):
        calibrate(model, blocks)


def test_another_calibration_and_other_weights_are_fitted_anew(blocks):
    model = make_model("gpt2")
    one, other = calibrate(model, blocks[:1]), calibrate(model, blocks)
    first = quantize(model, "absmax+smoothing", calibration=one)
    before = first(blocks).logits
    anew = quantize(model, "absmax+smoothing", calibration=other)(blocks).logits
    assert torch.equal(quantize(first, "absmax+smoothing", calibration=other)(blocks).logits, anew)
    assert not torch.equal(anew, before)
    turned = quantize(model, "absmax+hadamard")
    turned(blocks)
    with torch.no_grad():
        for projection in projections(turned):
            projection.module.projection.weight.mul_(0.37)
    assert torch.equal(turned(blocks).logits, quantize(model, "absmax+hadamard")(blocks).logits)


# One's own

DOUBLED = Transform(
    lambda weight: weight.new_tensor(2.0), lambda x, two: x * two, lambda weight, two: weight / two, name="doubled"
)


def test_a_transform_of_ones_own(tmp_path, monkeypatch, as_they_are):
    mine = replace(SCHEMES["absmax"], name="mine", remedies=[DOUBLED])
    rows = sweep(Sweep(schemes=["fp32", "absmax", mine], **SMALL), tmp_path)
    assert rows[2]["value"] == rows[1]["value"], "powers of two change no rounding"
    assert rows[2]["scheme_parts"].endswith("exact, doubled")
    exact = QuantizedLinear(nn.Linear(4, 4), replace(as_they_are, remedies=[DOUBLED])).operand.exact
    assert exact is not None
    with pytest.raises(UserError, match="has a custom transform, which no file can hold"):
        write_scheme(mine)
    (both,) = Sweep(schemes=[mine], transform="hadamard", **SMALL).schemes
    assert both.description.endswith("exact, doubled, hadamard=0")
    monkeypatch.setitem(REMEDIES, "doubled", DOUBLED)
    named = sweep(Sweep(schemes=["absmax+doubled"], **SMALL), tmp_path)
    assert named[0]["value"] == rows[1]["value"]


def test_a_remedy_of_ones_own_that_is_no_transform():
    """Inputs that are all zero, in the place where `clip` acts."""
    negated = Scheme("mine", ROW, COLUMN, remedies=[Transform(torch.neg, torch.mul, torch.mul, name="negated")])
    assert pickle.loads(pickle.dumps(negated)) == negated
    silent = RemedyKind(clips=lambda hidden_states, _number, _scheme: 0 * hidden_states, name="silent")
    scheme, projection = Scheme("mine", ROW, COLUMN, remedies=[silent, "tokens=3"]), nn.Linear(4, 2)
    assert scheme.description.endswith("exact, tokens=3, silent")
    assert torch.equal(QuantizedLinear(projection, scheme)(torch.ones(1, 4))[0], projection.bias)


# Sweeps


def test_rows_are_of_the_text_that_they_are_calibrated_on(tmp_path):
    fields = SMALL | {"schemes": ["absmax", "absmax+smoothing"]}
    rows, text = sweep(Sweep(**fields), tmp_path), sample_blocks(MODEL, 32, 6)
    others = [
        sweep(Sweep(**fields, calibration_blocks=2, **of_text), tmp_path)
        for of_text in ({"calibration": text[4:]}, {}, {"calibration": ["Some other text. " * 99]})
    ]
    assert [[row in rows for row in other] for other in others] == 3 * [[True, False]]
    assert others[0][1]["calibration_hash"] == tokens_hash(text[4:])
    assert [cells[0] for cells in perplexity_table(rows).cells] == ["absmax", "absmax+smoothing"]


def test_a_remedy_for_all_schemes(tmp_path):
    asked = Sweep(schemes=["fp32", "absmax", "absmax+tokens=20"], transform="hadamard", **SMALL)
    assert names_of(asked) == ["fp32", "absmax+hadamard", "absmax+tokens=20+hadamard"]
    assert asked.transform is None
    mine = Scheme("mine", ROW, COLUMN)
    (scheme,) = Sweep(schemes=[mine], transform="clip=0.9", **SMALL).schemes
    assert scheme == replace(mine, name="mine+clip=0.9", remedies=["clip=0.9"])
    timed = Latency(models=[MODEL], schemes=["fp32", "absmax", "bitsandbytes"], transform="hadamard")
    assert names_of(timed) == ["fp32", "absmax+hadamard", "bitsandbytes"]
    file = tmp_path / "mine.yaml"
    file.write_text(f"models: [{MODEL}]\nschemes: [absmax]\ntransform: smoothing=0.4\n")
    assert names_of(make_experiment(read_experiment(str(file)), Sweep)) == ["absmax+smoothing=0.4"]
    for transform, schemes, message in (
        ("hadamrd", ["absmax"], "unknown remedy 'hadamrd'; did you mean hadamard"),
        ("hadamard", ["fp32"], "transform 'hadamard' with schemes that quantize nothing; expected one that does"),
        ("tokens=20", ["absmax+tokens=3"], "has 'tokens' twice"),
        ("tokens=20", ["absmax+hadamard"], "write 'tokens=20.hadamard'"),
    ):
        with pytest.raises(UserError, match=message):
            Sweep(schemes=schemes, transform=transform, **SMALL)
