"""GGUF files as models: against transformers' own loader and the models they were written from, whole and damaged."""

import contextlib
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
from transformers.integrations.gguf.dequant import GGML_NAME, dequantize
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

from outliers import Sweep, UserError, load_int8, perplexity, sweep
from outliers.models.anatomy import context_length
from outliers.models.gguf import MODEL_TYPES
from outliers.models.gguf.header import read_header
from outliers.models.load import load_config, load_model, load_tokenizer, quantized_from, weights_hash
from outliers.models.source import find_model
from outliers.models.stream import stream_model
from tests import gguf_files
from tests.conftest import CONFIGS, LLAMA, needs_smollm2, slow_but
from tests.gguf_files import (
    fields_of,
    random_codes,
    rewrite,
    same_weights,
    save_gguf,
    tensors_of,
    vocabulary,
    write_gguf,
    write_stored,
)
from tests.models.test_experts import made as mixture
from tests.small_models import make_model, meanwhile

IN_GGUF = {"gemma3_text": "gemma3"}  # what transformers calls an architecture in its table of those in GGUF
UNREADABLE = {"mistral": "llama.cpp writes it as llama, and the package gguf knows no other name"}
ENCODERS = ("t5", "umt5")  # with a decoder
OF_MIXTURES = (
    "gpt_oss",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "glm4_moe",
    "deepseek_v2",
    "deepseek_v3",
    "llama4_text",
)  # whose files transformers by itself does not read, or not all of
CASES = {
    name: kind
    for name, (kind, _) in CONFIGS.items()
    if IN_GGUF.get(kind, kind) in GGUF_SUPPORTED_ARCHITECTURES and kind not in (*UNREADABLE, *OF_MIXTURES)
}
# What transformers' own loader needs to read a small model, which takes the defaults of large ones; ours reads others.
OF_LARGE_ONES = {
    "gpt2": {"n_positions": 1024},
    "qwen3": {"head_dim": 128},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma3_text": {"head_dim": 256, "query_pre_attn_scalar": 256, "layer_types": None},
    "qwen3_moe": {"moe_intermediate_size": 768, "norm_topk_prob": True},
}
PADDING = {"tokenizer.ggml.padding_token_id": 0}


def with_fields(monkeypatch, case: str, fields: dict):
    """A small random model of an architecture, with other values of some fields."""
    monkeypatch.setitem(CONFIGS, case, (CONFIGS[case][0], CONFIGS[case][1] | fields))
    return make_model(case)


def by_transformers(file: Path, dtype: torch.dtype = torch.float32):
    """A model as transformers loads it by itself."""
    keywords = {"gguf_file": file.name, "quantization_config": GgufConfig(dequantize=True)}
    return AutoModelForCausalLM.from_pretrained(file.parent, dtype=dtype, **keywords).eval()


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A small LLaMA, its matrices quantized to Q4_1, with the vocabulary of the pocket models."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": gguf_files.VOCABULARY}
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA | sizes | ids))
    for name, parameter in model.named_parameters():
        parameter.data += torch.randn_like(parameter) * (0.5 if "norm" in name else 0.1)
    return save_gguf(model, tmp_path_factory.mktemp("gguf") / "small.gguf", "Q4_1", **{"general.file_type": 3})


@pytest.fixture
def own(file, tmp_path) -> Path:
    """A copy of it that a test may change."""
    return Path(shutil.copy(file, tmp_path / "own.gguf"))


# Weights


def test_every_type_that_is_read_is_tested():
    assert {*MODEL_TYPES} == {*CASES.values(), *UNREADABLE, *ENCODERS, *OF_MIXTURES}


@pytest.mark.parametrize("case", slow_but(CASES))
def test_weights_are_those_of_transformers_and_of_the_model_written(case, tmp_path, monkeypatch, blocks):
    model = with_fields(monkeypatch, case, OF_LARGE_ONES.get(CASES[case], {}))
    file = save_gguf(model, tmp_path / f"{case}.gguf", **PADDING)
    ours = load_model(str(file))
    assert same_weights(ours, by_transformers(file))
    assert same_weights(load_model(str(file), "bfloat16"), by_transformers(file, torch.bfloat16))
    for own, parameter in ours.named_parameters():  # (w + 1) - 1 is not w, to a rounding
        torch.testing.assert_close(parameter, model.get_parameter(own), rtol=0, atol=1e-6)
    torch.testing.assert_close(ours(blocks).logits, model(blocks).logits, rtol=1e-4, atol=1e-4)


