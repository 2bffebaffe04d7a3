"""Schemes of one's own and of serving systems: their parts, what they skip, what rows say of them, and plugins."""

import itertools
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from outlier_kernels import reference
from outlier_kernels.formats import Quantizer, large_groups
from transformers.pytorch_utils import Conv1D

from outliers import Sweep, UserError, calibrate, perplexity, quantize, run, sweep
from outliers.commands.ablate import Ablation
from outliers.commands.latency import Latency
from outliers.commands.zeroshot import ZeroShot
from outliers.config.files import make_experiment, read_experiment
from outliers.models.anatomy import projections
from outliers.models.load import load_model
from outliers.published.numbers import TABLE1 as PRINTED
from outliers.quantization.fields import row_fields
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.schemes import SCHEMES, TABLE1, Scheme, by_weights, get_scheme
from outliers.quantization.store import load_int8, load_quantized, save_quantized
from tests.kernels.test_kernels import of_finite_floats
from tests.small_models import broken_weights, make_model, names_of, sample_blocks

ROW, COLUMN = Quantizer("int8", "row"), Quantizer("int8", "column")
MIXED = Scheme("mixed", Quantizer("int8", "row", False), COLUMN)  # zeropoint activations, absmax weights
WEIGHTS_ALONE = Scheme("weights-alone", None, COLUMN)


def test_the_table_of_the_paper_is_a_list_of_its_own():
    """Its numbers know their schemes by that list, whatever schemes come."""
    assert {scheme for _, scheme in PRINTED} == set(TABLE1)
    assert names_of(Sweep(**SMALL)) == TABLE1


SHARED = {  # by a scheme: others to which its codes serve, and others to which they do not
    "absmax-vector": (
        [get_scheme("llm.int8", 3.0), MIXED, WEIGHTS_ALONE],
        ["llm.int8-bnb", "absmax-row", Scheme("a8", ROW, None)],
    ),
    "absmax": (["absmax+tokens=3", "absmax+clip=0.9", "absmax+hadamard@ffn_out"], ["absmax+hadamard"]),
    "w4a8+smoothing": (
        [f"w4a8+smoothing{more}" for more in ("", "+clip=0.9", "+gptq@ffn_out")],
        [f"w4a8+smoothing{more}" for more in ("+gptq", "=search", "+clip=search")],
    ),
}


@pytest.mark.parametrize("scheme", SHARED)
def test_codes_are_shared_where_they_come_out_alike(scheme, blocks):
    """Those of the first projection, whatever the names of schemes."""
    model = make_model("gpt2")
    known = calibrate(model, blocks, ["w4+gptq", "absmax+clip=search"])
    first = quantize(model, scheme, calibration=known)
    first(blocks)
    codes = next(projections(first)).module.quantized_weight
    for others, shared in zip(SHARED[scheme], (True, False), strict=True):
        for other in others:
            again = next(projections(quantize(first, other, calibration=known))).module
            assert (again.quantized_weight is codes) == shared, other


def test_schemes_that_share_codes_follow_each_other():
    schemes = [get_scheme(name) for name in ("absmax", "absmax+hadamard", "absmax+tokens=3")]
    assert [scheme.name for scheme in by_weights(schemes)] == ["absmax", "absmax+tokens=3", "absmax+hadamard"]
    first, *others = by_weights([SCHEMES[name] for name in reversed(TABLE1)])
    operands = [one.weight_operand for one in others]
    assert first.name == "fp32"
    assert len(list(itertools.groupby(operands))) == len({*operands})


SKIP = ["lm_head", "*.c_proj", "transformer.h.1.attn"]


