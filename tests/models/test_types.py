"""Types of models that no table has, as scripts/every_type.py tries them; what is refused if a pass was wrong."""

import itertools
import math

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_outputs import BaseModelOutputWithPast

from outliers import damage, load_model, perplexity, plant, trace
from outliers.errors import UserError
from outliers.models.anatomy import layers_of
from scripts.every_type import made_small, tiny, tried
from tests import conftest

NAMED = [
    *("mamba", "mamba2", "falcon_h1", "recurrent_gemma", "qwen3_next", "lfm2", "nemotron_h", "deepseek_v3", "glm4_moe"),
    *("gemma3n_text", "llama4_text", "phi", "cohere2", "olmo3"),
]
FEW = ("mamba", "nemotron_h")
# What a type refuses, and why; all else works.
REFUSED = {
    "olmo3": {"plant": "its norms are of what sub-layers add"},
    "gemma3n_text": {"stream": "reads what layer 2 has made"},
}


@pytest.mark.parametrize("kind", conftest.slow_but(NAMED, FEW))
def test_a_type_without_a_row_does_everything(kind):
    """Loss of transformers, traces, a planted feature, schemes, ablations, damage by layer and role, streaming."""
    found, refused = dict(tried(kind)), REFUSED.get(kind, {})
    assert {name: why for name, why in found.items() if why and name not in refused} == {}
    for name, why in refused.items():
        assert why in found[name]


@pytest.mark.parametrize(
    ("kind", "said"), [("nanochat", "norms have no weights"), ("minimax", "norms of 1 of their sums")]
)
def test_a_plant_that_nothing_undoes_is_refused(kind, said):
    with pytest.raises(UserError, match=said):
        plant(tiny(kind), [3], 64.0)


def test_positions_that_are_no_tokens_are_refused():
    """CPM-Ant has a prompt of 32 positions before each text, over which kernels wrote beyond the end of counts."""
    with pytest.raises(UserError, match="states of 56 positions for 24 tokens"):
        trace(tiny("cpmant"), torch.randint(100, (1, 24)))


def test_layers_that_share_keys_are_damaged_one_by_one():
    """Gemma 4, of which an earlier layer that is passed over makes no keys for later ones."""
    found = damage(tiny("gemma4_text"), torch.randint(100, (1, 24)), "absmax", by=["layer"])
    assert found.layers["perplexity_only"].notna().all()


def test_layers_in_pieces_are_refused():
    with pytest.raises(UserError, match=r"in two lists, 'transformer\.attentions'"):
        layers_of(tiny("xlm"))


def small(kind: str = "phi") -> nn.Module:
    fields = {**conftest.LLAMA, "vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **fields)).eval()


def test_a_model_that_does_something_else_than_was_found_is_refused():
    """Logits that are not those of the layers and the head; and a projection that runs twice."""
    blocks = torch.randint(100, (1, 24))
    perplexity(small(), blocks)
    for wrong, said in ((_scaled, "logits of 'phi' differ by"), (_twice, "fc1' of 'phi' runs 2 times in a pass")):
        with pytest.raises(UserError, match=said):
            perplexity(wrong(small()), blocks)


def _scaled(model: nn.Module) -> nn.Module:
    """Its stack puts out other states each time."""
    stack, calls = model.model.forward, itertools.count(1)
    model.model.forward = lambda *args, **kwargs: BaseModelOutputWithPast(next(calls) * stack(*args, **kwargs)[0])
    return model


def _twice(model: nn.Module) -> nn.Module:
    """Its first feed-forward projection runs twice."""
    block = model.model.layers[0].mlp
    forward = block.forward
    block.forward = lambda x: 0 * block.fc1(x).sum() + forward(x)
    return model


def test_a_trace_has_roles_of_some_layers_alone():
    """Nemotron-H has in each layer a recurrence, an attention or a feed-forward part."""
    model = tiny("nemotron_h")
    blocks = torch.randint(3, 512, (1, 24))
    found = trace(model, blocks)
    roles = [
        {"attn_in": bool(layer.anatomy.attn_in), "ffn_in": bool(layer.anatomy.ffn_in)} for layer in layers_of(model)
    ]
    assert any(not of["ffn_in"] for of in roles) and any(not of["attn_in"] for of in roles)
    for role in ("attn_in", "ffn_in"):
        squares = found.statistics[f"{role}.squares"].sum(1) > 0
        assert squares.tolist() == [of[role] for of in roles]
    assert not found.heads, "sinks are of models in which every layer attends"


@pytest.mark.parametrize("kind", ["llava", "aya_vision", "deepseek_vl"])
def test_the_text_part_of_a_model_that_takes_pictures(kind, tmp_path):
    """Its loss is that of the whole model: Aya's head scales no logits, and DeepSeek's is its embedding."""
    default = AutoConfig.for_model(kind)
    config = type(default).from_dict(made_small(default.to_dict()))
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    blocks = torch.randint(5, 512, (2, 24))
    with torch.no_grad():
        logits = [model(input_ids=block[None], use_cache=False).logits[0, :-1].double() for block in blocks]
    losses = [nn.functional.cross_entropy(one, block[1:]) for one, block in zip(logits, blocks, strict=True)]
    found = math.log(perplexity(load_model(str(tmp_path)), blocks))
    assert found == pytest.approx(float(sum(losses) / 2), rel=1e-6)