TURNED = {"rope_type": "default", "rope_theta": 77.0}


@pytest.mark.parametrize("kind", slow_but((*OF_MIXTURES, "qwen3_moe"), OF_MIXTURES[:1]))
def test_mixtures(kind, tmp_path, blocks):
    """All experts of a layer are a tensor, for each kind of projection."""
    of_kind = {
        "norm_topk_prob": kind not in ("olmoe", "qwen2_moe", "deepseek_v2"),
        "rope_parameters": {**TURNED},  # which transformers changes
    }
    model = mixture(kind, **of_kind, intermediate_size=64, moe_intermediate_size=64)
    file = save_gguf(model, tmp_path / "small.gguf")
    ours = load_model(str(file))
    assert ours.config.model_type == kind
    assert all(torch.equal(parameter, ours.get_parameter(own)) for own, parameter in model.named_parameters())
    assert torch.equal(ours(blocks).logits, model(blocks).logits)
    assert perplexity(stream_model(str(file)), blocks) == perplexity(ours, blocks)
    fields, fused = fields_of(model) | vocabulary(model.config.vocab_size), tensors_of(model)
    for name in [name for name in fused if "_gate_exps." in name]:
        parts = [fused.pop(name), fused.pop(name.replace("_gate_", "_up_"))]
        fused[name.replace("_gate_", "_gate_up_")] = np.concatenate(parts, 1)
    architecture = read_header(file).architecture
    assert same_weights(ours, load_model(str(write_gguf(tmp_path / "fused.gguf", architecture, fields, fused))))


def with_next_tokens(fields: dict, tensors: dict) -> tuple[dict, dict]:
    """With a layer at the end that predicts a further token."""
    more = {name.replace("blk.1.", "blk.2."): one for name, one in tensors.items() if name.startswith("blk.1.")}
    more["blk.2.nextn.eh_proj.weight"] = np.zeros((32, 64), np.float32)
    return fields | {"block_count": 3, "nextn_predict_layers": 1}, tensors | more


def with_heads_together(fields: dict, tensors: dict) -> tuple[dict, dict]:
    """As older files have latent attention: keys and values of a head in one tensor, and its own widths."""
    keys, values = ([name for name in tensors if f".attn_{kind}_b." in name] for kind in "kv")
    whole = {
        name.replace("_k_b.", "_kv_b."): np.concatenate([tensors[name].swapaxes(1, 2), tensors[other]], 1).reshape(
            -1, 16
        )
        for name, other in zip(keys, values, strict=True)
    }
    widths = {f"attention.{name}_length": fields[f"attention.{name}_length_mla"] for name in ("key", "value")}
    left = {name: one for name, one in fields.items() if not name.endswith("_mla")}
    return left | widths, {name: one for name, one in tensors.items() if name not in (*keys, *values)} | whole


def with_yarn(fields: dict, tensors: dict) -> tuple[dict, dict]:
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_log_multiplier": 0.1}
    return fields | {f"rope.scaling.{name}": value for name, value in scaling.items()}, tensors


SCALED_LOGITS = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@pytest.mark.parametrize(
    ("kind", "change", "rotary"),
    [
        ("glm4_moe", with_next_tokens, {"rope_type": "default", "partial_rotary_factor": 0.5}),
        ("deepseek_v3", with_heads_together, {"rope_type": "default"}),
        ("deepseek_v3", with_yarn, SCALED_LOGITS),
        ("deepseek_v2", with_yarn, SCALED_LOGITS),
    ],
)
def test_what_files_of_mixtures_have_besides(kind, change, rotary, tmp_path, blocks):
    model = mixture(kind, rope_parameters=rotary | {"rope_theta": 77.0}, norm_topk_prob=kind != "deepseek_v2")
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += torch.linspace(-1, 1, len(buffer))
    fields, tensors = change(fields_of(model) | vocabulary(100), tensors_of(model))
    architecture = gguf_files.OTHER_NAMES[kind]
    ours = load_model(str(write_gguf(tmp_path / "small.gguf", architecture, fields, tensors)))
    assert torch.equal(ours(blocks).logits, model(blocks).logits)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_types(kind, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA, vocab_size=100))
    file = save_gguf(model, tmp_path / "small.gguf", kind)
    assert {tensor.type.name for tensor in read_header(file).tensors} == {"F32", kind}
    assert same_weights(load_model(str(file)), by_transformers(file))
    assert quantized_from(find_model(str(file))) == (kind if kind.startswith("Q") else None)
    assert same_weights(load_model(str(file), "float16"), by_transformers(file, torch.float16))


