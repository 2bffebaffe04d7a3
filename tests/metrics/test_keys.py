"""Queries, keys and values by head and channel: as a plain hook sees them, whatever a model's projections are like."""

import sys
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import outliers
from outliers import run
from outliers.commands.origins import ACCOUNT_PARTS, Account, ToAccount
from outliers.metrics.keys import ChannelSums, observed_channels
from outliers.metrics.records import AFTER, BEFORE
from outliers.models.anatomy import decoder_layers
from outliers.models.anatomy.examples import Examples
from outliers.quantization.cache_formats import CacheFormat
from outliers.quantization.caches import fake_quantize
from outliers.runs.run import show
from outliers.views.keys import keys_explorer, keys_section, writing_findings
from tests.small_models import make_model

# Separate projections (of which keys are few, and have biases in qwen2) and fused ones, rotated and not; norms of
# heads, scaled queries, windows with a cap, and sinks: the others are computed as these.
CASES = ["gpt2", "llama", "qwen2", "phi3", "gpt_neox", "qwen3", "opt", "gemma2", "gpt-oss"]
ROLES = {"q": "queries", "k": "keys", "v": "values"}


def expected(model, blocks: torch.Tensor) -> dict[tuple, torch.Tensor]:
    """Queries, keys and values of a text by layer, role and side, (heads, positions of all blocks, head size).

    As a function of transformers attends with them; and as projections put them out, where each has a module.
    """
    found: dict[tuple, list] = {}
    size = getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads

    def noting(module, *states, **others):
        for role, one in zip(ROLES.values(), states, strict=False):
            found.setdefault((module.layer_idx, role, AFTER), []).append(one[0])
        return sys.modules[type(module).__module__].eager_attention_forward(module, *states, **others)

    def see(layer: int, role: str, _module, _inputs, output: torch.Tensor) -> None:
        found.setdefault((layer, role, BEFORE), []).append(output.view(blocks.shape[1], -1, size).transpose(0, 1))

    AttentionInterface.register("noting", noting)
    AttentionMaskInterface.register("noting", eager_mask)
    model.config._attn_implementation = "noting"
    with torch.no_grad(), ExitStack() as stack:
        for layer, block in enumerate(decoder_layers(model)):
            for name, module in block.named_modules():
                if role := {f"self_attn.{letter}_proj": role for letter, role in ROLES.items()}.get(name):
                    stack.callback(module.register_forward_hook(partial(see, layer, role)).remove)
        for ids in blocks:
            model(ids[None])
    return {key: torch.cat(states, 1) for key, states in found.items()}


@pytest.mark.parametrize("case", CASES)
def test_channels_are_those_with_which_a_model_attends(case, blocks):
    model = make_model(case).double()
    model.config._attn_implementation = model.config._experts_implementation = (
        "eager"  # as below; the usual experts have no float64
    )
    found = observed_channels(model, blocks)
    for key, states in expected(model, blocks).items():
        sums = found.sums[key]
        assert sums.largest.abs().allclose(states.abs().amax(1), rtol=1e-9)
        assert sums.means.allclose(states.mean(1), atol=1e-9)
        assert sums.mean_squares.allclose(states.square().mean(1), rtol=1e-9)
        assert sums.constancy.allclose(states.mean(1) ** 2 / states.square().mean(1), rtol=1e-6, atol=1e-12)
        length = blocks.shape[1]
        assert torch.equal(sums.position, states.abs().argmax(1) % length)
    changed = {role for _, role in found.changed}
    of_case = {"gpt2": set(), "opt": {"queries"}}
    assert changed == of_case.get(case, {"queries", "keys"}), "what no rotation and no scale changes has one side"


def test_encoders_are_shown_too():
    model = outliers.load_model("pocket/bert-1.4m")
    ids = torch.randint(5, 1000, (2, 16), generator=torch.Generator().manual_seed(0))
    examples = Examples(ids, ids, "all")
    found = observed_channels(model, examples)
    assert len({layer for layer, *_ in found.sums}) == len(decoder_layers(model)) and not found.changed


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=3, max_size=3), min_size=2, max_size=12),
    st.integers(1, 11),
)
def test_sums_of_any_two_parts_are_those_of_the_whole(numbers, cut):
    x = torch.tensor(numbers).view(-1, 1, 3)
    cut = min(cut, len(x) - 1)
    joined, whole = ChannelSums.of(x[:cut]).joined(ChannelSums.of(x[cut:])), ChannelSums.of(x)
    assert joined.count == whole.count and torch.equal(joined.largest.abs(), whole.largest.abs())
    assert joined.total.allclose(whole.total) and joined.squares.allclose(whole.squares)
    assert (joined.constancy <= 1 + 1e-9).all(), "no mean is larger than the root of the mean square"


