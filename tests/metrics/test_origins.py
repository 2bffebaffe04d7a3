"""Who writes a feature of the residual stream: terms that add up, planted writers, gates, and what is said of them."""

import itertools
import pickle
from functools import reduce

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

import outliers
from outliers import UserError, load_model, run, variant
from outliers.commands import origins as account
from outliers.metrics.origins import WriterAccount
from outliers.models.anatomy import anatomy_of, decoder_layers, experts_of
from outliers.quantization.linear import stored_weight
from outliers.views.origins import AT, origins_findings, origins_section, parts_of, readers_of
from tests.conftest import C4, CONFIGS, VARIANTS, needs_shared, needs_smollm2, slow_but
from tests.kept import kept
from tests.metrics.test_readers import made_up
from tests.models.test_experts import made
from tests.small_models import make_model

FEATURES = [3, 17, 0]
SUMS = [case for case in (*CONFIGS, *VARIANTS) if case != "opt-350m"]  # whose norms rescale the stream


@pytest.mark.parametrize("case", [*slow_but(SUMS), "gemma2"])
def test_terms_add_up_to_the_states(case, blocks):
    model = make_model(case)
    found = outliers.origins(model, blocks, FEATURES, positions=range(24))
    assert found.rest.max() < 1e-5, "at every position, after every layer"
    with torch.no_grad():
        states = model(blocks, output_hidden_states=True).hidden_states
    want = torch.stack(states[:-1])[..., FEATURES].mean(1)  # of the last one the norm is taken
    measured = found.states().set_index(["feature", "layer"]).sort_index()
    for column, feature in enumerate(FEATURES):
        of_feature = measured.loc[feature].iloc[: len(want)]
        assert torch.tensor(of_feature["at"].tolist()).allclose(want[..., column], atol=1e-4, rtol=1e-4)
        assert torch.tensor(of_feature["value"].tolist()).allclose(want[:, 1:, column].mean(1).float(), atol=1e-4)


def without(model, layer: int, writer: str, index: int) -> None:
    """Let a writer write nothing."""
    anatomy, block = anatomy_of(model.config), decoder_layers(model)[layer]
    with torch.no_grad():
        if writer == "expert":
            experts = experts_of(model)[layer]
            for parameter in (one for name, one in experts.named_parameters() if name.startswith("down_proj")):
                parameter[index] = 0
            return
        if writer == "expert neuron":
            experts_of(model)[layer].get_submodule("1.down_proj").weight[:, index] = 0
            return
        if writer == "shared neuron":
            block.mlp.shared_expert.down_proj.weight[:, index] = 0
            return
        (name,) = {"head": anatomy.attn_out, "neuron": anatomy.ffn_out}[writer]
        weight = stored_weight(block.get_submodule(name))
        size = weight.shape[1] // model.config.num_attention_heads if writer == "head" else 1
        weight[:, index * size : (index + 1) * size] = 0


WRITERS = [("gpt2", "neuron"), ("llama", "neuron"), ("falcon", "head"), ("mixtral", "expert"), ("gpt-oss", "expert")]
WRITERS += [("gpt-oss", "expert neuron"), ("qwen2_moe", "expert neuron"), ("qwen2_moe", "shared neuron")]
# Whose experts are scaled, grouped, or stand beside others, each in a way of its own.
OF_MIXTURES = ("mixtral", "glm4_moe", "llama4_text", "granitemoeshared", "ernie4_5_moe")