@pytest.mark.parametrize("code", sorted(GGML_NAME))
def test_types_that_only_llama_cpp_writes(code, tmp_path):
    kind = gguf.GGMLQuantizationType(code)
    codes = random_codes(kind.name, blocks=6)
    stored = {"blk.0.ffn_up.weight": (codes.reshape(3, -1), kind)}
    file = write_stored(tmp_path / "one.gguf", "llama", {"block_count": 1}, stored)
    header = read_header(file)
    values = header.read(header.tensors[0])
    assert values.shape == (3, 2 * gguf.GGML_QUANT_SIZES[kind][0])
    expected = dequantize(torch.from_numpy(codes), code)
    torch.testing.assert_close(torch.from_numpy(values).flatten(), expected, rtol=1e-6, atol=1e-6)
    assert header.type == kind.name


@pytest.mark.parametrize(("said", "type"), [(15, "Q4_K_M"), *((said, "Q4_1") for said in (0, 1, 3, 999, 1024, None))])
def test_what_a_file_was_quantized_to(file, said, type):
    header = read_header(file)
    header = header._replace(fields=header.fields | {"general.file_type": said})
    assert header.type == type
    plain = tuple(tensor for tensor in header.tensors if tensor.type.name == "F32")
    assert header._replace(tensors=plain).type is None, "whatever it says"


# Fields


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"attention.scale": 0.5}, "says llama.attention.scale 0.5, and llama as transformers computes it"),
        ({"attention.causal": False}, "says llama.attention.causal False"),
        ({"attention.sliding_window": 8}, "says llama.attention.sliding_window 8"),
        ({"attention.value_length": 4}, "says llama.attention.value_length 4"),
        ({"attention.max_alibi_bias": 8.0}, "says llama.attention.max_alibi_bias 8.0"),
        ({"expert_count": 8, "expert_used_count": 2}, r"lacks \d tensors .*; expected those of mixtral"),
        ({"logit_scale": 0.25}, "says llama.logit_scale 0.25"),
        ({"final_logit_softcapping": 30.0}, "says llama.final_logit_softcapping 30.0"),
        ({"attention.head_count_kv": [2, 4]}, r"says llama.attention.head_count_kv \[2, 4\]"),
        ({"wkv.head_size": 8}, "says llama.wkv.head_size 8"),
        ({"attention.head_count": None}, "is incomplete: it has no field llama.attention.head_count"),
        ({"attention.layer_norm_rms_epsilon": None}, "has no field llama.attention.layer_norm_rms_epsilon"),
    ],
)
def test_fields_that_the_model_does_not_compute_are_refused(said, message, tmp_path):
    file = save_gguf(make_model("llama"), tmp_path / "small.gguf", **said)
    said = refusals(str(file))
    assert all(re.search(message, said[function]) for function in READERS), said


@pytest.mark.parametrize(
    "said",
    [
        {"attention.scale": 8**-0.5, "attention.causal": True, "attention.value_length": 8, "expert_count": 0},
        {"attention.sliding_window": 64, "logit_scale": 1.0, "tensor_data_layout": "Meta AI original pth"},
        {"attention.head_count_kv": [2, 2], "feed_forward_length": [48, 48], "rope.scaling.finetuned": True},
        {"embedding_scale": 0.0, "residual_scale": 0.0, "attention.output_scale": 0.0},
    ],
)
def test_fields_that_change_nothing_are_taken(said, tmp_path):
    model = make_model("llama")
    ours = load_model(str(save_gguf(model, tmp_path / "small.gguf", **said)))
    assert same_weights(ours, model)


def test_a_field_that_llama_cpp_does_not_know_is_said(own, tmp_path, caplog):
    model = make_model("llama")
    ours = load_model(str(save_gguf(model, tmp_path / "small.gguf", **{"my.note": 1.0})))
    assert "1 field for which llama.cpp has no place (llama.my.note); they are ignored" in caplog.text
    assert ours.ignored_tensors == ["llama.my.note"]