def test_what_is_skipped_stays_exact(blocks, tmp_path):
    model = make_model("gpt2")
    for keep, kind in (("exact", QuantizedLinear), ("int8", Int8Linear)):
        some = quantize(model, "absmax", keep, skip=SKIP)
        kinds = {projection.path: type(projection.module) for projection in projections(some)}
        quantized = {path for path, one in kinds.items() if one is kind}
        assert quantized == {"transformer.h.0.attn.c_attn", "transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_fc"}
        assert set(kinds.values()) == {kind, Conv1D}
        if keep == "exact":
            again = quantize(some, "absmax", skip=["*.c_proj"])
            assert type(again.transformer.h[1].attn.c_attn) is QuantizedLinear
    expected = some(blocks).logits
    save_quantized(some, tmp_path / "small")
    assert torch.equal(load_quantized(tmp_path / "small")(blocks).logits, expected)
    model.save_pretrained(tmp_path / "exact")
    assert torch.equal(load_int8(str(tmp_path / "exact"), "absmax", skip=SKIP)(blocks).logits, expected)


def test_the_memory_of_an_int8_model_stays_what_it_is(blocks):
    """A byte a weight and a scale a row, also once its codes are in the layout that is multiplied fastest."""
    model, small = make_model("gpt2"), quantize(make_model("gpt2"), "absmax-vector", keep="int8")
    saved = sum(3 * one.module.weight.numel() - 4 * one.module.weight.shape[1] for one in projections(model))
    before = small.get_memory_footprint()
    assert before == model.get_memory_footprint() - saved
    small(blocks)
    assert small.get_memory_footprint() == before
    state = small.state_dict()
    assert small.get_memory_footprint() == before
    assert sum({tensor.data_ptr(): tensor.nbytes for tensor in state.values()}.values()) == before


def test_what_rows_say_of_a_scheme():
    assert row_fields(get_scheme("fp32"), skip=["lm_head"]) == {}
    assert row_fields(get_scheme("absmax")) == {}
    assert row_fields(get_scheme("llm.int8", 4)) == {"alpha": 4.0, "outlier_weights": "exact"}
    assert row_fields(get_scheme("llm.int8-bnb")) == {"alpha": 6.0, "outlier_weights": "dequantized"}
    assert row_fields(get_scheme("absmax"), skip=["b", "a", "b"]) == {"skip": ["a", "b"]}
    parts = {"scheme_parts": "exact × exact, exact, attention=0"}
    assert row_fields(get_scheme("fp32+attention"), make_model("gpt2")) == parts
    parts = "int8 row zeropoint × int8 column absmax, exact"
    assert row_fields(MIXED) == {"scheme_parts": parts}
    own = row_fields(Scheme("llm.int8", ROW, COLUMN, 6.0))
    assert own == row_fields(get_scheme("llm.int8")), "the same parts under the same name"
    for other in (
        Scheme("llm.int8", ROW, COLUMN),
        Scheme("llm.int8", ROW, COLUMN, 6.0, arithmetic="bitsandbytes"),
        Scheme("absmax", ROW, COLUMN),
        Scheme("absmax", None, Quantizer("int8", "tensor")),
    ):
        assert "scheme_parts" in row_fields(other)
    assert row_fields(WEIGHTS_ALONE)["scheme_parts"] == "exact × int8 column absmax, exact"


def test_rows_say_which_kernels_multiply(blocks):
    """Asked before and after the first forward pass, which may prepare weights."""
    model = make_model("gpt2")
    for scheme, keep, said in (
        *(("llm.int8", "exact", "cpu"), ("llm.int8", "int8", "cpu"), ("llm.int8-bnb", "int8", "reference")),
        *(("zeropoint", "int8", "cpu"), (MIXED, "int8", "cpu"), (WEIGHTS_ALONE, "int8", "reference")),
        ("qserve-g32", "exact", "cpu"),
    ):
        scheme = get_scheme(scheme)
        quantized = quantize(model, scheme, keep)
        assert keep == "int8" or row_fields(scheme, model)["kernels"] == said
        assert row_fields(scheme, quantized)["kernels"] == said
        quantized(blocks)
        assert row_fields(scheme, quantized)["kernels"] == said
        if scheme.name == "llm.int8":
            weights = {"exact": "exact", "int8": "dequantized"}[keep]
            assert row_fields(scheme, quantized)["outlier_weights"] == weights