@pytest.mark.parametrize(
    ("case", "writer"), [*WRITERS, *(pytest.param(one, "expert neuron", marks=pytest.mark.slow) for one in OF_MIXTURES)]
)
def test_a_term_is_what_is_gone_without_its_writer(case, writer, blocks):
    model = make_model(case) if case in CONFIGS else made(case)
    last = len(decoder_layers(model)) - 1
    found = outliers.origins(model, blocks, FEATURES)
    assert found.rest.max() < 1e-5
    terms = found.experts() if writer == "expert" else found.writers(neurons=100)
    terms = terms[(terms["layer"] == last) & (terms["writer"] == writer)]
    if writer == "expert neuron":
        terms = terms[terms["expert"] == 1]
    index = int(terms.loc[terms["value"].abs().idxmax(), "index"])
    without(model, last, writer, index)
    after = outliers.origins(model, blocks, FEATURES).states().set_index(["feature", "layer"])
    before = found.states().set_index(["feature", "layer"])
    for term in terms[terms["index"] == index].to_dict("records"):
        place = term["feature"], last + 1
        for column in ("value", "first"):
            gone = before.loc[place, column] - after.loc[place, column]
            assert gone == pytest.approx(term[column], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("case", ["llama", "mixtral"])
def test_accounts_of_parts_add_up(case, blocks):
    """Though an expert may have no token of one part."""
    model = make_model(case)
    whole = outliers.origins(model, blocks, FEATURES, positions=[4])
    parts = [outliers.origins(model, blocks[[number]], FEATURES, positions=[4]) for number in range(3)]
    merged = reduce(WriterAccount.merge, pickle.loads(pickle.dumps(parts)))  # as they travel between machines
    assert merged.records() == whole.records()


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm], ids=lambda norm: norm.__name__)
def test_norms_of_both_kinds_behind_a_sub_layer(norm, blocks):
    model = make_model("olmo2")
    for layer in decoder_layers(model):
        for name in anatomy_of(model.config).norms_behind:
            other = norm(32)
            for parameter in other.parameters():
                nn.init.normal_(parameter, 1, 0.3)
            layer.set_submodule(name, other)
    found = outliers.origins(model, blocks, FEATURES, positions=range(24))
    assert found.rest.max() < 1e-5
    assert ("attention norm" in set(found.writers()["writer"])) == (norm is nn.LayerNorm), "its bias writes too"


def test_gates_are_gains_and_what_they_do(blocks):
    model = make_model("gemma")
    norm = model.model.layers[1].input_layernorm
    with torch.no_grad():
        norm.weight[3] = -1.01
        norm.weight[17] = 5.0
    gates = outliers.origins(model, blocks, FEATURES).gates().set_index(["feature", "layer", "norm"])
    gain = (1 + norm.weight).abs()
    hidden, largest = (gates.loc[feature, 1, "input_layernorm"] for feature in (3, 17))
    assert (hidden["value"], largest["value"]) == pytest.approx((-0.01, 6.0), rel=1e-4)
    assert (hidden["rank"], largest["rank"], hidden["role"]) == (32, 1, "attn_in")
    assert hidden["median"] == pytest.approx(gain.median().item())
    read = []
    with outliers.hooks(model, lambda _layer, _role, x: read.append(x[1:, 17].mean()), ["attn_in"], [1]):
        outliers.perplexity(model, blocks)
    assert largest["behind"] == pytest.approx(torch.stack(read).mean().item(), rel=1e-4)


def test_a_norm_without_weights_lets_all_through_alike(blocks):
    model = make_model("gpt2")
    model.transformer.h[0].ln_1 = nn.LayerNorm(32, elementwise_affine=False)
    gate = outliers.origins(model, blocks, [3]).gates().iloc[0]
    assert (gate["value"], gate["median"], gate["rank"]) == (1, 1, 1)


def test_no_norm_before_projections_is_no_gate(blocks):
    found = outliers.origins(make_model("olmo2"), blocks, [3])
    assert found.gates().empty
    axes = outliers.plot.life_line(found, at="mean")
    assert axes.child_axes == []
    assert axes.figure.axes == [axes], "no bar of colours, either"


@pytest.mark.parametrize("name", ["absmax", "plant(3,factor=8)", "zero(3)"])
def test_under_a_variant(name, blocks):
    model = make_model("llama")
    found = outliers.origins(model, blocks, [3], variant=variant(name))
    plain = outliers.origins(model, blocks, [3])
    gains = found.gates()["value"] / plain.gates()["value"]
    assert gains.tolist() == pytest.approx([8.0 if name.startswith("plant") else 1.0] * 4)
    assert (found.rest[0] > 1e-4) == (name == "absmax"), "what rounding adds is no writer's"


# What is said


def neurons_of_expert(*values: float) -> list[dict]:
    """Rows of the neurons of expert 1, from the ninth on."""
    return [{"writer": "expert neuron", "expert": 1, "index": 9 + n, "value": value} for n, value in enumerate(values)]