@pytest.mark.parametrize(
    ("case", "fields"),
    [  # also where transformers by itself takes a default
        *(("gpt2", {}), ("qwen3", {}), ("qwen3-moe", {"norm_topk_prob": True}), ("phi3", {"sliding_window": 8})),
        ("starcoder2", {"rope_parameters": TURNED}),
        ("stablelm", {"rope_parameters": TURNED | {"partial_rotary_factor": 0.5}}),
        ("llama", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("qwen3", {"attention_bias": True}),
        ("gpt2", {"n_inner": 48}),
        ("starcoder2", {"use_bias": False}),
        ("stablelm", {"use_qkv_bias": True}),
        ("starcoder2", {"sliding_window": 8}),
        ("gemma2", {"query_pre_attn_scalar": 12, "layer_types": ["full_attention", "sliding_attention"]}),
        ("gemma3", {"query_pre_attn_scalar": 16, "layer_types": ["full_attention", "sliding_attention"]}),
    ],
)
def test_what_tensors_and_fields_say_of_a_configuration_is_taken(case, fields, tmp_path, monkeypatch, blocks):
    model = with_fields(monkeypatch, case, fields)
    said = {}
    if "query_pre_attn_scalar" in fields:
        windows = [kind == "sliding_attention" for kind in fields["layer_types"]]
        said = {"attention.scale": fields["query_pre_attn_scalar"] ** -0.5}
        said["attention.sliding_window_pattern"] = windows
    if fields.get("n_inner"):
        said["feed_forward_length"] = 48
    for name, parameter in model.named_parameters():
        parameter.data += name.endswith("bias") * torch.randn_like(parameter)
    ours = load_model(str(save_gguf(model, tmp_path / "small.gguf", **PADDING, **said)))
    torch.testing.assert_close(ours(blocks).logits, model(blocks).logits, rtol=1e-4, atol=1e-4)


def test_biases_of_some_projections(tmp_path, monkeypatch, blocks):
    """Of queries, keys and values and not of the output, as models of other families that were written as llama."""
    model = with_fields(monkeypatch, "llama", {"attention_bias": True})
    for name, parameter in model.named_parameters():
        parameter.data *= "o_proj.bias" not in name
    tensors = {name: one for name, one in gguf_files.tensors_of(model).items() if "attn_output.bias" not in name}
    file = write_gguf(tmp_path / "small.gguf", "llama", gguf_files.fields_of(model) | vocabulary(100), tensors)
    expected = perplexity(model, blocks)
    for ours in (load_model(str(file)), stream_model(str(file))):
        assert perplexity(ours, blocks) == pytest.approx(expected, rel=1e-5)


# Rotary embeddings


def rotary(tmp_path, parameters: dict, said: dict, factors=None):
    """Small LLaMAs of these rotary parameters: as it is, and read from a file that says so."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama", **LLAMA, vocab_size=100, rope_parameters=parameters)
    model = AutoModelForCausalLM.from_config(config).eval()
    tensors = gguf_files.tensors_of(model) | ({} if factors is None else {"rope_freqs.weight": factors})
    fields = gguf_files.fields_of(model) | vocabulary(100) | said
    return model, load_model(str(write_gguf(tmp_path / "small.gguf", "llama", fields, tensors)))


LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}


@pytest.mark.parametrize("high", [4.0, 1.0])
def test_rotary_embeddings_of_llama_3_and_4(high, tmp_path, blocks):
    """Whose files have the factor of each frequency, by the formula of Meta's code."""
    wavelengths = 2 * np.pi * 1e6 ** (np.arange(0, 8, 2) / 8)
    smooth = (8192 / wavelengths - 1) / max(high - 1, 1)
    factors = 1 / ((1 - smooth) / 32 + smooth)
    factors = np.where(wavelengths < 8192 / high, 1, np.where(wavelengths > 8192, 32, factors)).astype(np.float32)
    assert len(set(factors)) > 2 or high == 1
    scaled = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": high}
    parameters = scaled | {"original_max_position_embeddings": 8192, "rope_type": "llama3", "rope_theta": 1e6}
    model, ours = rotary(tmp_path, parameters, {}, factors)
    torch.testing.assert_close(ours(blocks).logits, model(blocks).logits, rtol=1e-5, atol=1e-6)
    with pytest.raises(UserError, match="otherwise than Llama 3"):
        rotary(tmp_path, parameters, {}, factors[::-1])


LINEAR_BY_4, YARN_BY_4 = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}
DEFAULT = {"rope_type": "default"}
SCALED = {  # what a file says, and the parameters by which transformers computes the same
    "linear": (LINEAR, LINEAR_BY_4),
    "yarn": (YARN, YARN_BY_4 | {"original_max_position_embeddings": 16}),
    "old-linear": ({"rope.scale_linear": 4.0}, LINEAR_BY_4),
    "new-beside-old": ({"rope.scale_linear": 2.0, "rope.scaling.factor": 4.0}, LINEAR_BY_4),
    "factor-of-no-type": ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, DEFAULT),
    "factor-of-0": ({"rope.scaling.factor": 0.0}, DEFAULT),
    "attention": (
        YARN | {"rope.scaling.attn_factor": 1.5},
        YARN_BY_4 | {"original_max_position_embeddings": 16, "attention_factor": 1.5 * (1 + 0.1 * math.log(4))},
    ),
    "betas": (
        YARN | {"rope.scaling.yarn_beta_fast": 2.0, "rope.scaling.yarn_beta_slow": 0.5},
        YARN_BY_4 | {"original_max_position_embeddings": 16, "beta_fast": 2.0, "beta_slow": 0.5},
    ),
    "yarn-of-the-context": ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, YARN_BY_4),
    "yarn-without-factor": ({"rope.scaling.type": "yarn"}, YARN_BY_4 | {"factor": 1.0}),
}