def test_activations_in_other_bits_at_a_role():
    scheme = get_scheme("w4a4+activations=8@ffn_out")
    assert str(scheme.at("ffn_out").activations) == "int8 row absmax"
    assert str(scheme.at("attn_in").activations) == "int4 row absmax"
    assert get_scheme("w4a4+activations=8").at("attn_in").description == get_scheme("w4a8").description
    fields = row_fields(get_scheme("flexq-g16"), make_model("gpt2"))  # of 32 features, and 128 in the last projection
    assert fields["activation_bits"] == round((3 * 32 * 7 + 128 * 9) / (3 * 32 + 128), 4)
    assert fields["weight_bits"] == 7


# Groups of serving systems


@given(of_finite_floats(3, 96), st.sampled_from(["group-8", "group-32", "row", "tensor"]))
def test_no_code_of_qserve_leaves_int8(values, granularity):
    """Nor is one more than half a step, 8, beyond the code of its row; a rounded step may clip more."""
    found = reference.quantize(values.double(), Quantizer("int4-in-int8", granularity))
    largest = values.double().abs().amax() if granularity == "tensor" else values.double().abs().amax(1, keepdim=True)
    exact = (values.double() / (largest / 119).clamp(min=1e-300)).round()
    assert found.codes.dtype == torch.int8
    assert found.codes.min() >= -127
    assert (found.codes.double().abs() - exact.abs()).max() <= 8
    assert (found.codes.double() - exact).abs().max() <= 16


def test_groups_of_fireq_reach_from_the_largest_to_the_least():
    """Scales of e4m3 span 2^17: with a power of two of the whole weight, none of a trained one is lost."""
    weight = torch.tensor([[1e-3] * 8 + [40.0] * 8])
    found = reference.quantize(weight, Quantizer("int4-e4m3", "group-8"))
    assert found.dequantize()[0].tolist() == pytest.approx([1e-3] * 8 + [40.0] * 8, rel=0.07)
    tiny = reference.quantize(weight * 1e-30, Quantizer("int4-e4m3", "group-8"))
    assert torch.equal(tiny.codes, found.codes)


def test_how_many_groups_of_comet_have_eight_bits():
    """Less than a fifth, but one; of 4,096 features in groups of 128 six of 32."""
    assert [large_groups(groups) for groups in (1, 4, 9, 10, 24, 32)] == [1, 1, 1, 2, 4, 6]


# Runs

SMALL = {"models": ["pocket/gpt2-0.1m"], "block": 32, "blocks": 1}


def test_a_scheme_of_ones_own_in_a_sweep(tmp_path):
    """The number is that of the model under it, and another scheme of its name is measured anew."""
    model, blocks = load_model("pocket/gpt2-0.1m"), sample_blocks("pocket/gpt2-0.1m", 32, 1)
    own = [Scheme("mine", Quantizer("int8", "tensor"), COLUMN), Scheme("mine", ROW, COLUMN, 1.0)]
    found = [sweep(Sweep(schemes=["fp32", scheme], **SMALL), tmp_path) for scheme in own]
    for scheme, rows in zip(own, found, strict=True):
        assert [row["scheme"] for row in rows] == ["fp32", "mine"]
        assert rows[1]["scheme_parts"] == scheme.description
        assert rows[1]["value"] == perplexity(quantize(model, scheme), blocks)
    assert found[0][1]["value"] != found[1][1]["value"]
    assert sweep(Sweep(schemes=["fp32", own[0]], **SMALL), tmp_path) == found[0]


def test_schemes_in_an_experiment(tmp_path):
    asked = Sweep(schemes=["absmax", MIXED, "absmax", MIXED], **SMALL)
    assert asked.schemes == [get_scheme("absmax"), MIXED]
    assert names_of(Sweep(schemes="absmax,llm.int8", **SMALL)) == ["absmax", "llm.int8"]
    assert names_of(Latency(models=["m"], schemes=["fp32", "bitsandbytes"])) == ["fp32", "bitsandbytes"]
    for asked, message in (
        (["bitsandbytes"], "'bitsandbytes' is a variant, not a scheme"),
        ([{"name": "x"}], "field 'schemes.0': expected the name of a scheme, or a Scheme"),
        ([MIXED, Scheme("mixed", ROW, COLUMN)], "field 'schemes': expected schemes of different names"),
        ([], "field 'schemes'"),
    ):
        with pytest.raises(UserError, match=message):
            Sweep(schemes=asked, **SMALL)
    file = tmp_path / "mine.yaml"
    file.write_text("models: [gpt2]\nschemes:\n- fp32\n- absmin\n")
    with pytest.raises(UserError, match=r"mine.yaml, line 4, unknown scheme 'absmin'; did you mean absmax"):
        make_experiment(read_experiment(str(file)), Sweep)