EXPERT = {"metric": "origins.expert", "writer": "expert", "index": 1, "value": 60.0}


@pytest.mark.parametrize(
    ("writers", "said"),
    [
        ([{"writer": "neuron", "index": 7, "value": 60.0}], "+60.0, of which neuron 7 +60.0"),
        ([{"writer": "neuron", "index": n, "value": 20.0} for n in range(3)], "+60.0"),
        ([{"writer": "head", "index": 2, "value": 50.0}], "+50.0, of which head 2 +50.0"),
        ([EXPERT, *neurons_of_expert(20.0, 40.0)], "+60.0, of which expert 1, neuron 10 +40.0"),
        ([EXPERT, *neurons_of_expert(20.0, 20.0, 20.0)], "+60.0, of which expert 1 +60.0"),
        ([{"writer": "neuron", "index": 7, "value": 5.0}], None),
    ],
)
def test_a_writer_of_half_a_part_is_named(writers, said):
    """Of a neuron its expert too; and of a feature that does not exceed random ones nothing is said."""
    total = sum(row["value"] for row in writers if "metric" not in row)
    rows = [{"metric": "origins.state", "layer": layer, "value": value} for layer, value in enumerate((0.0, total))]
    rows += [{"metric": "origins.writer", "layer": 0} | row for row in writers]
    rows = [row | {"feature": 3} for row in rows]
    usual = [(0, "attention"), (0, "feed-forward"), (0, "state"), (1, "state")]
    rows += [{"metric": "origins.ordinary", "layer": layer, "part": part, "value": 1.0} for layer, part in usual]
    found = [finding.text for finding in origins_findings([{"role": "", "first": 0.0} | row for row in rows])]
    assert [text.partition("layer 0 ")[2] for text in found] == ([f"({said})."] if said else [])


# Runs


@pytest.fixture(scope="module")
def pocket(tmp_path_factory) -> tuple:
    """The account of what stands out in a pocket model: its experiment, folder and rows."""
    folder = tmp_path_factory.mktemp("origins")
    spec = account.Account(model="pocket/gpt2-1.7m", block=64, blocks=2, positions="7", by="writers")
    return spec, folder, run(spec, folder)


def test_by_default_what_stands_out(pocket):
    *_, rows = pocket
    (count,) = [row for row in rows if row["metric"] == "count"]
    largest = max((row for row in rows if row["metric"] == "residual.value"), key=lambda row: abs(row["value"]))
    asked = next(row["features"] for row in rows if row["metric"] == "origins.rest")
    assert asked == list(dict.fromkeys([*count["features"], largest["feature"]]))
    assert len(next(row["controls"] for row in rows if row["metric"] == "origins.rest")) == 10


def test_rows_are_what_python_returns(pocket):
    _, _, rows = pocket
    feature = next(row["features"] for row in rows if row["metric"] == "origins.rest")
    model, tokenizer = load_model("pocket/gpt2-1.7m"), outliers.load_tokenizer("pocket/gpt2-1.7m")
    blocks = outliers.load_text("sample", tokenizer, block=64, blocks=2)
    want = outliers.origins(model, blocks, feature, positions=[7], tokens=tokenizer).records()
    own = [row for row in rows if row["metric"].startswith("origins.")]
    assert [{name: row[name] for name in one} for row, one in zip(own, want, strict=True)] == want


def test_the_section(pocket):
    _, _, rows = pocket
    several = origins_section([*rows, *({**row, "variant": "zero(3)"} for row in rows)])
    assert [drawing.name for drawing in several.drawings] == ["life_line", "life_line_2"]
    beside = several.tables[0]
    assert (beside.name, beside.data["variant"].tolist()) == ("accounts", ["fp32", "zero(3)"])
    parts, found = parts_of(pd.DataFrame(rows)[lambda every: every["metric"] == "origins.writer"]), beside.data.iloc[0]
    most = parts.loc[(parts["value"] * found["value"])[parts["layer"] < found["layer"]].idxmax()]
    assert (found["part_layer"], found["written"]) == (most["layer"], most["value"])


# The figure