@pytest.mark.parametrize("case", SCALED)
def test_fields_that_scale_rotary_embeddings(case, tmp_path, blocks):
    said, parameters = SCALED[case]
    model, ours = rotary(tmp_path, parameters | {"rope_theta": 500.0}, said)
    torch.testing.assert_close(ours(blocks).logits, model(blocks).logits, rtol=1e-5, atol=1e-6)
    assert context_length(ours.config) == context_length(model.config)


def test_rotary_embeddings_that_would_be_other_ones(tmp_path):
    for said, message in (
        ({"rope.scaling.type": "longrope"}, "scales rotary embeddings by 'longrope'"),
        ({"rope.dimension_count": 4, "attention.key_length": 8}, "4 of 8 features a head"),
        ({"rope.dimension_count": 4, "attention.key_length": None}, "4 of 8 features a head"),
        (LINEAR | {"rope.scaling.attn_factor": 1.5}, r"multiplies rotary embeddings by 1.5 .* YaRN alone"),
        (LINEAR | {"rope.scaling.yarn_ext_factor": 1.0}, "mixes YaRN by a share of 1.0"),
        (LINEAR | {"rope.scaling.factor": -4.0}, "'rope.scaling.factor' is -4.0"),
        (YARN | {"rope.scaling.yarn_log_multiplier": 0.1}, "says rope.scaling.yarn_log_multiplier 0.1, which llama"),
        ({"rope.scaling.alpha": 1000.0}, "says llama.rope.scaling.alpha 1000.0, and llama as transformers"),
        ({"rope.freq_base": 0.0}, "'rope.freq_base' is 0.0"),
        ({"rope.freq_base_swa": 100.0}, "of two bases"),
    ):
        with pytest.raises(UserError, match=message):
            rotary(tmp_path, {"rope_type": "default", "rope_theta": 500.0}, said)


# Everything that is measured of a model


def test_everybody_has_a_tokenizer_of_their_own(file):
    load_tokenizer(str(file)).add_tokens(["xyzzy"])
    assert len(load_tokenizer(str(file))) == gguf_files.VOCABULARY


def alter(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-400] + bytes(400))


@pytest.mark.parametrize("change", [lambda file: os.truncate(file, 100_000), alter, Path.unlink])
def test_a_file_that_changes_while_it_is_measured(own, tmp_path, change):
    scheme = meanwhile(lambda: own.exists() and change(own))
    (row,) = sweep(Sweep(models=[str(own)], schemes=[scheme], block=32, blocks=1), tmp_path / "out")
    assert row["failed"].startswith(f"the weights of '{own}' changed while they were measured ('{own}')")


