"""Traces against second computations: plain loops, transformers' own outputs, scipy, and outliers planted or known."""

import copy
import itertools
import sys
from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from outliers.criterion import OF_EVERY_STACK, PAPER
from outliers.errors import UserError
from outliers.models.anatomy import decoder_layers, layers_of, projections, state_readers
from outliers.models.hooks import attention_hooks
from outliers.models.load import load_model, load_tokenizer
from outliers.show.words import ranges
from outliers.text.blocks import load_text
from outliers.text.tokens import named_tokens
from outliers.tracing import sketch
from outliers.tracing.compare import compare
from outliers.tracing.frame import Frame
from outliers.tracing.result import Trace
from outliers.tracing.table4 import table4_row
from outliers.tracing.trace import trace
from outliers.variants.plant import plant
from outliers.variants.written import variant
from outliers.views.trace import trace_findings
from tests.conftest import C4, CONFIGS, STORIES, WINDOWS, few_kinds, needs_shared, slow_but
from tests.small_models import inputs_of, make_model, make_tokenizer, padded

ALPHA = 1.5


def hooks(model) -> int:
    """How many hooks there are anywhere in a model."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.fixture(scope="module")
def gpt2():
    """A small GPT-2, six blocks, the traces of the first two by themselves, and of them all."""
    model = make_model("gpt2")
    blocks = torch.randint(100, (6, 24), generator=torch.Generator().manual_seed(2))
    alone = [trace(model, block[None], alpha=ALPHA) for block in blocks[:2]]
    return model, blocks, alone, trace(model, blocks, alpha=ALPHA)


def test_features_by_definition(gpt2):
    """The fractions, counted once more in plain loops."""
    model, blocks, _, whole = gpt2
    states = {place: x for place, x in recorded(model, blocks).items() if place[0] in ("attn_in", "ffn_in")}
    table = whole.features().set_index("feature")
    for feature in (0, 7, 31):
        layers = positions = pairs = 0
        values = []
        for sequence in range(6):
            x = {k: s[sequence, :, feature].tolist() for k, s in states.items()}
            hit = {k: [abs(v) >= ALPHA for v in column] for k, column in x.items()}
            layers += sum(any(hit["attn_in", layer] + hit["ffn_in", layer]) for layer in range(2)) / 2
            positions += sum(any(h[t] for h in hit.values()) for t in range(24)) / 24
            pairs += sum(sum(h) for h in hit.values())
            values += [v for k, column in x.items() for v, h in zip(column, hit[k], strict=True) if h]
        row = table.loc[feature]
        assert row["layers"] == pytest.approx(layers / 6)
        assert row["positions"] == pytest.approx(positions / 6)
        assert row["positions_mean"] == pytest.approx(pairs / (6 * 4 * 24))
        assert row["hits"] == pairs
        assert row["one_sided"] == (min(values) > 0 or max(values) < 0)
        for name, q in (("q1", 0.25), ("median", 0.5), ("q3", 0.75)):
            assert row[name] == pytest.approx(np.quantile(values, q, method="lower"), rel=0.0101)
    quartiles = table[["q1", "median", "q3"]].abs()
    assert (quartiles >= ALPHA).where(quartiles.notna(), True).all(axis=None), "as every hit is"
    largest = torch.stack(list(states.values())).abs().amax((0, 1, 2))
    assert np.allclose(table["max"].sort_index(), largest, rtol=1e-4)


def test_criterion_and_order(gpt2):
    model, blocks, _, found = gpt2
    table = found.features()
    outlier = (table["layers"] >= 0.9) & (table["positions"] >= 0.3)
    assert 0 < outlier.sum() < 32
    assert found.outlier_features(layers=0.9, positions=0.3)["feature"].tolist() == table[outlier]["feature"].tolist()
    assert table["positions"].is_monotonic_decreasing
    for _, row in table[table["hits"] > 0].iterrows():  # at just its own fractions each is one
        assert row["feature"] in set(found.outlier_features(row["layers"], row["positions"])["feature"])
    by_layer = found.outlier_features(layers=0.9, positions=0.3, by="layer")
    assert len(by_layer) == outlier.sum() * 2 * 2
    assert by_layer["hits"].sum() == table[outlier]["hits"].sum()
    by_role = found.features(by="role")
    for role in ("attn_in", "ffn_in"):
        alone = found.features(role)
        assert by_role[by_role["role"] == role]["hits"].sum() == alone["hits"].sum()
    assert trace(model, blocks, "ffn_in", alpha=ALPHA).features().equals(found.features("ffn_in"))


@few_kinds
def test_every_architecture_against_transformers(case, blocks):
    """Residual stream and attention against what the model itself returns; and it is left as it was."""
    model = make_model(case)
    before = model(blocks).logits
    implementation = model.config._attn_implementation
    found = trace(model, blocks, alpha=0.5)
    assert hooks(model) == 0
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(blocks).logits, before)
    assert sorted(found.features()["feature"]) == list(range(32))

    def has(layer, role: str) -> bool:
        return role == "ffn_in" or any(".experts." not in name for name in getattr(layer.anatomy, role))

    having = {role: [layer.number for layer in layers_of(model) if has(layer, role)] for role in OF_EVERY_STACK}
    assert {role: found.layers_with(role) for role in found.roles} == {role: of for role, of in having.items() if of}
    assert len(found.hidden_states()) == sum(map(len, having.values())), "experts' units are not traced"

    with torch.no_grad():
        out = model(blocks, output_hidden_states=True, use_cache=False)
    first = out.hidden_states[1].abs()  # after the first layer; the last one is after the final norm
    massive = found.massive_activations().loc[0]
    assert massive["max"] == pytest.approx(first.amax((1, 2)).mean().item(), rel=1e-4)

    if case == "falcon-rw":  # transformers returns others than it computes with; see the next test
        return
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        out = model(blocks, output_attentions=True, use_cache=False)
    attended = torch.stack(out.attentions)
    received = attended.sum(3) / (attended > 0).sum(3)  # layers, sequences, heads, keys
    shares = (received > 0.3).float().mean((0, 1, 2))
    assert np.allclose(found.attention_sinks()["share"], shares)
    at = [int(i) for _, s, _, k in (received > 0.3).nonzero() for i in [blocks[s, k]]]
    tokens = found.sink_tokens().set_index("token")["share"]
    assert tokens.to_dict() == pytest.approx({token: at.count(token) / len(at) for token in set(at)})


WINDOWED = {"mistral": (8, 8), "qwen2": (8, None), "gpt_neo": (None, 8)}  # and the window of each of two layers


def with_window(case: str):
    """A model whose heads give much attention to the first position, as far as a window of 8 lets them."""
    kind, fields = CONFIGS[case]
    fields = {**fields, "sliding_window": 8} if None not in WINDOWED[case] else {**WINDOWS, **fields}
    torch.manual_seed(0)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
    config = AutoConfig.for_model(kind, vocab_size=100, **ends, **fields, use_sliding_window=True)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for projection in projections(model):
            if projection.role == "attn_in":
                projection.module.weight.normal_(std=0.5)
    return model


@pytest.mark.parametrize("case", WINDOWED)
def test_sinks_are_means_over_the_queries_that_see_a_key(case):
    """Of transformers' own probabilities in float64."""
    model = with_window(case)
    blocks = torch.randint(100, (4, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        attended = torch.stack(
            copy.deepcopy(model).double()(blocks, output_attentions=True, use_cache=False).attentions
        )
    queries, keys = torch.arange(64)[:, None], torch.arange(64)
    seen = torch.stack([(keys <= queries) & (keys > queries - (window or 64)) for window in WINDOWED[case]])
    want = (attended.sum(3) / seen.sum(1)[:, None, None] > 0.3).sum((1, 2))
    assert 0.1 < want[:, 0].sum() / (2 * 4 * 4) < 0.9
    windowed = [layer for layer, window in enumerate(WINDOWED[case]) if window]
    assert not (attended.mean(3) > 0.3)[windowed].any(), "nothing is seen of it in a mean over all later queries"
    found = trace(model, blocks)
    assert torch.equal(found.statistics["attention.sinks"], want)
    assert np.array_equal(found.attention_sinks()["share"], want.sum(0).double() / (2 * 4 * 4))


def test_positions_of_sinks_begin_behind_a_prefix(blocks):
    """Of which each query sees all; their keys are no positions of the block."""
    model, seen = with_window("qwen2"), []
    behind = variant("prefix(3,4)")
    with behind.on(model) as changed, attention_hooks(changed, lambda _, given, *_more: seen.append(given[0])):
        changed(blocks[:1])
    means = torch.stack(seen).double().sum(2)[..., 2:] / torch.arange(24, 0, -1).clamp(
        max=torch.tensor([[[8]], [[24]]])
    )
    found = trace(model, blocks[:1], variant=behind).statistics["attention.sinks"]
    assert found.any() and torch.equal(found, (means > 0.3).sum(1))


def recorded(model, blocks) -> dict:
    """The input of each role's first projection, by plain hooks: (role, layer) to float64 (sequences, T, features)."""
    there = [one for one in state_readers(model) if one.expert is None]
    first = {(one.role, one.layer): one.module for one in reversed(there)}
    with inputs_of(first) as seen:
        for block in blocks:
            model(block[None])
    return {place: torch.stack([x.view(24, -1) for x in states]).double() for place, states in seen.items()}


@pytest.mark.parametrize("case", slow_but(CONFIGS))
def test_every_role_of_every_architecture_is_what_its_projections_read(model, blocks):
    """As hooks of our own see it, in float64."""
    found, states = trace(model, blocks, alpha=0.5, attention=False), recorded(model, blocks)
    assert set(states) == set(itertools.product(found.roles, range(2)))
    for (role, layer), x in states.items():
        assert torch.equal(found.statistics[f"{role}.hits"][layer], (x.abs() >= 0.5).sum((0, 1)))
        assert torch.allclose(found.statistics[f"{role}.squares"][layer], x.square().sum((0, 1)), rtol=1e-6)


def test_hidden_states_and_largest_values_by_definition(gpt2):
    """From what hooks of our own see; the feed-forward units of ffn_out are more than the features."""
    model, blocks, _, found = gpt2
    by_layer = found.largest_values(by="layer").set_index(["role", "layer"])
    norms = found.hidden_states().set_index(["role", "layer"])
    for (role, layer), x in recorded(model, blocks).items():
        row = by_layer.loc[role, layer]
        position, feature = int(row["position"]), int(row["feature"])
        sequence = int(x[:, position, feature].abs().argmax())
        assert row["max"] == abs(row["value"]) == pytest.approx(x.abs().max().item(), rel=1e-6)
        assert row["value"] == pytest.approx(x[sequence, position, feature].item(), rel=1e-6)
        assert row["token"] == blocks[sequence, position]
        for rest, part in (("", x.numpy()), ("_rest", x[:, 1:].numpy())):
            square = (part**2).mean((0, 1))
            want = {
                "infinity_norm": np.abs(part).max(),
                "kurtosis_tensor": np.mean([scipy.stats.kurtosis(one, axis=None, fisher=False) for one in part]),
                "kurtosis_token": scipy.stats.kurtosis(part, axis=2, fisher=False).mean(),
                "kurtosis_feature": (square**2).mean() / square.mean() ** 2,
            }
            assert norms.loc[(role, layer), [f"{name}{rest}" for name in want]].tolist() == pytest.approx(
                list(want.values()), rel=1e-4
            )
    assert found.features("ffn_out")["q1"].isna().all(), "no quartiles of so many units"
    most = found.largest_values()
    assert most["role"].tolist() == list(found.roles)
    assert most["max"].tolist() == [by_layer.loc[role]["max"].max() for role in found.roles]


@pytest.mark.parametrize("role", OF_EVERY_STACK)
def test_an_entry_of_just_alpha_is_a_hit(gpt2, role):
    """Of either sign, in every count of hits."""
    model, blocks, *_ = gpt2
    states = recorded(model, blocks)
    x = torch.stack([states[role, layer] for layer in range(2)])  # (layers, sequences, T, features)
    for alpha in (x.max().item(), -x.min().item()):
        found, hit = trace(model, blocks, role, alpha=alpha, attention=False), x.abs() >= alpha
        assert torch.equal(found.statistics[f"{role}.hits"], hit.sum((1, 2)))
        assert torch.equal(found.statistics[f"{role}.layers_hit"], hit.any(2).sum((0, 1)))
        assert torch.equal(found.statistics[f"{role}.positions_hit"], hit.any(0).sum((0, 1)))
        signs = torch.stack([(x >= alpha).any((0, 1, 2)), (x <= -alpha).any((0, 1, 2))])
        one_sided = found.features(role).set_index("feature").sort_index()["one_sided"]
        assert one_sided.tolist() == (signs.sum(0) == 1).tolist()


@pytest.mark.parametrize("case", ["mixtral", "qwen3-moe-dense-first", "gpt-oss"])
def test_shares_of_experts_are_those_of_the_router(case, blocks):
    """Which experts transformers' own router logits choose."""
    model = make_model(case)
    with torch.no_grad():
        logits = model(blocks, output_router_logits=True).router_logits
    first = 2 - len(logits)  # layer with experts
    shares = trace(model, blocks, attention=False).expert_shares()
    expected = {layer: of.topk(2).indices.flatten().bincount(minlength=4) for layer, of in enumerate(logits, first)}
    for layer, found in shares.groupby("layer"):
        assert found["share"].tolist() == pytest.approx((expected.pop(layer) / blocks.numel()).tolist())
    assert not expected


def test_experts_that_no_token_chose_are_said():
    """A token that is repeated has the same two experts at all positions."""
    found = trace(make_model("mixtral"), torch.full((1, 8), 3))
    used = found.expert_shares().query("share > 0")
    assert used.groupby("layer")["share"].agg(list).tolist() == [[1.0, 1.0], [1.0, 1.0]]
    said = [finding.text for finding in trace_findings(found, {}, str)][-1]
    unused = [sorted({0, 1, 2, 3} - set(of)) for of in used.groupby("layer")["expert"].agg(list)]
    assert said.endswith(f"no token chose experts {ranges(unused[0])} in layer 0, {ranges(unused[1])} in layer 1.")


def test_layers_that_lack_a_role(blocks):
    """As where a mixture of experts, which is no projection of all tokens, stands in some layers."""
    model = make_model("qwen3-moe-dense-first")
    found = trace(model, blocks, alpha=0.5, attention=False)
    units = recorded(model, blocks)["ffn_out", 0].flatten(0, 1).abs()
    of_units = found.features("ffn_out").set_index("feature").sort_index()
    assert of_units["positions_mean"].tolist() == pytest.approx((units >= 0.5).double().mean(0).tolist())
    assert set(found.features("ffn_out", by="layer")["layer"]) == {0}
    assert found.largest_values("layer").query("role == 'ffn_out'")["layer"].tolist() == [0]
    with pytest.raises(UserError, match="no layer of this model has ffn_mid; trace other roles"):
        trace(model, blocks, "ffn_mid")


@torch.no_grad()
def test_alibi_of_falcon_counts_once(blocks):
    """While transformers attends eagerly, as it does when it is fused; and as Falcon defines it, in the first layer."""
    model, seen = make_model("falcon-rw"), {}
    fused = model(blocks).logits
    with attention_hooks(
        model, lambda layer, probabilities, recompute, _visible: seen.update({layer: (probabilities, recompute())})
    ):
        assert torch.allclose(model(blocks, use_cache=False).logits, fused, atol=1e-5)
    first = model.transformer.h[0]
    states = first.self_attention.query_key_value(first.input_layernorm(model.transformer.word_embeddings(blocks)))
    query, key, _ = states.double().view(3, 24, 4, 3, 8).permute(3, 0, 2, 1, 4)
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
    scores = (query @ key.mT + slopes[:, None, None] * torch.arange(24)) / 8**0.5
    expected = scores.masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf).softmax(-1)
    for probabilities in seen[0]:
        assert torch.allclose(probabilities.double(), expected, atol=1e-6)


def test_keys_that_queries_see_where_a_function_of_attention_masks_by_itself():
    """transformers gives such a function no mask; a layer of Gemma has a window of 8."""
    model, seen = make_model("gemma2"), {}

    def masking(module, query, key, value, attention_mask, **others):
        assert attention_mask is None
        own = sys.modules[type(module).__module__].eager_attention_forward
        return own(module, query, key, value, None, **others)

    AttentionInterface.register("masking", masking)
    model.config._attn_implementation = "masking"
    with attention_hooks(model, lambda layer, _probabilities, _recompute, visible: seen.update({layer: visible})):
        model(torch.arange(24)[None], use_cache=False)
    distance = torch.arange(24)[:, None] - torch.arange(24)
    for layer, window in enumerate((8, 24)):
        assert torch.equal(seen[layer], (distance >= 0) & (distance < window))


@torch.no_grad()
def test_residual_stream_of_all_layers():
    """In float64 numpy, from the states that transformers returns, and from a hook before the final norm."""
    kind, fields = CONFIGS["gpt2"]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, vocab_size=100, **fields | {"n_layer": 4})
    model = AutoModelForCausalLM.from_config(config).eval()
    blocks = torch.randint(33, (3, 24), generator=torch.Generator().manual_seed(1)) + 33 * torch.arange(3)[:, None]
    embeddings = model.get_input_embeddings().weight
    embeddings[33:66] *= 20  # of the second block
    large = {(0, 6): (3, 400), (2, 9): (7, -7000)}
    large[0, 8] = 4, 60  # more than 1000 times the median, but not more than 100
    large[1, 7] = 5, 180  # more than 100, but not 1000 times the median
    for place, (feature, value) in large.items():
        embeddings[blocks[place], feature] = value
    decoder_layers(model)[2].mlp.c_proj.weight.T[11] *= 1e6  # massive in the last two layers
    with inputs_of({"last": model.transformer.ln_f}) as last:
        hidden = model(blocks, output_hidden_states=True, use_cache=False).hidden_states
    states = torch.stack([*hidden[1:4], *last["last"]]).double().numpy()  # (layers, sequences, T, features)
    found = trace(model, blocks, attention=False).statistics

    magnitude = np.abs(states)
    middle = np.sort(magnitude.reshape(4, 3, -1))[..., (24 * 32 - 1) // 2]
    largest = magnitude.max((2, 3))
    massive = (magnitude > 100) & (magnitude >= 1000 * middle[..., None, None])
    assert 0 < massive.sum((1, 2, 3)).min() < massive.sum((1, 2, 3)).max()
    assert (massive[0] < (magnitude[0] > 100)).any()
    assert (massive[0] < (magnitude[0] >= 1000 * middle[0, :, None, None])).any()
    assert np.allclose(found["residual.sum_of_max"], largest.sum(1), rtol=1e-5)
    assert np.allclose(found["residual.sum_of_ratios"], (largest / middle).sum(1), rtol=1e-4)
    assert np.array_equal(found["residual.massive"], massive.sum((1, 2)))
    assert np.array_equal(found["residual.massive_positions"], massive.sum((0, 1, 3)))
    tokens = np.bincount(blocks.numpy().ravel(), massive.sum((0, 3)).ravel(), 100)
    assert np.array_equal(found["residual.massive_tokens"], tokens)
    for layer, row in enumerate(found["residual.largest"]):
        sequence, position, feature = np.unravel_index(magnitude[layer].argmax(), magnitude[layer].shape)
        value = states[layer, sequence, position, feature]
        assert row[:2].tolist() == pytest.approx([abs(value), value], rel=1e-5)
        assert row[2:].tolist() == [feature, position, blocks[sequence, position]]


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def test_no_quartile_is_below_alpha(blocks):
    """As no hit is, also one in the upper half of its bucket, whose estimate is 1 % lower."""
    model, alpha = make_model("gpt2"), 0.9995 * sketch._GAMMA**90
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.ln_1.weight[4], layer.ln_1.bias[4] = 0, -1.0001 * alpha
    table = trace(model, blocks, alpha=alpha, attention=False).features("attn_in").set_index("feature")
    assert table.loc[4, ["q1", "median", "q3"]].tolist() == [-alpha] * 3


@given(st.lists(FINITE.filter(lambda x: x != 0), min_size=1, max_size=60), st.floats(0, 1))
def test_sketch_is_within_one_per_cent(values, fraction):
    counts = pd.DataFrame({"group": 0, "bucket": sketch.buckets(torch.tensor(values)).numpy(), "count": 1})
    assert counts["bucket"].abs().between(1, sketch.BUCKETS - 1).all()
    (estimate,) = sketch.quantiles(counts, ["group"], {"q": fraction})["q"]
    rank = int(np.floor(fraction * (len(values) - 1)))
    want = sorted(values)[rank]
    assert abs(estimate - want) <= 0.010001 * abs(want)


def test_what_does_not_belong_together_is_not_merged(gpt2):
    model, blocks, (one, *_), _ = gpt2
    other = make_model("opt")
    other.model.decoder.layers = other.model.decoder.layers[:1]
    for different, message in [
        (trace(model, blocks, alpha=2), "alpha are 1.5 and 2"),
        (trace(model, blocks, "attn_in", alpha=ALPHA), "roles are"),
        (trace(model, blocks, alpha=ALPHA, attention=False), "heads are 4 and 0"),
        (trace(other, blocks, alpha=ALPHA), "different shapes"),
    ]:
        with pytest.raises(UserError, match=message):
            one.merge(different)


def test_traces_of_different_things_are_not_merged(gpt2):
    """What both say must agree; what one says stays."""
    _, _, (one, two, *_), _ = gpt2
    labels = {"model": "a", "weights_hash": "0" * 16, "text": "sample"}
    silent, said = replace(one), replace(two, labels=labels)
    assert silent.merge(said).labels == said.merge(silent).labels == said.merge(said).labels == labels
    assert silent.merge(two).labels == silent.labels == {}, "and neither of the two is changed"
    more = replace(one, labels={"text": "sample", "streamed": True})
    assert said.merge(more).labels == labels | {"streamed": True}
    for what in labels:
        with pytest.raises(UserError, match=f"cannot merge traces whose {what} are '.*' and 'other'"):
            said.merge(replace(two, labels=labels | {what: "other"}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ln_1.bias", "layer 1, role attn_in, feature 9"),
        ("ln_2.bias", "layer 1, role ffn_in, feature 9"),
        ("mlp.c_fc.bias", "layer 1, role ffn_out, feature 9"),
        ("mlp.c_proj.bias", "layer 1, role residual, feature 9"),
    ],
)
def test_not_finite(name, message):
    """The place is named, and the model is left without hooks and attends as before."""
    model, blocks = make_model("gpt2"), torch.randint(100, (2, 24))
    with torch.no_grad():
        model.transformer.h[1].get_parameter(name)[9] = torch.nan
    with pytest.raises(UserError, match=f"NaN or inf in the hidden states of {message}; expected finite numbers"):
        trace(model, blocks)
    assert hooks(model) == 0
    assert model.config._attn_implementation == "sdpa"


def test_mistakes(gpt2):
    model, blocks, (one, *_), _ = gpt2
    for message, ask in {
        "roles attn_in, attn_out together; this .* attn_in, attn_out, ffn_in, ": lambda: one.features(PAPER[:2]),
        "this trace has attn_out": lambda: trace(model, blocks, "attn_out").features(),
        "by 'head'": lambda: one.features(by="head"),
        "largest values by 'role'": lambda: one.largest_values("role"),
        "attention=True": lambda: trace(model, blocks, attention=False).attention_sinks(),
        "this trace has no experts": one.expert_shares,
    }.items():
        with pytest.raises(UserError, match=message):
            ask()


def test_row_of_table4(blocks):
    model = plant(make_model("gpt2"), [5, 20], 30)
    found = trace(model, blocks)
    row = table4_row(found, 12.5, [0.4, 0.2])
    assert (row["perplexity"], row["top1_softmax"], row["top1_softmax_without"]) == (12.5, 0.4, 0.2)
    assert row["count"] == 2
    outliers = found.outlier_features()
    assert row["most_common"] == outliers["feature"][0]
    assert row["median"] == outliers["median"][0]
    assert row["one_sided"] == outliers["one_sided"].sum()
    counted = found.statistics["attn_in+ffn_in.layers_hit"].clone()
    counted[row["most_common"]] = 0  # hit at as many positions as before, and no outlier feature any more
    other = replace(found, statistics=found.statistics | {"attn_in+ffn_in.layers_hit": counted})
    assert {row["most_common"], table4_row(other, 12.5)["most_common"]} == {5, 20}
    assert row["max"] == outliers["max"][0]
    low, papers = trace(model, blocks, alpha=0.5), trace(model, blocks, PAPER, alpha=0.5)
    hits = {role: low.features(role)["hits"].sum() for role in OF_EVERY_STACK}
    assert hits.pop("ffn_out") > 0
    assert table4_row(low, 12.5)["outliers_per_sequence"] == sum(hits.values()) / 3, "not counted: hits in ffn_out"
    assert table4_row(low, 12.5) == table4_row(papers, 12.5), "what the paper does not look at is not counted"
    nothing = table4_row(trace(make_model("gpt2"), blocks, alpha=1000), 12.5)
    assert nothing["count"] == nothing["layers"] == 0
    assert not {"median", "top1_softmax"} & set(nothing)


@needs_shared
def test_trained_model_on_c4():
    blocks = load_text(str(C4), load_tokenizer(str(STORIES)), 256, 32)
    found = trace(load_model(str(STORIES)), blocks).outlier_features().set_index("feature")
    assert set(found.index) == {18, 20}
    assert found.loc[18, ["layers", "positions"]].tolist() == pytest.approx([0.63, 0.114], abs=0.006)
    assert found.loc[20, ["layers", "positions"]].tolist() == pytest.approx([0.69, 0.172], abs=0.006)


# Tokens


@pytest.fixture(scope="module")
def with_tokens(gpt2):
    """A small GPT-2, six sequences of several lengths, the trace of each by itself, and of them all, with tokens."""
    model, blocks, *_ = gpt2
    rows = [block[:length] for block, length in zip(blocks, (24, 7, 24, 2, 13, 20), strict=True)]
    rows[4] = rows[2][:13].clone()  # the same beginning, whose places tie
    rows[5] = torch.cat([rows[2][:9], rows[5][:11]])
    tokenizer = make_tokenizer()
    alone = [trace(model, [row], alpha=ALPHA, tokens=tokenizer) for row in rows]
    return model, rows, alone, trace(model, rows, alpha=ALPHA, tokens=tokenizer)


def magnitudes(model, rows) -> dict[str, list[torch.Tensor]]:
    """Of each sequence the largest |x| over the layers, (T, h), by plain hooks."""
    of_stream = [reader.module for reader in state_readers(model) if reader.role in ("attn_in", "ffn_in")]
    after_layers = [*decoder_layers(model)[1:], model.transformer.ln_f]
    found = {}
    for role, modules in (("attn_in+ffn_in", of_stream), ("residual", after_layers)):
        with torch.no_grad(), inputs_of(dict(enumerate(modules))) as seen:
            for row in rows:
                model(row[None])
        found[role] = [torch.cat(states).abs().amax(0) for states in zip(*seen.values(), strict=True)]
    return found


@pytest.mark.parametrize("role", ["attn_in+ffn_in", "residual"])
@pytest.mark.parametrize("feature", [0, 17, 31])
def test_tokens_of_a_feature_by_definition(with_tokens, role, feature):
    """Counted once more in plain loops."""
    model, rows, _, found = with_tokens
    places = [
        (x[t, feature].item(), t, row.tolist())
        for row, x in zip(rows, magnitudes(model, rows)[role], strict=True)
        for t in range(len(row))
    ]
    by_token = found.tokens(feature, role=role).set_index("token")
    assert by_token["mean"].is_monotonic_decreasing
    assert by_token["share"].sum() == pytest.approx(1)
    assert set(by_token.index) == {-1, *(ids[t] for _, t, ids in places if t)}
    for token, row in by_token.iterrows():
        values = [value for value, t, ids in places if (ids[t] == token and t) or (token == -1 and not t)]
        assert row["share"] == pytest.approx(len(values) / len(places))
        assert row["mean"] == pytest.approx(np.mean(values), rel=1e-5)
        assert row["max"] == pytest.approx(max(values), rel=1e-5)
    by_type = found.tokens(feature, "type", role).set_index("type")
    assert by_type["share"].sum() == pytest.approx(1)
    for kind, row in by_type.iterrows():
        of_kind = by_token[by_token["type"] == kind]
        assert row["share"] == pytest.approx(of_kind["share"].sum())
        assert row["mean"] == pytest.approx(np.average(of_kind["mean"], weights=of_kind["share"]))
        assert row["max"] == of_kind["max"].max()
    by_position = found.tokens(feature, "position", role)
    later = sorted(value for value, t, _ in places if t)
    for extreme, want in (("strongest", later[:-9:-1]), ("weakest", later[:8])):
        got = by_position[by_position["extreme"] == extreme]
        assert got["magnitude"].tolist() == pytest.approx(want, rel=1e-5)
        for _, row in got.iterrows():
            near = [(t, ids[t]) for value, t, ids in places if value == pytest.approx(row["magnitude"], rel=1e-5)]
            assert (row["position"], row["token"]) in near


def test_names_types_and_contexts_of_tokens(with_tokens):
    model, rows, _, found = with_tokens
    names = named_tokens(make_tokenizer(), range(101))
    assert found.names == {token: names[token] for row in rows for token in row.tolist()}
    want = {0: "word start", 1: "inside a word", 2: "delimiter", 3: "delimiter", 6: "inside a word", 8: "delimiter"}
    assert {token: names[token][1] for token in want} == want
    assert names[99] == ("'</s>'", "delimiter"), "as it is special"
    assert names[0][0] == "'␣the'"
    assert names[100][0] == "#100"
    ids = torch.tensor([[9, 1, 5, 4, 1, 0, 2, 3, 8, 6, 7, 0, 1, 4, 6, 2, 0]])
    contexts = trace(model, ids, tokens=make_tokenizer()).tokens(3, "position").set_index("position")["context"]
    assert sorted(contexts.index) == list(range(1, 17))
    assert contexts[1] == "é«The»ing aThe the"
    assert contexts[8] == "éTheing aThe the,\\n «(»7's theThe"
    assert contexts[16] == " (7's theThe a7, «the»"
    for table in (found.massive_activations(), found.largest_values("layer"), found.sink_tokens()):
        assert table["token_text"].tolist() == [names[token][0] for token in table["token"]]


@given(st.permutations(range(6)), st.sets(st.integers(1, 5)))
def test_merge_of_sequences_of_several_lengths(with_tokens, order, cuts):
    """Any split of them, joined in any order, also where places tie."""
    _, _, alone, whole = with_tokens
    bounds = [0, *sorted(cuts), 6]
    parts = [reduce(Trace.merge, [alone[number] for number in order[a:b]]) for a, b in itertools.pairwise(bounds)]
    merged = reduce(Trace.merge, parts)
    assert (merged.sequences, merged.block, merged.positions) == (6, 24, sum((24, 7, 24, 2, 13, 20)))
    assert merged.names == whole.names
    assert merged.sketch == whole.sketch
    assert merged.statistics.keys() == whole.statistics.keys()
    for name, value in whole.statistics.items():
        if value.dtype == torch.float64 and not name.endswith("largest"):
            assert torch.allclose(merged.statistics[name], value, rtol=1e-12, atol=1e-12 * value.abs().max()), name
        else:
            assert torch.equal(merged.statistics[name], value), name


def test_tokens_of_a_trace_cost_nothing_elsewhere(with_tokens):
    model, rows, _, found = with_tokens
    plain = trace(model, rows, alpha=ALPHA)
    assert not plain.names
    assert all(torch.equal(value, found.statistics[name]) for name, value in plain.statistics.items())
    assert "token_text" not in plain.largest_values()
    with pytest.raises(UserError, match="trace with tokens=tokenizer"):
        plain.tokens(0)
    for message, arguments in {
        "tokens by 'layer'; expected by 'token', 'type', 'position'": {"by": "layer"},
        "no tokens of role 'ffn_out'; this trace has attn_in.ffn_in and residual": {"role": "ffn_out"},
        "feature 32 is out of range; the residual stream has features 0 to 31": {"feature": 32},
    }.items():
        with pytest.raises(UserError, match=message):
            found.tokens(**{"feature": 0, **arguments})
    with pytest.raises(UserError, match="a trace with tokens and one without"):
        found.merge(plain)
    with pytest.raises(UserError, match="whose tokens have different names"):
        found.merge(replace(found, names=dict.fromkeys(found.names, ("'x'", "delimiter"))))
    alone = trace(model, rows, "ffn_in", tokens=make_tokenizer())
    assert alone.tokens(1)["share"].sum() == pytest.approx(1)
    assert trace(model, rows, "attn_out", tokens=make_tokenizer()).tokens(1).equals(found.tokens(1, role="residual"))


def test_save_and_load(with_tokens, tmp_path):
    *_, found = with_tokens
    found = replace(found, labels={"model": "small"})
    found.save(tmp_path / "found")
    loaded = Trace.load(tmp_path / "found")
    assert loaded.statistics.keys() == found.statistics.keys()
    assert all(torch.equal(loaded.statistics[name], value) for name, value in found.statistics.items())
    assert {**vars(loaded), "statistics": 0} == {**vars(found), "statistics": 0}
    with pytest.raises(UserError, match="cannot write to"):
        found.save(tmp_path / "no" / "folder")


def test_traces_of_earlier_versions(gpt2, tmp_path):
    found = replace(gpt2[3], labels={"model": "small"})
    found.save(tmp_path / "found")
    written = (tmp_path / "found.safetensors").read_bytes()
    earlier = written.replace(rb"\"labels\":", rb"\"about\": ")  # as version 0.2.0 called them
    (tmp_path / "earlier.safetensors").write_bytes(earlier)
    assert earlier != written and Trace.load(tmp_path / "earlier").labels == {"model": "small"}
    kept = {name: value for name, value in found.statistics.items() if not name.endswith("in.largest")}
    replace(found, statistics=kept, roles=("attn_in", "ffn_in")).save(tmp_path / "old")
    with pytest.raises(UserError, match=r"of an earlier version, without attn_in\.largest; trace again"):
        Trace.load(tmp_path / "old")


def test_tokens_that_cannot_be_are_not_read(with_tokens, tmp_path):
    *_, found = with_tokens

    def broken(name: str, change) -> dict:
        tensor = found.statistics[name].clone()
        change(tensor)
        return {"statistics": found.statistics | {name: tensor}}

    token = next(iter(found.names))
    for message, fields in {
        "tokens are not in order": broken("tokens.ids", lambda ids: ids[:2].copy_(ids[:2].flip(0))),
        "weakest_at has a position or a token": broken("residual.weakest_at", lambda at: at[3, 0, 5].fill_(10**6)),
        "strongest holds NaN": broken("residual.strongest", lambda values: values[0, 0].fill_(torch.nan)),
        "sequences are not as many": broken("text.sequences", lambda counts: counts[-1].zero_()),
        f"names.{token}.0 .* name of a token in one line": {"names": {token: ("\x1b[2J", "delimiter")}},
        f"names.{token}.1 Input should be 'delimiter'": {"names": {token: ("'a'", "first")}},
        "an unknown statistic": {"names": {}},
    }.items():
        replace(found, **fields).save(tmp_path / "broken")
        with pytest.raises(UserError, match=message):
            Trace.load(tmp_path / "broken")
    replace(found, names={token: found.names[token]}).save(tmp_path / "nameless")
    assert "#" in "".join(Trace.load(tmp_path / "nameless").largest_values("layer")["token_text"])


def test_a_trace_of_the_first_version_loads(tmp_path):
    """Of two files, without names, and without how many sequences reach a position; saved, it is one."""
    old = Trace.load(Path(__file__).parent / "old_trace" / "trace")
    old.save(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["new.safetensors"]
    new = Trace.load(tmp_path / "new")
    for found in (old, new):
        first = found.features().iloc[0]
        assert first[["feature", "hits", "positions"]].tolist() == [3, 41, 11 / 12]
        assert first[["q1", "median", "q3"]].tolist() == pytest.approx([9.488, 14.732, 32.788], abs=1e-3)
        assert found.statistics["text.sequences"].tolist() == [3] * 4
    assert new.sketch == old.sketch
    assert new.hidden_states().equals(old.hidden_states())


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_is_its_sequences(gpt2, blocks, side):
    sequences, ids, mask = padded(blocks, side)
    found = trace(gpt2[0], ids, tokens=make_tokenizer(), attention_mask=mask)
    expected = trace(gpt2[0], sequences, tokens=make_tokenizer())
    assert all(torch.equal(value, expected.statistics[name]) for name, value in found.statistics.items())
    with pytest.raises(UserError, match="masks tokens between others"):
        trace(gpt2[0], ids, attention_mask=mask.index_fill(1, torch.tensor([1]), 0))


def test_means_over_sequences_of_several_lengths(with_tokens):
    """Are those over their tokens; of sinks over the sequences that reach a position."""
    _, rows, alone, found = with_tokens
    lengths = torch.tensor([len(row) for row in rows])
    reached = (torch.arange(24) < lengths[:, None]).sum(0)
    assert torch.equal(found.statistics["text.sequences"], reached)
    hits = sum(one.features().set_index("feature")["positions"].sort_index() * one.positions for one in alone)
    table = found.features().set_index("feature").sort_index()
    assert np.allclose(table["positions"], hits / lengths.sum().item())
    means = [one.hidden_states()[["kurtosis_token", "kurtosis_token_rest"]].to_numpy() for one in alone]
    weights = np.stack([lengths, lengths - 1], 1)
    want = sum(mean * weight for mean, weight in zip(means, weights, strict=True)) / weights.sum(0)
    assert np.allclose(found.hidden_states()[["kurtosis_token", "kurtosis_token_rest"]], want)
    sinks = sum(one.attention_sinks()["share"].reindex(range(24), fill_value=0) for one in alone) / reached.numpy()
    assert np.allclose(found.attention_sinks()["share"], sinks)


# What is printed, and what is compared


def test_a_trace_prints_in_five_lines(with_tokens, gpt2):
    *_, found = with_tokens
    few = found.outlier_features(layers=0, positions=0)
    assert len(few) == 32
    lines = repr(replace(found, labels={"model": "small"})).splitlines()
    assert lines[0] == "Trace of small: 6 sequences × up to 24 tokens, alpha 1.5"
    assert lines[1] == "  2 layers × features: attn_in 32, attn_out 32, ffn_in 32, ffn_out 128"
    outliers = found.outlier_features()["feature"].tolist()
    assert len(outliers) > 8
    assert lines[2] == f"  outlier features: {len(outliers)} of 32 ({', '.join(map(str, outliers[:8]))}, …)"
    largest = found.largest_values().sort_values("max").iloc[-1]
    where = f"{largest['role']} of layer {largest['layer']}, feature {largest['feature']}"
    said = f"  largest value {largest['value']:.1f}: {where}, position {largest['position']}"
    assert lines[3:] == [f"{said}, token {largest['token_text']}", "  with attention sinks and tokens"]
    model, blocks, *_ = gpt2
    lines = repr(trace(model, blocks, "ffn_out", attention=False)).splitlines()
    assert lines[0] == "Trace: 6 sequences × 24 tokens, alpha 6"
    assert len(lines) == 3
    assert ", token id " in lines[2]


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_tables_print_all_columns(with_tokens, monkeypatch, columns):
    """Within the width of the terminal, whatever pandas' options are."""
    *_, found = with_tokens
    monkeypatch.setenv("COLUMNS", str(columns))
    with pd.option_context("display.max_columns", 0, "display.max_colwidth", 10, "display.width", 40):
        for table in (found.outlier_features(), found.tokens(3, "position"), found.hidden_states(), found.features()):
            printed = repr(table)
            assert all(name in printed.split() for name in table.columns)
            assert "..." not in printed
            assert not isinstance(table[table.columns[:2]], Frame), "what is made of it is a plain one"
            if "context" not in table:
                assert max(map(len, printed.splitlines())) <= columns
                assert len(printed.splitlines()) == len(table) + 1 or columns < 200
    one = Frame({"feature": [7], "share": [0.123456], "max": [25493.8], "none": [np.nan]})
    assert repr(one).splitlines()[1].split() == ["7", "0.123", "25,494", "nan"]
    assert one["share"][0] == 0.123456
    assert "0.123456" in one._repr_html_()


def test_compare(blocks):
    """Of a model and itself with a feature planted."""
    one = trace(plant(make_model("gpt2"), [5], 30), blocks)
    other = trace(plant(make_model("gpt2"), [5, 20], 60), blocks)
    both = compare(one, other)
    assert both["feature"].tolist() == [20, 5]
    assert both[["outlier_a", "outlier_b"]].to_numpy().tolist() == [[False, True], [True, True]]
    tables = [found.features().set_index("feature") for found in (one, other)]
    for _, row in both.iterrows():
        a, b = (table.loc[row["feature"]] for table in tables)
        for name in ("layers", "positions", "max"):
            assert (row[f"{name}_a"], row[f"{name}_b"]) == (a[name], b[name])
        assert row["layers_change"] == b["layers"] - a["layers"]
        assert row["positions_change"] == b["positions"] - a["positions"]
        assert row["max_ratio"] == pytest.approx(b["max"] / a["max"])


def test_compared_features_of_equal_fractions_are_ordered_by_their_ratio(blocks):
    strong = plant(make_model("gpt2"), [5, 20], 2**14)  # at all positions, so that the fractions cannot change
    strong, stronger = (trace(model, blocks) for model in (strong, plant(strong, [20], 4)))
    for pair in ((strong, stronger), (stronger, strong)):
        assert compare(*pair)["feature"].tolist() == [20, 5], "the larger ratio first, up or down"


def test_traces_that_are_not_compared(blocks):
    model, (kind, fields) = make_model("gpt2"), CONFIGS["gpt2"]
    wider = AutoConfig.for_model(kind, vocab_size=100, **fields | {"n_embd": 48})
    assert compare(trace(model, blocks, alpha=1e6), trace(model, blocks, alpha=1e6)).empty
    one = trace(model, blocks)
    for message, different in {
        "features are 32 and 48": trace(AutoModelForCausalLM.from_config(wider), blocks),
        "alpha are 6.0 and 3.0": trace(model, blocks, alpha=3),
        "roles are .* and ffn_in; expected the same": trace(model, blocks, "ffn_in"),
    }.items():
        with pytest.raises(UserError, match=f"cannot compare traces whose {message}"):
            compare(one, different)