ONE = "import outliers\nONE = outliers.Scheme('{}', outliers.Quantizer('int8', 'row'), None)\n"


def test_schemes_of_a_plugin(install, blocks):
    install("plugged_one", ONE.format("a8-row"), "one = plugged_one:ONE")
    install("plugged_two", ONE.format("b8-row") + "TWO = [ONE]\n", "two = plugged_two:TWO")
    model = make_model("gpt2")
    assert get_scheme("absmax").name == "absmax"
    assert "plugged_one" not in sys.modules, "nothing is loaded for a name that is known"
    scheme = get_scheme("a8-row")
    assert torch.equal(quantize(model, "a8-row")(blocks).logits, quantize(model, scheme)(blocks).logits)
    assert names_of(Sweep(schemes=["b8-row", "fp32"], **SMALL)) == ["b8-row", "fp32"]
    with pytest.raises(UserError, match="unknown scheme 'a8-rwo'; did you mean a8-row"):
        get_scheme("a8-rwo")


@pytest.mark.parametrize(
    ("code", "entry", "message"),
    [
        ("1 / 0", "x = broken:X", r"plugin 'x' of the installed distribution 'broken' cannot be imported \(ZeroDiv"),
        ("X = 5", "x = broken:X", "plugin 'x' .* is int; expected a Scheme or a list of them"),
        (ONE.format("llm.int8"), "x = broken:ONE", "plugin 'x' .* has a scheme 'llm.int8', as outliers itself has"),
        (ONE.format("twice") + "X = [ONE, ONE]", "x = broken:X", "has a scheme 'twice', as plugin 'x' of .* has"),
        ("import outliers\noutliers.Scheme('x', 5, None)", "x = broken:X", "activations of scheme 'x' is 5; "),
    ],
)
def test_a_broken_plugin_is_one_line(install, code, entry, message):
    install("broken", code, entry)
    assert get_scheme("absmax").name == "absmax"
    with pytest.raises(UserError, match=message):
        get_scheme("of a plugin")


KINDS = {  # of runs
    "sweep": lambda model, scheme, **more: Sweep(models=[model], schemes=[scheme], **more),
    "latency": lambda model, scheme, **more: Latency(models=[model], schemes=[scheme], **more),
    "zeroshot": lambda model, scheme, **more: ZeroShot(models=[model], schemes=[scheme], tasks=["piqa-local"], **more),
    "ablate": lambda model, scheme, **more: Ablation(model=model, scheme=scheme, features=[1], **more),
}


@pytest.mark.parametrize(
    ("kinds", "scheme", "more", "message"),
    [
        ("sweep latency zeroshot ablate", "absmax", {"skip": ["*.nothing"]}, r"unknown place in skip '\*.nothing'"),
        ("latency zeroshot ablate", "absmax+smoothing", {}, r"'absmax\+smoothing' needs the magnitudes of"),
        ("sweep latency", "w4-g37", {}, r"groups of 37 .* do not divide the \d+ of 'transformer.h.0.attn.c_attn'"),
        ("latency", "mxfp4", {}, "'mxfp4' has weights in mxfp4, whose codes are no int8"),
    ],
)
def test_what_does_not_go_with_a_model_is_refused_before_weights_are_read(
    kinds, scheme, more, message, tmp_path, caplog
):
    """They are broken, which nobody sees."""
    model = broken_weights(tmp_path / "model")
    for kind in kinds.split():
        with pytest.raises(UserError, match=message):
            run(KINDS[kind](model, scheme, **more), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not caplog.messages