def test_a_changed_file_is_read_anew(own):
    """And a configuration that somebody changed is none of the others' who ask for it."""
    before, config = weights_hash(load_model(str(own))), load_config(str(own))
    config.vocab_size += 1
    assert load_config(str(own)).vocab_size == config.vocab_size - 1
    alter(own)
    assert weights_hash(load_model(str(own))) != before


# Places


def test_a_folder_that_holds_a_file(own, file):
    """Of several one must be named; safetensors beside it come first."""
    (own.parent / "._own.gguf").write_bytes(b"of the system")
    assert weights_hash(load_model(str(own.parent))) == weights_hash(load_model(str(file)))
    assert quantized_from(find_model(str(own.parent))) == "Q4_1"
    shutil.copy(own, own.with_name("more.gguf"))
    with pytest.raises(UserError, match=r"holds 2 GGUF files \(more\.gguf, own\.gguf\); name one of them"):
        load_model(str(own.parent))
    make_model("llama").save_pretrained(own.parent)
    assert same_weights(load_model(str(own.parent)), make_model("llama"))
    assert quantized_from(find_model(str(own.parent))) is None


def test_files_by_unusual_names(own, monkeypatch):
    want = weights_hash(load_model(str(own)))
    monkeypatch.chdir(own.parent)
    inside = Path("model.gguf") / "inside.gguf"
    inside.parent.mkdir()
    for name in (".hidden.gguf", "LOUD.GGUF", inside):
        shutil.copy(own, name)
    Path("link.gguf").symlink_to(inside)
    for name in (".hidden.gguf", "LOUD.GGUF", "model.gguf", "link.gguf"):
        assert weights_hash(load_model(name)) == want


def test_places_without_a_model(own, tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "inside").mkdir()
    os.mkfifo(tmp_path / "inside" / "pipe.gguf")
    for name in ("missing.gguf", "pipe.gguf"):
        with pytest.raises(UserError, match="does not exist, or is not a file; expected a GGUF file"):
            load_model(str(tmp_path / name))
    with pytest.raises(UserError, match="is not a readable file"):
        load_model(str(tmp_path / "inside"))
    with pytest.raises(UserError, match=r"is a local model and has no revision 'main'; leave the revision out"):
        load_model(str(own), revision="main")


# Damage


def streamed(name: str) -> float:
    """Pass a block through a streamed model."""
    return perplexity(stream_model(name), torch.zeros(1, 4, dtype=torch.int64))


READERS = (load_model, streamed, load_int8)  # of weights


def refusals(name: str) -> dict:
    """What everything that reads a file says of it, in one line each."""
    said = {}
    for function in (load_config, load_tokenizer, *READERS):
        try:
            function(name)
        except UserError as error:
            said[function] = str(error)
    return said


def of_bytes(change):
    """Damage that makes other bytes of a file's."""

    def damage(file: Path) -> None:
        file.write_bytes(change(file.read_bytes()))

    return damage


def at(name: str, position: int, form: str, *values):
    """Damage behind a name in the header.

    Of a field, its type is at 0 and its value at 4; of a list, the type of its elements at 4 and their number at 8.
    Of a matrix, the number of dimensions is at 0, they at 4 and 12, its type at 20 and its offset at 24.
    """
    return lambda file: rewrite(file, name, position, form, *values)


def put(position: int, form: str, *values):
    """Damage at a place in the file."""

    def change(content: bytes) -> bytes:
        content = bytearray(content)
        struct.pack_into(form, content, position, *values)
        return bytes(content)

    return of_bytes(change)


