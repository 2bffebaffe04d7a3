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
from outliers.metrics.records import PART_OF
from outliers.models.anatomy import anatomy_of, decoder_layers, experts_of
from outliers.models.anatomy.experts import call_by_projection
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
            experts = block.get_submodule(anatomy.experts)
            for parameter in (one for name, one in experts.named_parameters() if name.startswith("down_proj")):
                parameter[index] = 0
            return
        if writer == "expert neuron":
            block.get_submodule(f"{anatomy.experts}.1.down_proj").weight[:, index] = 0
            return
        if writer == "shared neuron":
            block.mlp.shared_expert.down_proj.weight[:, index] = 0
            return
        (name,) = {"head": anatomy.attn_out, "neuron": anatomy.ffn_out}[writer]
        weight = stored_weight(block.get_submodule(name))
        size = weight.shape[1] // model.config.num_attention_heads if writer == "head" else 1
        weight[:, index * size : (index + 1) * size] = 0


@pytest.mark.parametrize(
    ("case", "writer"),
    [
        *[("gpt2", "neuron"), ("llama", "neuron"), ("falcon", "head"), ("mixtral", "expert"), ("gpt-oss", "expert")],
        *[("gpt-oss", "expert neuron"), ("qwen2-moe", "expert neuron"), ("qwen2-moe", "shared neuron")],
    ],
)
def test_a_term_is_what_is_gone_without_its_writer(case, writer, blocks):
    model = made("qwen2_moe") if case == "qwen2-moe" else make_model(case)
    last = len(decoder_layers(model)) - 1
    found = outliers.origins(model, blocks, FEATURES)
    terms = found.experts() if writer == "expert" else found.writers(neurons=100)
    terms = terms[(terms["layer"] == last) & (terms["writer"] == writer)]
    if writer == "expert neuron":
        terms = terms[terms["expert"] == 1]
    assert len(terms)
    without(model, last, writer, 2)
    after = outliers.origins(model, blocks, FEATURES).states().set_index(["feature", "layer"])
    before = found.states().set_index(["feature", "layer"])
    for term in terms[terms["index"] == 2].to_dict("records"):
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


def test_an_account_does_not_grow_with_the_text(blocks):
    few, many = (outliers.origins(make_model("gpt2"), some, FEATURES) for some in (blocks[:1], blocks))
    sizes = [sum(part.nbytes for sums in one.sums.values() for part in sums) for one in (few, many)]
    assert sizes[0] == sizes[1]


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
    assert outliers.plot.life_line(found, at="mean").child_axes == []


@pytest.mark.parametrize("name", ["absmax", "plant(3,factor=8)", "zero(3)"])
def test_under_a_variant(name, blocks):
    model = make_model("llama")
    found = outliers.origins(model, blocks, [3], variant=variant(name))
    plain = outliers.origins(model, blocks, [3])
    gains = found.gates()["value"] / plain.gates()["value"]
    assert gains.tolist() == pytest.approx([8.0 if name.startswith("plant") else 1.0] * 4)
    assert (found.rest[0] > 1e-4) == (name == "absmax"), "what rounding adds is no writer's"


# Planted writers


def plant_writer(model, blocks, writer: str, feature: int) -> int:
    """Let one writer of the first layer write a feature as nothing else does; its number."""
    anatomy, block = anatomy_of(model.config), decoder_layers(model)[0]
    with torch.no_grad():
        if writer == "expert":
            block.get_submodule(anatomy.experts).down_proj_bias[2, feature] = 400.0
            return 2
        if writer == "head":
            weight = stored_weight(block.get_submodule(anatomy.attn_out[0]))
            size = weight.shape[1] // model.config.num_attention_heads
            weight[feature, 2 * size : 3 * size] *= 200
            return 2
        if writer == "expert neuron":  # of an expert that most tokens have
            most = outliers.trace(model, blocks).expert_shares().query("layer == 0")["share"].idxmax()
            found = outliers.origins(model, blocks, [feature]).sums[0, "expert neuron"]
            number = most * 48 + int(found.magnitude[most * 48 : (most + 1) * 48].argmax())
            block.mlp.experts.down_proj[most, feature, number % 48] = 4000.0
            return number
        found = outliers.origins(model, blocks, [feature])
        means = found.sums[0, "neuron"].total / found.counts[:, None]
        number = int(means.abs().amin(0).argmax())  # which is active at the first position and behind it
        weight = stored_weight(block.get_submodule(anatomy.ffn_out[0]))
        if writer == "neuron":  # it writes nothing else
            weight[:, number] = 0
        weight[feature, number] = 400.0
        return number


PLANTED = [
    *[("gpt2", "weight"), ("gpt2", "neuron"), ("gpt2", "head"), ("llama", "neuron"), ("llama", "head")],
    *[("falcon", "head"), ("opt", "weight"), ("gpt-oss", "head"), ("gpt-oss", "expert"), ("mixtral", "expert neuron")],
]


def sentences(account) -> list[str]:
    """What is said of the features of an account."""
    return [finding.text for finding in origins_findings(account.records())]


@pytest.mark.parametrize(("case", "writer"), PLANTED)
def test_a_planted_writer_is_named_first(case, writer, blocks):
    model = make_model(case)
    number = plant_writer(model, blocks, writer, 3)
    kind = "neuron" if writer == "weight" else writer
    account = outliers.origins(model, blocks, [3])
    writers, sentence = account.experts() if writer == "expert" else account.writers(), sentences(account)[0]
    first = writers.loc[writers["value"].abs().idxmax()]
    assert (first["writer"], first["layer"]) == (kind, 0)
    name = f"{kind} {number}"
    if writer == "expert neuron":
        name = f"expert {number // 48}, neuron {number % 48}"
        number = number % 48
        assert name.startswith(f"expert {first['expert']}, ")
    assert first["index"] == number
    assert "of layer 0 (" in sentence and f"of which {name} " in sentence


