"""Attention in int8 as a part of schemes: by its definition, in every measurement, and where it cannot be."""

import copy
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import outliers
from outliers import Sweep, UserError, run, sweep
from outliers.commands.damage import Damage
from outliers.commands.latency import Latency
from outliers.config.fields import FieldError
from outliers.metrics.damages import damages_of
from outliers.models.anatomy import anatomy_of, decoder_layers, family_of
from outliers.models.attention import change_attention
from outliers.models.skeleton import skeleton
from outliers.quantization.attention import AttentionProducts, int8_attention
from outliers.quantization.convert import check_attends
from outliers.quantization.products import ProductNumerics
from outliers.quantization.schemes import get_scheme
from tests.conftest import slow_but
from tests.small_models import make_model, make_tokenizer, names_of
from tests.subjects.test_families import MASKED, SEQ2SEQ, VISION
from tests.trainer.test_training import by_definition, largest
from tests.typed import refused

POCKET = {"models": ["pocket/gpt2-0.5m"], "block": 64, "blocks": 2}
BY_HAND = {
    "fp32+attention": AttentionProducts(ProductNumerics(), ProductNumerics()),
    "fp32+attention=0.1": AttentionProducts(ProductNumerics(0.1), ProductNumerics(0.1)),
    "fp32+attention=0.1@scores": AttentionProducts(ProductNumerics(0.1), ProductNumerics(exact=True)),
}
CASES = ["gpt2", "opt", "gpt_neox", "llama", "mistral", "qwen3", "phi3", "gemma3", "mixtral"]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 12),
    st.integers(1, 16),
    st.integers(1, 3),
    st.sampled_from([0.0, 0.02, 0.1]),
    st.sampled_from(["none", "bool", "float"]),
    st.integers(),
)
def test_is_its_definition(tokens, features, groups, share, mask, seed):
    """Two products of codes around an exact softmax, of each head for itself, keys and values shared by groups, under
    the masks of other implementations."""
    random = np.random.default_rng(abs(seed))
    query = random.standard_normal((1, 2 * groups, tokens, features)) * 3
    key, value = random.standard_normal((2, 1, 2, tokens, features))
    scaling = features**-0.5
    allowed = np.tril(np.ones((tokens, tokens), bool))
    added = np.where(allowed, 0, np.finfo(np.float64).min)
    given_mask = {"none": None, "bool": torch.tensor(allowed), "float": torch.tensor(added)}[mask]
    products = AttentionProducts(ProductNumerics(share), ProductNumerics(0.05))
    states = map(torch.tensor, (query, key, value))
    outputs, seen = int8_attention(products, nn.Module().eval(), *states, given_mask, scaling)
    found = outputs[0].transpose(0, 1)
    for head in range(2 * groups):
        q, k, v = query[0, head], key[0, head // groups], value[0, head // groups]
        scores = np.where(allowed, by_definition(q, k, largest(q, share)) * scaling, -np.inf)
        probabilities = torch.tensor(scores).softmax(-1, dtype=torch.float32).double().numpy()
        expected = by_definition(probabilities, v.T, largest(probabilities, 0.05))
        np.testing.assert_allclose(found[head], expected, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(seen[0, head], probabilities, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", slow_but(CASES, ["gpt2", "llama", "gemma3"]))
def test_a_model_under_it_is_near_itself_and_stays_as_it_was(case, blocks):
    model = make_model(case)
    before = outliers.perplexity(model, blocks)
    found = {name: outliers.perplexity(outliers.quantize(model, name), blocks) for name in BY_HAND}
    assert all(0 < abs(value / before - 1) < 0.02 for value in found.values())
    assert len(set(found.values())) == len(found)
    assert outliers.perplexity(model, blocks) == before


@pytest.mark.parametrize("name", BY_HAND)
def test_a_row_is_the_perplexity_of_a_model_put_under_it_by_hand(tmp_path, name):
    (row,) = sweep(Sweep(**POCKET, schemes=[name]), tmp_path)
    model = outliers.load_model("pocket/gpt2-0.5m")
    blocks = outliers.load_text("sample", outliers.load_tokenizer("pocket/gpt2-0.5m"), block=64, blocks=2)
    before = outliers.perplexity(model, blocks)
    for layer in decoder_layers(model):
        attention = layer.get_submodule(anatomy_of(model.config).attention)
        change_attention(attention, function=partial(int8_attention, BY_HAND[name]))
    assert row["value"] == outliers.perplexity(model, blocks) != before


@pytest.mark.parametrize(
    ("config", "read"),
    [
        (MASKED["bert"], torch.arange(3, 13)),
        (MASKED["modernbert"], torch.arange(3, 13)),
        (VISION["registers"], torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0))),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_of_other_families(config, read):
    """Attention to all keys: near itself, and checked before weights are there."""
    check_attends(skeleton(config, torch.bfloat16), get_scheme("fp32+attention"))
    torch.manual_seed(0)
    model = family_of(config).made_by.from_config(copy.deepcopy(config)).eval()
    with torch.no_grad():
        logits = [outliers.quantize(model, name)(read[None]).logits for name in ("fp32", "fp32+attention")]
    assert 0 < (logits[0] - logits[1]).norm() / logits[0].norm() < 0.02


def test_where_it_cannot_be():
    model, ids = make_model("llama"), torch.zeros(1, 4, dtype=torch.int64)
    trained = outliers.train_int8(make_model("llama"), ffn=False, linear=False, attention=True)
    for message, attempt in {
        "in int8 already": lambda: outliers.quantize(trained, "fp32+attention"),
        "leaves nothing": lambda: outliers.quantize(model, "fp32+attention", skip=["*.self_attn.products"]),
        "and only projections have errors": lambda: outliers.damage(model, ids, "fp32+attention", by=["error"]),
    }.items():
        with pytest.raises(UserError, match=message):
            attempt()


def test_beside_the_scheme_of_the_projections(blocks):
    """And taken back by the next one, with the codes of projections shared."""
    model = make_model("llama")
    plain = outliers.quantize(model, "absmax-vector")
    both = outliers.quantize(plain, "absmax-vector+attention")
    alone = outliers.quantize(both, "fp32+attention")
    partly = outliers.quantize(both, "absmax-vector+attention", skip=["model.layers.0.self_attn.products"])
    found = [outliers.perplexity(one, blocks) for one in (model, plain, both, alone, partly)]
    again = outliers.quantize(both, "absmax-vector")
    assert len(set(found)) == 5
    assert outliers.perplexity(again, blocks) == found[1]
    assert outliers.perplexity(outliers.quantize(alone, "fp32"), blocks) == found[0]
    codes = [one.model.layers[0].mlp.up_proj.operand.codes.codes for one in (both, again)]
    assert codes[0] is codes[1]


def test_a_cache_before_it_is_met_too(blocks):
    names = ("kv=int2", "fp32+attention")
    orders = [outliers.Together(tuple(map(outliers.variant, order))) for order in (names, names[::-1])]
    first, second = outliers.perplexities(make_model("llama"), blocks, orders)
    assert first == second


def test_with_a_cache_as_without():
    """The last of some tokens that come one at a time meets all keys before it."""
    model = outliers.quantize(make_model("llama"), "fp32+attention")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        whole = model(ids).logits[0, -1]
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        stepped = model(ids[:, -1:], past_key_values=cache, use_cache=True).logits[0, -1]
    torch.testing.assert_close(stepped, whole, rtol=0, atol=0.05)
    assert not torch.equal(stepped, make_model("llama")(ids).logits[0, -1])


# Names


def test_the_option_puts_all_schemes_under_several():
    asked = Sweep(models=["gpt2"], schemes="fp32,llm.int8", attention="16-bit,int8,int8+2.5%")
    assert names_of(asked) == [
        *("fp32", "fp32+attention", "fp32+attention=0.025"),
        *("llm.int8", "llm.int8+attention", "llm.int8+attention=0.025"),
    ]
    asked = Latency(models=["gpt2"], schemes=["bitsandbytes", "absmax"], attention="int8", transform="hadamard")
    assert names_of(asked) == ["bitsandbytes", "absmax+hadamard+attention"]
    assert names_of(Sweep(models=["gpt2"], schemes="fp32", attention="16-bit")) == ["fp32"]
    with pytest.raises(FieldError, match=r"expected 16-bit, int8, or int8\+2% for a share .* got 'int4'"):
        Sweep(models=["gpt2"], attention="16-bit,int4")


# Measurements


def test_damage_by_role_and_layer(tmp_path):
    """A role of its own; of each layer what the model has with only that layer's attention in int8."""
    spec = {"model": "pocket/gpt2-0.5m", "block": 64, "blocks": 1, "attention": ["int8"]}
    rows = run(Damage(**spec, schemes=["fp32", "absmax-vector"]), tmp_path)
    found = damages_of(rows)
    roles = ["attn_in", "attn_out", "ffn_in", "ffn_out", "attention"]
    assert list(found["absmax-vector+attention"].roles["role"]) == roles
    assert found["fp32+attention"].errors.empty
    alone = found["fp32+attention"]
    (of_role,) = alone.roles["perplexity_only"]
    assert of_role == alone.model["perplexity"] != alone.model["unquantized"]
    assert found["absmax-vector+attention"].roles["perplexity_only"].iloc[-1] == of_role
    model = outliers.load_model("pocket/gpt2-0.5m")
    blocks = outliers.load_text("sample", outliers.load_tokenizer("pocket/gpt2-0.5m"), block=64, blocks=1)
    layers = len(decoder_layers(model))
    for layer in range(layers):
        skip = [f"transformer.h.{other}" for other in range(layers) if other != layer]
        expected = outliers.perplexity(outliers.quantize(model, "fp32+attention", skip=skip), blocks)
        assert alone.layers["perplexity_only"][layer] == expected, "bit by bit"


def test_panels_of_damage_that_share_an_axis_have_the_same_places():
    rows = [
        {"variant": "fp32", "metric": "perplexity", "value": 10.0},
        *({"variant": name, "metric": "perplexity", "value": 11.0} for name in ("absmax", "fp32+attention")),
        *(
            {"variant": name, "metric": "damage.perplexity_only", "role": role, "value": value}
            for name, role, value in (("absmax", "ffn_in", 10.5), ("fp32+attention", "attention", 12.0))
        ),
    ]
    panels = outliers.plot.damage_bars(damages_of(rows))
    heights = [[bar.get_height() for bar in axes.patches] for axes in panels[:, 0]]
    assert [label.get_text() for label in panels[1, 0].get_xticklabels()] == ["ffn_in", "attention"]
    assert heights[0][0] == pytest.approx(math.log(1.05))
    assert heights[1][1] == pytest.approx(math.log(1.2))
    assert math.isnan(heights[1][0])
    assert math.isnan(heights[0][1])


# Where it cannot be


@pytest.mark.parametrize(
    ("case", "said"),
    [
        *((kind, f"the attention of '{kind}' cannot be replaced") for kind in ("t5", "bart", "t5gemma", "gptj")),
        ("gemma2", "attention in int8 with 'softcap'; expected a masked softmax"),
        ("gpt-oss", "attention in int8 with 's_aux'"),
    ],
)
def test_attention_that_is_no_masked_softmax_is_refused(case, said):
    config = SEQ2SEQ.get(case) or make_model(case).config
    with pytest.raises(UserError, match=said):
        check_attends(skeleton(config, torch.bfloat16), get_scheme("fp32+attention"))


@pytest.mark.parametrize("further", [[], ["--stream"]])
def test_refused_at_the_door(monkeypatch, capsys, tmp_path, further):
    make_model("gemma2").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "The"}\n' * 20, encoding="utf-8")  # of a token and an end each
    arguments = ["--attention", "int8", "--text", text, "--block", "16", "--blocks", "1", "--out", tmp_path / "out"]
    capsys.readouterr()
    said = refused(monkeypatch, capsys, "--model", tmp_path / "model", *arguments, *further)
    assert said.startswith("attention in int8 with 'softcap'")
    assert not (tmp_path / "out").exists()