UP, DOWN = "blk.0.ffn_up.weight", "blk.1.ffn_down.weight"
DAMAGE = {  # what was done, and what is said
    "empty": (of_bytes(lambda content: b""), "is not in GGUF format"),
    "magic": (put(0, "4s", b"GGML"), "is not in GGUF format"),
    "tensor count": (put(8, "<Q", 2**63), "is damaged: it claims 9,223,372,036,854,775,808 tensors"),
    "more tensors": (put(8, "<Q", 60_000), "cannot read"),
    "field count": (put(16, "<Q", 2**40), "is damaged: it claims"),
    "more fields": (put(16, "<Q", 60_000), "cannot read"),
    "list length": (at("tokenizer.ggml.token_type", 8, "<Q", 2**60), "cannot read"),
    "long list": (at("tokenizer.ggml.token_type", 8, "<Q", 100_000), "cannot read"),
    "string length": (at("tokenizer.ggml.model", 4, "<Q", 2**62), "cannot read"),
    "layers": (at("llama.block_count", 4, "<i", 2**31 - 1), "it claims 2147483647 layers and holds 2"),
    "no layer": (at("llama.block_count", 4, "<i", 0), "it claims 0 layers"),
    "no heads": (at("llama.attention.head_count", 4, "<i", 0), "is damaged: its 'attention.head_count' is 0"),
    "no key heads": (at("llama.attention.head_count_kv", 4, "<i", -1), "its 'attention.head_count_kv' is -1"),
    "width": (at("llama.embedding_length", 4, "<i", 2**31 - 1), "cannot read|has other sizes"),
    "vocabulary": (at("llama.vocab_size", 4, "<i", 2**31 - 1), "asks for vocab_size"),
    "inner width": (at("llama.feed_forward_length", 4, "<i", 2**31 - 1), "asks for intermediate_size"),
    "size of a head": (at("llama.rope.dimension_count", 4, "<i", 2**30), "1073741824 of 16 features a head"),
    "type of a tensor": (at(UP, 20, "<I", 999), "cannot read .*999 is not a valid"),
    "type that is not dequantized": (at(DOWN, 20, "<I", 41), "cannot read .*Q1_0 is not yet implemented"),
    "other type": (at(UP, 20, "<I", 0), "in the place of another|cut short or damaged"),
    "dimensions": (at(UP, 0, "<I", 2**32 - 1), "cannot read"),
    "product of dimensions": (at(UP, 4, "<QQ", 2**40, 2**40), "cut short or damaged"),
    "no row": (at(UP, 12, "<Q", 0), "cannot read .*has the shape"),
    "fewer rows": (at(UP, 12, "<Q", 127), "has other sizes of 1 tensors .*mlp.up_proj"),
    "same offset": (at(UP, 24, "<Q", 0), "in the place of another"),
    "unknown name": (at(UP, -len(UP), "19s", b"blk.0.ffn_xx.weight"), "lacks 1 tensors .*up_proj"),
    "no architecture": (at("general.architecture", -20, "20s", b"general.architectura"), "not state its architecture"),
    "architecture": (at("general.architecture", 12, "5s", b"mamba"), "does not state its number of layers"),
    "end": (of_bytes(lambda content: content[:-1]), "cut short or damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage(damage, own):
    change, message = DAMAGE[damage]
    before = own.read_bytes()
    change(own)
    assert own.read_bytes() != before
    start, said = time.perf_counter(), refusals(str(own))
    assert time.perf_counter() - start < 5
    for function in (load_config, *READERS):
        assert said[function].startswith((f"'{own}'", f"cannot read '{own}'"))
        assert re.search(message, said[function]), said[function]
    with contextlib.suppress(UserError):
        read_header(own)
        return  # the header is as it should be, and so may be the tokenizer
    assert len(said) == 5
    assert len(set(said.values())) == 1


def test_parts_of_a_model_and_other_models(own, tmp_path):
    fields = {"block_count": 1, "embedding_length": 8, "attention.head_count": 2}
    fields["attention.layer_norm_rms_epsilon"] = 1e-5
    norm, embeddings = np.ones(8, np.float32), np.ones((100, 8), np.float32)
    tensors = {"blk.0.attn_norm.weight": norm, "token_embd.weight": embeddings}
    for architecture, changes, message in (
        ("llama", {"split.count": 3}, "is part 1 of 3 of a model in several files; join them"),
        ("llama", {"general.type": "adapter"}, "holds no model but what its 'general.type' calls 'adapter'"),
        ("clip", {"block_count": None}, "does not state its number of layers; expected a language model"),
        ("clip", {}, "GGUF model with architecture clip is not supported yet"),
        ("mamba", {"attention.head_count": None}, "unknown architecture 'mamba'"),
        ("llama", {}, "lacks 9 tensors"),
    ):
        file = write_gguf(tmp_path / "other.gguf", architecture, fields | vocabulary(100) | changes, tensors)
        said = refusals(str(file))
        for function in READERS:
            assert re.search(message, said[function]), said[function]


def test_a_later_part_of_a_model(tmp_path):
    """Which llama.cpp writes with the fields of its place among the parts alone."""
    content = b"GGUF" + struct.pack("<IQQ", 3, 0, 3)
    for name, value in (("split.no", 1), ("split.count", 3), ("split.tensors.count", 9)):
        content += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<IH", 2, value)
    file = tmp_path / "model-00002-of-00003.gguf"
    file.write_bytes(content)
    said = refusals(str(file))
    assert all("is part 2 of 3 of a model in several files; join them" in said[one] for one in (load_config, *READERS))


def test_tensors_that_transformers_would_leave_out(tmp_path):
    """Without them the model would be another one."""
    model = make_model("llama")
    for name, message in {
        "blk.1.attn_q.bias": r"lacks 5 tensors \(model.layers.0.self_attn.q_proj.bias, ",
        "blk.1.attn_sinks.weight": r"holds beside the model 1 tensors \(blk.1.attn_sinks.weight\)",
    }.items():
        tensors = gguf_files.tensors_of(model) | {name: np.ones(32, np.float32)}
        file = write_gguf(tmp_path / "small.gguf", "llama", gguf_files.fields_of(model) | vocabulary(100), tensors)
        with pytest.raises(UserError, match=message):
            load_model(str(file))


def test_heads_of_gemma_that_are_scaled_otherwise(tmp_path, monkeypatch):
    """As of its models with 27 billion parameters."""
    model = with_fields(monkeypatch, "gemma2", {"head_dim": 8, "query_pre_attn_scalar": 12})
    for said in ({}, {"attention.scale": 0.0}):
        with pytest.raises(UserError, match="does not say how its attention is scaled"):
            load_model(str(save_gguf(model, tmp_path / "small.gguf", **said)))


@pytest.mark.nightly("outliers/models/gguf/")
@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what a process took at most")
def test_nothing_is_allocated_that_a_header_promises(file, tmp_path):
    """Also where the file is much larger than its header, with holes for the rest."""
    names = ("list length", "long list", "string length", "width", "vocabulary", "inner width", "product of dimensions")
    for number, name in enumerate((*names, "layers", "size of a head", "dimensions", "more fields", "more tensors")):
        copy = Path(shutil.copy(file, tmp_path / f"{number}.gguf"))
        DAMAGE[name][0](copy)
        os.truncate(copy, 3_000_000_000)
    for number, (kind, size) in enumerate(((0, 20_000_000), (4, 5_000_000), (8, 2**40))):  # bytes, integers, strings
        copy = Path(shutil.copy(file, tmp_path / f"list{number}.gguf"))
        rewrite(copy, "tokenizer.ggml.token_type", 4, "<IQ", kind, size)
        os.truncate(copy, 3_000_000_000)
    program = """
import sys
from pathlib import Path
from outliers.errors import UserError
from outliers.models.load import load_model
from outliers.models.stream import stream_model
from outliers.quantization.store import load_int8

def peak():  # not ru_maxrss, which counts the process that started this one
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024

before = peak()
for number, file in enumerate(sorted(Path(sys.argv[1]).glob("*.gguf"))):
    try:
        (load_model, stream_model, load_int8)[number % 3](str(file))
    except UserError as error:
        assert "\\n" not in str(error)
    else:
        raise AssertionError(file)
print(before, peak())
"""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    before, after = map(int, done.stdout.split())
    assert after - before < 0.6e9, "beyond what imports take"
    assert time.perf_counter() - start < 60


# The packaged model


@needs_smollm2
def test_smollm2_is_what_transformers_reads():
    """Its loader takes a quarter of a minute: what it made was hashed once, and what its tokenizer makes of a text."""
    model, tokenizer = load_model("smollm2-135m"), load_tokenizer("smollm2-135m")
    assert (weights_hash(model), quantized_from(find_model("smollm2-135m"))) == ("ac1b274ab5e372f9", "Q4_1")
    ids = tokenizer("<|im_start|>user\nIt's 1969:  naïve 你好<|im_end|>").input_ids
    assert ids == [1, 4093, 198, 1589, 506, 216, 33, 41, 38, 41, 42, 216, 15486, 46494, 216, 18645, 250, 48392, 138, 2]
    asked = tokenizer("The capital of France is", return_tensors="pt")
    said = model.generate(**asked, max_new_tokens=1, do_sample=False, pad_token_id=0)
    assert tokenizer.decode(said[0]) == "The capital of France is Paris"