def test_life_line_shows_terms_and_states(blocks):
    found = outliers.origins(make_model("llama"), blocks, [3, 5])
    panels = outliers.plot.life_line(found)
    assert panels.shape == (2, 2)
    axes = outliers.plot.life_line(found, feature=5, at="first")
    states = found.states().query("feature == 5")
    assert axes.lines[0].get_ydata().tolist() == states["first"].tolist()
    parts = parts_of(pd.DataFrame(found.records())).query("feature == 5")
    assert sorted(bar.get_height() for bar in axes.patches) == pytest.approx(sorted(parts["first"]))
    (band,) = axes.child_axes
    assert band.get_images()[0].get_array().shape == (2, 2)
    assert band.get_images()[0].get_clim() == (1 / 16, 4)
    with pytest.raises(UserError, match="choose one by feature="):
        outliers.plot.life_line(found, at="mean", ax=axes)
    with pytest.raises(UserError, match="unknown feature '7'"):
        outliers.plot.life_line(found, feature=7)


def overlaps(axes) -> list[str]:
    """The names of writers that hide something, or are not wholly within the axes."""
    axes.figure.draw_without_rendering()
    boxes = {text.get_text(): text.get_window_extent() for text in axes.texts}
    line = axes.transData.transform_path(axes.lines[0].get_path())
    bars = [bar.get_window_extent() for bar in axes.patches]
    return [
        name
        for name, box in boxes.items()
        if line.intersects_bbox(box, filled=False)
        or any(box.overlaps(other) for other in [*bars, *(one for to, one in boxes.items() if to != name)])
        or not (axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max))
    ]


@pytest.mark.parametrize("size", [(5, 4), (3, 2), (1.2, 0.8)], ids=str)
def test_names_of_writers_hide_nothing(size, pocket):
    named = 0
    for rows in (pocket[-1], kept("mechanism/smollm2-135m")):
        features = {row["feature"] for row in rows if row["metric"] == "origins.rest"}
        for feature, place in itertools.product(features, AT):
            axes = outliers.plot.life_line(rows, feature=feature, at=place, ax=Figure(figsize=size).subplots())
            assert overlaps(axes) == []
            named += len(axes.texts)
    assert named >= 3 or size == (1.2, 0.8), "where there is room for them"


def test_what_reads_more_than_chance_is_named_behind_the_gates(pocket):
    """As tests of readers make up their rows; queries, keys and values are named in the place of what they are of."""
    costs = {"q": 0.5, "k": 0.011, "attn_in": 0.6, "ffn_in": 0.0}
    rows = made_up(costs, {})
    (read,) = {feature: [place.written for place in places] for feature, places in readers_of(rows).items()}.values()
    assert read == ["q", "attn_in"]
    (feature,) = {str(row["features"][0]) for row in rows if row.get("subject") == "feature"}
    of_writers = [row | ({"feature": int(feature)} if "feature" in row else {}) for row in pocket[-1]]
    of_writers = [row for row in of_writers if row["metric"].startswith("origins.")]
    section = origins_section([*of_writers, *({**row, "model": of_writers[0]["model"]} for row in rows)])
    bands = [band for axes in section.drawings[0].figure.axes for band in axes.child_axes]
    assert [text.get_text() for band in bands for text in band.texts] == ["read by q"]
    assert section.explorers[0].content["features"][0]["readers"] == read


# A real model


@needs_shared
@needs_smollm2
def test_features_of_smollm2():
    """Of which one is massive, so that all others in the sum are small."""
    model, tokenizer = outliers.load_model("smollm2-135m"), outliers.load_tokenizer("smollm2-135m")
    blocks = outliers.load_text(str(C4), tokenizer, block=512, blocks=1)
    found = outliers.origins(model, blocks, [247, 507])
    writers = found.writers().set_index(["feature", "layer", "writer", "index"])
    states = found.states().set_index(["feature", "layer"])
    assert writers.loc[(507, 11, "neuron", 1229), "first"] == pytest.approx(15_735, rel=0.01)
    assert states.loc[(507, 12), "first"] == pytest.approx(21_058, rel=0.01)
    assert states.loc[(247, 22), "value"] == pytest.approx(-117, rel=0.01)
    assert found.rest.max() < 1e-6