@pytest.mark.parametrize("case", ["gpt2", "llama", "falcon", "opt", "gpt-oss", "gemma2"])
def test_nothing_is_claimed_without_one(case, blocks):
    assert sentences(outliers.origins(make_model(case), blocks, [3])) == []


OF_MIXTURES = ("mixtral", "gpt_oss", "qwen2_moe", "glm4_moe", "llama4_text", "granitemoeshared", "ernie4_5_moe")


@pytest.mark.parametrize("kind", slow_but(OF_MIXTURES, ("gpt_oss", "qwen2_moe")))
def test_neurons_of_experts_are_terms(kind, blocks):
    """Beside sums of our own in float64, of the model's own functions, and of what stands beside the experts."""
    model = made(kind)
    found = outliers.origins(model, blocks, FEATURES, positions=range(24))
    assert found.rest.max() < 1e-5
    experts, seen = experts_of(model)[1], []
    call_by_projection(model)
    for number in range(4):
        expert = experts.get_submodule(str(number))
        expert.register_forward_hook(lambda _, args, _out, number=number: seen.append((number, *args[:3])))
    for block in blocks:
        model(block[None])
    weights = torch.zeros(4, experts.get_submodule("0.down_proj").in_features, len(FEATURES), dtype=torch.double)
    for number, x, tokens, factor in seen:
        later = tokens > 0
        expert, chosen = experts.get_submodule(str(number)).double(), later.nonzero()[:, 0]
        units = expert.units(x[chosen].double(), experts.double())
        units = units * (factor[chosen] if isinstance(factor, torch.Tensor) else factor)
        weights[number] += units.sum(0)[:, None] * expert.down_proj.weight[FEATURES].T
    count = len(blocks) * (blocks.shape[1] - 1)
    scale = getattr(model.config, "residual_multiplier", 1.0)
    table = found.writers(neurons=100).query("layer == 1 and writer == 'expert neuron'")
    for row in table.to_dict("records"):
        expected = scale * weights[row["expert"], row["index"], FEATURES.index(row["feature"])] / count
        assert row["value"] == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    wholes = found.experts().query("layer == 1").set_index(["feature", "index"])["value"]
    sums = scale * weights.sum(1) / count
    for (feature, number), value in wholes.items():
        if kind != "gpt_oss":  # whose experts have biases
            assert value == pytest.approx(sums[number, FEATURES.index(feature)].item(), rel=1e-4, abs=1e-6)


# What is refused


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
    section = origins_section(rows)
    assert [table.name for table in section.tables] == ["parts", "writers", "gates"]
    assert [drawing.name for drawing in section.drawings] == ["life_line"]
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
    with pytest.raises(UserError, match="choose one by feature="):
        outliers.plot.life_line(found, at="mean", ax=axes)
    with pytest.raises(UserError, match="unknown feature '7'"):
        outliers.plot.life_line(found, feature=7)


def test_the_colours_of_gains_end_at_a_sixteenth_of_the_median_and_at_four_of_it(blocks):
    found = outliers.origins(make_model("llama"), blocks[:1], [3])
    (band,) = outliers.plot.life_line(found, at="mean", ax=Figure().subplots()).child_axes
    assert band.get_images()[0].get_clim() == (1 / 16, 4)


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
    model, tokenizer = outliers.load_model("smollm2-135m"), outliers.load_tokenizer("smollm2-135m")
    blocks = outliers.load_text(str(C4), tokenizer, block=512, blocks=1)
    found = outliers.origins(model, blocks, [247, 507])
    parts = found.writers().assign(part=lambda rows: rows["writer"].map(PART_OF))
    parts = parts.groupby(["feature", "layer", "part"])[["value", "first"]].sum()
    writers = found.writers().set_index(["feature", "layer", "writer", "index"])
    states, gates = (table.set_index(["feature", "layer"]) for table in (found.states(), found.gates()))
    gains = gates[gates["norm"] == "input_layernorm"].loc[247]

    def close(value: float):
        return pytest.approx(value, rel=0.01)

    assert parts.loc[(507, 11, "feed-forward"), "first"] == close(21_024)
    assert writers.loc[(507, 11, "neuron", 1229), "first"] == close(15_735), "three quarters of it"
    assert parts.loc[(507, 28, "feed-forward"), "first"] == close(-14_206)
    assert writers.loc[(507, 28, "neuron", 678), "first"] == close(-13_663)
    assert parts.loc[(507, 29, "feed-forward"), "first"] == close(-4_995)
    begun = parts.loc[507].query("layer < 11 and part == 'feed-forward'")["first"].abs().nlargest(2)
    assert {layer for layer, _ in begun.index} == {2, 9}
    assert parts.loc[(247, 0, "feed-forward"), "value"] == close(-14.1)
    assert parts.loc[(247, 1, "attention"), "value"] == close(-11.0)
    assert states.loc[247]["value"].idxmin() == 22
    assert states.loc[(247, 22), "value"] == close(-117)
    assert parts.loc[(247, 24, "attention"), "value"] == close(53)
    assert gains.loc[1:8, "value"].abs().max() < 0.06
    assert (gains.loc[9, "value"], gains.loc[9, "median"]) == (pytest.approx(0.375), close(0.246))
    assert found.rest.max() < 1e-6
    said = [finding.text for finding in origins_findings(found.records())]
    assert said[0].startswith("Feature 247 averages −117 in the residual stream over positions after the first, ")