def test_a_channel_that_never_changes_is_constant():
    x = torch.tensor([[3.0, 0.0, 1.0], [3.0, 0.0, -1.0]])[:, None]
    assert ChannelSums.of(x).constancy.tolist() == [[1, 1, 0]]


def rows_of(model, blocks, **fields) -> list[dict]:
    """Rows as views take them."""
    return [{"model": "own", **row, **fields} for row in observed_channels(model, blocks).records(3)]


def large_bias(case: str, layer: int, output: int, bias: float):
    """A model of whose keys one channel has a large bias."""
    model = make_model(case)
    if case == "gpt2":
        biases, first = model.transformer.h[layer].attn.c_attn.bias, model.config.hidden_size
    else:
        biases, first = model.model.layers[layer].self_attn.k_proj.bias, 0
    with torch.no_grad():
        biases[first + output] = bias
    return model


@pytest.mark.parametrize("case", ["qwen2", "gpt2"])
def test_a_planted_bias_is_named(case, blocks):
    """Of separate projections and of fused ones, with the share that it makes."""
    model = large_bias(case, layer=1, output=13, bias=300.0)
    rows = rows_of(model, blocks)
    side = AFTER if case == "gpt2" else BEFORE
    channels = (row for row in rows if row["metric"] == "keys.channel" and (row["role"], row["side"]) == ("keys", side))
    largest = max(channels, key=lambda row: row["value"])
    assert (largest["layer"], largest["head"], largest["channel"]) == (1, 1, 5)
    assert largest["bias"] == 300 and largest["bias_share"] == pytest.approx(1, abs=0.05)
    assert largest["constant"] == pytest.approx(1, abs=0.01)
    biases = {(row["layer"], row["role"]): row for row in rows if row["metric"] == "keys.layer" and "bias" in row}
    assert len(biases) == 6, "two layers of queries, keys and values, on one side of each"
    assert biases[1, "keys"]["bias"] == pytest.approx(300, rel=1e-3)
    section = keys_section(rows)
    assert [table.name for table in section.tables] == ["keys", "biases"]
    (said,) = (one.text for one in section.findings if one.text.startswith("The key bias"))
    assert said.startswith("The key bias of layer 1 has a norm of 300")
    plain = keys_section(rows_of(make_model(case), blocks)).findings
    assert not any(one.text.startswith("The key bias") for one in plain), "of small biases nothing is said"


@pytest.mark.parametrize("case", ["llama", "qwen2", "gpt_neox"])
def test_terms_of_all_features_and_the_bias_are_the_mean(case, blocks):
    """And the largest of them are listed."""
    found = observed_channels(make_model(case).double(), blocks)
    listed = {(row["layer"], row["head"], row["channel"]): row for row in found.records(3) if "terms" in row}
    assert len(found.weights) == 6, "three channels in each of two layers"
    for (layer, head, channel), row in found.weights.items():
        bias = found.biases.get((layer, "keys"), torch.zeros(4, 8))[head, channel]
        mean = found.sums[layer, "keys", BEFORE].means[head, channel]
        terms = row * found.inputs[layer] / blocks.numel()
        assert float(terms.sum() + bias) == pytest.approx(float(mean), rel=1e-9)
        features = listed[layer, head, channel]["features"]
        assert features == terms.abs().topk(3).indices.tolist()
        assert listed[layer, head, channel]["terms"] == pytest.approx(terms[features].tolist(), rel=1e-4)


def test_of_a_random_model_little_is_said(blocks):
    """Neither of features that write channels, nor of few constant ones, nor of biases, which it does not have."""
    rows = rows_of(make_model("llama"), blocks)
    section = keys_section(rows)
    said, (table,) = [one.text for one in section.findings], section.tables
    assert len(said) == 2 and not any("constant" in one for one in said) and not writing_findings(rows)
    assert "bias (%)" not in table.headers and not any("bias" in row for row in rows)


