"""Anatomy, loading, the pocket family."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from outliers import load_model, load_tokenizer, plant, trace
from outliers.errors import UserError, reason_of
from outliers.models.anatomy import anatomy_of, context_length, projections, readers
from outliers.models.names import POCKET, pocket_models
from outliers.models.pocket.ladder import LADDER
from outliers.models.skeleton import skeleton
from outliers.tracing.result import STREAM
from tests.conftest import LLAMA, every_kind
from tests.small_models import make_model

QKV = [("q_proj", 32, 32), ("k_proj", 32, 32), ("v_proj", 32, 32)]
GROUPED = [("q_proj", 32, 32), ("k_proj", 32, 16), ("v_proj", 32, 16)]
FAIRSEQ = [*QKV, ("out_proj", 32, 32), ("fc1", 32, 64), ("fc2", 64, 32)]
GATED = [*GROUPED, ("o_proj", 32, 32), ("gate_proj", 32, 48), ("up_proj", 32, 48), ("down_proj", 48, 32)]
FUSED = [("qkv_proj", 32, 64), ("o_proj", 32, 32), ("gate_up_proj", 32, 96), ("down_proj", 48, 32)]
EXPERTS = [*4 * [("gate_up_proj", 32, 96)], *4 * [("down_proj", 48, 32)]]
SPARSE = [*GATED[:4], *4 * [("gate_up_proj", 32, 32)], *4 * [("down_proj", 16, 32)]]
WIDE = [("q_proj", 32, 64), ("k_proj", 32, 32), ("v_proj", 32, 32), ("o_proj", 64, 32), *GATED[4:]]
NEOX = [("query_key_value", 32, 96), ("dense", 32, 32), ("dense_h_to_4h", 32, 128), ("dense_4h_to_h", 128, 32)]

# What one layer of small models, or each of their layers, holds: last part of the name, features in, features out.
FACTS = {
    "gpt2": [("c_attn", 32, 96), ("c_proj", 32, 32), ("c_fc", 32, 128), ("c_proj", 128, 32)],
    "gptj": [*QKV, ("out_proj", 32, 32), ("fc_in", 32, 128), ("fc_out", 128, 32)],
    "gpt_neo": [*QKV, ("out_proj", 32, 32), ("c_fc", 32, 128), ("c_proj", 128, 32)],
    "gpt_neox": [*NEOX[:2], ("dense_h_to_4h", 32, 64), ("dense_4h_to_h", 64, 32)],
    "bloom": NEOX,
    **dict.fromkeys(("opt", "opt-350m", "xglm"), FAIRSEQ),
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "olmo2"), GATED),
    **dict.fromkeys(("stablelm", "stablelm-12b"), GATED),
    "phi3": FUSED,
    "starcoder2": [*GATED[:4], ("c_fc", 32, 48), ("c_proj", 48, 32)],
    **dict.fromkeys(("gemma", "gemma2", "gemma3"), WIDE),
    "falcon": [("query_key_value", 32, 48), *NEOX[1:]],
    "falcon-rw": NEOX,
    **{case: [("query_key_value", 32, 64), *NEOX[1:]] for case in ("falcon-40b", "falcon-11b")},
    "mpt": [("Wqkv", 32, 96), ("out_proj", 32, 32), ("up_proj", 32, 128), ("down_proj", 128, 32)],
    **{case: [*GATED[:4], *EXPERTS] for case in ("mixtral", "gpt-oss")},
    "qwen3-moe": SPARSE,
    "qwen3-moe-dense-first": (GATED, SPARSE),
}


def shape(module) -> tuple[int, int]:
    """Features in and out of a projection."""
    return tuple(module.weight.shape) if isinstance(module, Conv1D) else tuple(module.weight.shape[::-1])


@pytest.mark.parametrize("case", FACTS)
def test_projections_are_the_known_modules(case):
    found = [(p.layer, p.path.rpartition(".")[2], *shape(p.module)) for p in projections(make_model(case))]
    facts = FACTS[case] if isinstance(FACTS[case], tuple) else [FACTS[case]] * 2
    assert found == [(layer, *fact) for layer in range(2) for fact in facts[layer]]


@every_kind
def test_roles_are_what_their_names_say(case, blocks):
    """Inside and outside the attention; what writes to the hidden states, and what reads them."""
    model, seen = make_model(case), {}
    attention = f".{anatomy_of(model.config).attention}."
    for p in projections(model):
        assert (attention in p.path) == (p.role in ("attn_in", "attn_out"))
        assert p.role not in ("attn_out", "ffn_out") or shape(p.module)[1] == 32, "it is added to the hidden states"
    for p in readers(model):
        p.module.register_forward_pre_hook(lambda _, x, p=p: seen.setdefault(p.place, []).append(x[0].flatten(0, -2)))
    model(blocks[:1])
    for (_, role), inputs in seen.items():  # of experts, each of which reads some of the tokens, a state each
        assert all(torch.equal(inputs[0], other) for other in inputs), "projections of one role share their input"
        assert inputs[0].shape[-1] == 32 or role not in STREAM
    assert {(layer, role) for layer in range(2) for role in ("attn_in", "attn_out", "ffn_in")} <= set(seen)


@pytest.mark.parametrize(("case", "length"), [("gpt2", 64), ("opt", 64), ("mpt", 64), ("bloom", None)])
def test_context_length(case, length):
    assert context_length(make_model(case).config) == length


@pytest.mark.parametrize(
    ("scaling", "length"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 4.0}, 128),  # of the length that the configuration has
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}, 32),
        ({"rope_type": "linear", "factor": 4.0}, 128),
        ({"rope_type": "dynamic", "factor": 4.0}, 128),
        ({"rope_type": "default"}, 32),
    ],
)
def test_context_length_of_scaled_positions(scaling, length):
    rotary = scaling | {"rope_theta": 10_000.0}
    config = AutoConfig.for_model("llama", **LLAMA | {"max_position_embeddings": 32, "rope_parameters": rotary})
    assert context_length(config) == length


def test_context_length_of_layers_of_two_kinds():
    rotary = {"full_attention": {"rope_type": "linear", "factor": 4.0}, "sliding_attention": {"rope_type": "default"}}
    rotary = {kind: parameters | {"rope_theta": 10_000.0} for kind, parameters in rotary.items()}
    fields = {"max_position_embeddings": 32, "rope_parameters": rotary}
    assert context_length(AutoConfig.for_model("gemma3_text", **LLAMA | fields)) == 128


def test_architectures_that_nothing_is_found_of():
    from transformers import BeitConfig, PretrainedConfig

    with pytest.raises(UserError, match="unknown architecture 'beit': transformers makes no language model of it"):
        anatomy_of(BeitConfig())
    unknown = PretrainedConfig()
    unknown.model_type = "olmo9"
    with pytest.raises(UserError, match=r"unknown architecture 'olmo9' .*similar: olmo.*newer transformers"):
        anatomy_of(unknown)


@pytest.mark.parametrize("name", [name for name in pocket_models() if "vit" not in name])
def test_pocket_models(name):
    model, tokenizer = load_model(name), load_tokenizer(name)
    assert model.config.vocab_size == len(tokenizer) == 4096
    assert getattr(model.config, "max_position_embeddings", 256) == tokenizer.model_max_length == 256
    text = "A recipe for 2 loaves: flour, water & salt.\n"
    special = LADDER[name.removeprefix("pocket/")].objective != "next tokens"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=special) == text
    assert (POCKET / name.removeprefix("pocket/") / "README.md").exists()


def test_pocket_family_is_complete_and_light():
    shipped = {name.removeprefix("pocket/") for name in pocket_models()}
    assert shipped == set(LADDER)
    assert {LADDER[name].architecture for name in shipped} == {"gpt2", "opt", "gptj", "mixtral", "t5", "bert", "vit"}
    assert sum(file.stat().st_size for file in POCKET.rglob("*.safetensors")) <= 40e6


@every_kind
def test_planting_keeps_the_function(case, blocks):
    """Exactly for a power of two, up to rounding for another factor; the given model is not touched, and the features
    are found."""
    model = make_model(case)
    before, weights = model(blocks).logits, {k: v.clone() for k, v in model.state_dict().items()}
    if case != "opt-350m":  # where a constant is added
        assert torch.equal(plant(model, [3, 17], 64)(blocks).logits, before)
    planted = plant(model, [3, 17], 37.7)
    assert (planted(blocks).logits - before).abs().max() < 2e-5 * before.abs().max()
    found = trace(planted, blocks, attention=False).outlier_features()
    assert (sorted(found["feature"]) == [3, 17] and (found["layers"] == 1).all()) or case == "opt-350m"
    assert all(torch.equal(v, weights[k]) for k, v in model.state_dict().items())
    if case == "olmo2":  # the whole residual stream is scaled
        return
    changed = {k for k, v in planted.state_dict().items() if not torch.equal(v, weights[k])}
    anatomy = anatomy_of(model.config)
    kinds = anatomy.layer_kinds
    parts = {part for kind in kinds for part in (*kind.norms, *kind.norms_of_sums, *kind.attn_in, *kind.ffn_in)}
    parts |= {f"{part}.bias" for part in (*anatomy.attn_out, *anatomy.ffn_out)} if case == "opt-350m" else set()
    parts |= {part for kind in kinds for part in kind.router}
    parts |= {f"{kind.experts}.gate_up_proj" for kind in kinds if kind.experts}
    assert all(any(part in name for part in parts) for name in changed)


@pytest.mark.parametrize(
    ("features", "factor", "message"),
    [([], 2, "empty"), ([32], 2, "out of range"), ([1], 0, "factor is 0"), ([1], float("inf"), "is inf")],
)
def test_planting_mistakes(features, factor, message):
    with pytest.raises(UserError, match=message):
        plant(make_model("gpt2"), features, factor)


@pytest.mark.parametrize(("case", "buffers"), [("gpt2", False), ("gptj", True), ("gemma3", True)])
def test_a_skeleton_is_the_model_without_its_values(case, buffers, tmp_path):
    """As it is loaded: positions of GPT-J are not rounded, as those of a model that is made in 16 bits are."""
    made, verbosity = make_model(case), logging.get_verbosity()
    before = copy.deepcopy(made.config.to_dict())
    model = skeleton(made.config, torch.bfloat16, buffers)
    assert (model.dtype, made.config.to_dict()) == (torch.bfloat16, before), "the configuration is left as it was"
    made.save_pretrained(tmp_path)
    real = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert not model.training
    assert logging.get_verbosity() == verbosity
    found, expected = dict(model.named_parameters()), dict(real.named_parameters())
    assert {name: tensor.shape for name, tensor in found.items()} == {name: t.shape for name, t in expected.items()}
    assert {(tensor.device.type, tensor.dtype) for tensor in found.values()} == {("meta", torch.bfloat16)}
    found, expected = dict(model.named_buffers()), dict(real.named_buffers())
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.is_meta != buffers
        if buffers:
            assert torch.equal(tensor, expected[name])


def test_what_another_library_says_is_one_line_and_never_nothing():
    assert reason_of(ValueError("one\n  two\tthree"), 9) == "one two t"
    assert reason_of(KeyError(), 9) == "KeyError"