def test_a_cache_in_few_bits_is_what_attention_multiplies(blocks):
    """Behind the rotation; as projections put them out, keys are exact."""
    model = make_model("llama")
    exact, few = (observed_channels(model, blocks[:1], variant=outliers.variant(one)) for one in ("fp32", "kv=int2"))
    assert ((0, "values") in exact.changed, (0, "values") in few.changed) == (False, True)
    assert torch.equal(few.sums[0, "keys", BEFORE].squares, exact.sums[0, "keys", BEFORE].squares)
    states = expected(model.double(), blocks[:1])[0, "keys", AFTER]
    met = fake_quantize(states[None].float(), CacheFormat("int2"))[0]
    assert few.sums[0, "keys", AFTER].squares.allclose(met.double().square().sum(1), rtol=1e-4)


def test_tokens_of_a_prefix_count_for_nothing(blocks):
    found = observed_channels(make_model("llama"), blocks, variant=outliers.variant("prefix(3,5)"))
    assert {sums.count for sums in found.sums.values()} == {blocks.numel()}
    assert found.changed == {(layer, role) for layer in range(2) for role in ("queries", "keys")}


def test_an_account_leaves_them_out():
    """Where nobody asks for it."""
    models = ("pocket/gptj-1.7m", "pocket/gpt2-0.1m")
    parts = [ToAccount(model, None, Account(model=model)).parts for model in models]
    assert [ACCOUNT_PARTS["keys"] in one for one in parts] == [False, True]


def test_parameters_and_variants_of_the_command(tmp_path):
    variants = ["fp32", "kv=int4", "zero(3)"]  # of which the last names features too
    fields = {"models": ["pocket/gpt2-0.1m"], "variants": variants, "block": 32, "blocks": 1}
    spec = outliers.Cells(**fields, metrics="keys", channels=1)
    section = show(spec, tmp_path, run(spec, tmp_path))
    assert {one.name for one in section.tables} >= {"keys", "keys_2", "keys_3", "biases", "biases_2"}
    assert [one.name for one in section.drawings] == ["key_map", "key_map_2", "key_map_3"]
    assert {one.text.partition(": ")[0] for one in section.findings} == {
        "gpt2-0.1m",
        "gpt2-0.1m under kv=int4",
        "gpt2-0.1m under zero(3)",
    }
    cells = next(one for one in section.tables if one.name == "keys").data
    assert cells.groupby(["layer", "role", "side"]).size().max() == 1


def test_the_map_and_its_explorer(blocks):
    rows = rows_of(make_model("llama"), blocks)
    panels = outliers.plot.key_map(rows)
    assert [one.get_title(loc="left") for one in panels] == [
        "keys, as projections put them out",
        "keys, as attention multiplies them",
        "values, as attention multiplies them",
    ]
    heads = [row for row in rows if row["metric"] == "keys.head" and row["role"] == "values"]
    want = torch.tensor([[x / row["median"] for x in row["magnitudes"]] for row in heads]).view(2, 16)
    shown = panels[2].get_images()[0].get_array()
    assert torch.tensor(shown.data).float().allclose(want)
    (explorer,) = keys_section(rows).explorers
    maps = {one["name"]: one for one in explorer.content["maps"]}
    assert maps["values as attention multiplies them, by channel"]["values"].shape == (2, 16)
    widths = {(one["group"], one["values"].shape[1]) for one in maps.values()}
    assert len(widths) == len({group for group, _ in widths}) == 5, "profiles are drawn together of equal columns"
    by_head = maps["queries as projections put them out, by head"]
    assert by_head["columns"] == [f"head {head}" for head in range(4)] and by_head["values"].shape == (2, 4)
    assert (by_head["values"] >= 1).all(), "the largest is no smaller than the median"


def test_many_channels_share_columns():
    of_head = {"metric": "keys.head", "role": "keys", "side": AFTER, "layer": 0, "median": 1.0}
    rows = [{**of_head, "head": head, "value": 128.0, "magnitudes": list(range(1, 129))} for head in range(9)]
    axes = outliers.plot.key_map(rows)
    assert axes.get_images()[0].get_array().shape == (1, 9 * 128 // 2)
    (content,) = (one for one in keys_explorer(rows, "own").content["maps"] if one["column"] == "head:channel")
    assert content["columns"][:2] == ["0:0", "0:2"] and content["values"][0, 0] == 2
