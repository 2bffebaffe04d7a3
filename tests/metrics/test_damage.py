"""The damage of schemes: against hooks and products written by hand, torch's own divergence, and whole models."""

import itertools
import math
import statistics

import pytest
import torch
from matplotlib.container import BarContainer
from torch.nn import functional

from outliers import Ablated, Intervention, Quantized, Together, UserError, calibrate, plant, quantize, run
from outliers.commands.damage import Damage, damage
from outliers.criterion import OF_EVERY_STACK
from outliers.metrics.damages import damages_of
from outliers.metrics.errors import block_errors
from outliers.metrics.perplexity import perplexity, variant_losses
from outliers.metrics.places import place_choices, place_losses
from outliers.metrics.records import Errors, Inputs, Places
from outliers.models.anatomy import projections
from outliers.models.anatomy.trust import check_found
from outliers.models.load import load_model
from outliers.quantization.schemes import SCHEMES, TABLE1
from outliers.subjects.cell import Cell
from outliers.subjects.given import Given
from outliers.text.blocks import tokens_hash
from outliers.variants.draw import drawn
from outliers.views.damage import damage_bars, damage_map, damage_section
from tests.kept import kept
from tests.small_models import inputs_of, make_model, names_of, padded, records_of, sample_blocks
from tests.tracing.test_tracing import hooks

ABSMAX = Quantized(SCHEMES["absmax"])
MODEL = "pocket/gpt2-0.5m"
SMALL = {"model": MODEL, "block": 32, "blocks": 3}


def rounded(values: torch.Tensor, per_row: bool) -> torch.Tensor:
    """Absmax in 8 bits and back, in float64; one scale for all, or for each row."""
    scale = (values.abs().amax(1, keepdim=True) if per_row else values.abs().max()) / 127
    return scale * (values / scale).round()


def inputs_by_path(model, block) -> dict[str, torch.Tensor]:
    """What each projection reads of a block: float64 (T, features)."""
    with torch.no_grad(), inputs_of({one.path: one.module for one in projections(model)}) as seen:
        model(block[None])
    return {path: x.flatten(0, -2).double() for path, (x,) in seen.items()}


@pytest.mark.parametrize(("scheme", "per_row"), [("absmax", False), ("absmax-vector", True)])
@pytest.mark.parametrize("case", ["gpt2", "opt", "llama", "falcon"])
def test_errors_by_hand(case, scheme, per_row, blocks):
    model, blocks = make_model(case), padded(blocks, "left")[0]  # of several lengths
    energies, squares, ratios, inputs = {}, {}, {}, [inputs_by_path(model, block) for block in blocks]
    for of_block in inputs:
        for one in projections(model):
            weight = one.module.weight.detach().double()
            weight = weight.T if type(one.module).__name__ == "Conv1D" else weight
            bias, x = 0 if one.module.bias is None else one.module.bias.detach().double(), of_block[one.path]
            exact = x @ weight.T + bias
            error = rounded(x, per_row) @ rounded(weight, per_row).T + bias - exact
            energies[one.path] = energies.get(one.path, 0) + exact.square().sum().item()
            squares[one.path] = squares.get(one.path, 0) + error.square().sum().item()
            ratios.setdefault(one.path, []).append(error.square().sum(1) / exact.square().sum(1))
    found = damage(model, blocks, scheme, by="error")
    assert hooks(model) == 0
    assert found.errors["projection"].tolist() == [one.path for one in projections(model)]
    assert found.model == {}
    for row in found.errors.to_dict("records"):
        path = row["projection"]
        assert row["error"] == pytest.approx(squares[path] / energies[path], rel=1e-4), path
        assert row["by_token"] == pytest.approx(torch.cat(ratios[path]).mean().item(), rel=1e-4), path
        assert row["db"] == pytest.approx(10 * math.log10(row["error"]))
        assert row["by_token_db"] == pytest.approx(10 * math.log10(row["by_token"]))
        block, largest = max(enumerate(x[path].abs().max().item() for x in inputs), key=lambda one: one[1])
        assert row["largest"] == pytest.approx(largest, rel=1e-6)
        assert inputs[block][path][row["position"], row["feature"]].abs().item() == row["largest"]
        assert row["token"] == blocks[block][row["position"]]


def test_tokens_whose_output_is_zero_have_no_error_by_token(blocks):
    """The others have the mean that they have by hand."""
    model, path = make_model("llama"), "model.layers.0.self_attn.q_proj"
    token = blocks[0, 3]
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = 0
    x, weight = inputs_by_path(model, blocks[0])[path], model.get_submodule(path).weight.detach().double()
    exact = x @ weight.T
    there = blocks[0] != token
    assert not exact[~there].any() and exact[there].any(1).all()
    error = (rounded(x[there], True) @ rounded(weight, True).T - exact[there]).square().sum(1)
    found = block_errors(model, blocks[:1], [Quantized(SCHEMES["absmax-vector"])])[0].errors[path][0]
    assert found.tokens == there.sum()
    assert found.ratios == pytest.approx((error / exact[there].square().sum(1)).sum().item(), rel=1e-4)


def test_errors_of_all_schemes_come_from_one_pass_and_are_those_of_each(blocks, calls_of):
    model = make_model("llama")
    check_found(model)  # once for all, which passes a few tokens
    passes = calls_of("transformers.models.llama.modeling_llama.LlamaModel.forward")
    schemes = [SCHEMES[name] for name in TABLE1[1:]]
    together = block_errors(model, blocks, [Quantized(scheme) for scheme in schemes])
    assert len(passes) == len(blocks)
    for number, scheme in enumerate(schemes):
        for of_all, alone in zip(together, block_errors(model, blocks, [Quantized(scheme)]), strict=True):
            of_scheme = {path: {0: errors[number]} for path, errors in of_all.errors.items()}
            assert of_scheme == alone.errors
            assert of_all.largest == alone.largest


def test_layers_from_their_stored_input_are_those_of_whole_models(case, blocks):
    """To the last bit, whatever a decoder gives its layers beside the hidden states."""
    model = make_model(case)
    for scheme in ("absmax", "llm.int8"):
        variant = Quantized(SCHEMES[scheme])
        asked = place_choices(model, variant, "layer")
        assert [one[:3] for one in asked] == [
            (kind, "layer", layer) for kind in ("only", "without") for layer in range(model.config.num_hidden_layers)
        ]
        whole = variant_losses(model, blocks, [one.variant for one in asked])
        assert place_losses(model, blocks, variant, asked) == whole
        some = [asked[1], asked[-1]]
        assert place_losses(model, blocks, variant, some) == [whole[1], whole[-1]], "some of them alone"
        assert len({loss[0].total for loss in whole}) == 2, "of two layers one alone is all but the other"


@pytest.mark.parametrize("case", ["gpt2", "opt", "llama"])
def test_perplexities_are_those_of_quantize_with_skip(case, blocks):
    model, skip = make_model(case), ["*.1.self_attn.v_proj"] if case != "gpt2" else ["transformer.h.1.attn.c_attn"]
    left = {one.path for one in projections(model) if one.path.endswith(skip[0].removeprefix("*"))}
    assert len(left) == 1
    found = damage(model, blocks, "absmax", skip=skip)

    def with_exact(is_exact) -> float:
        exact = [one.path for one in projections(model) if is_exact(one)]
        return perplexity(quantize(model, "absmax", skip=[*skip, *exact]), blocks)

    assert found.roles["role"].tolist() == list(OF_EVERY_STACK)
    assert found.layers["layer"].tolist() == [0, 1]
    for table, field in ((found.roles, "role"), (found.layers, "layer")):
        for row in table.to_dict("records"):
            only = with_exact(lambda one, row=row, field=field: getattr(one, field) != row[field])
            without = with_exact(lambda one, row=row, field=field: getattr(one, field) == row[field])
            assert (row["perplexity_only"], row["perplexity_without"]) == (only, without)
            assert row["damage_only"] == only / found.model["unquantized"] - 1
    assert found.model["unquantized"] == perplexity(model, blocks)
    assert found.model["perplexity"] == perplexity(quantize(model, "absmax", skip=skip), blocks)
    assert not left & set(found.errors["projection"])
    assert hooks(model) == 0


def test_what_is_skipped_whole_is_no_place(blocks):
    model = make_model("gpt2")
    found = damage(model, blocks, "absmax", by=iter(["role", "layer"]), skip=["*.mlp", "transformer.h.0"])
    assert found.roles["role"].tolist() == ["attn_in", "attn_out"]
    columns = [name for alone in ("perplexity_only", "damage_only") for name in (alone, f"{alone}_error")]
    assert found.layers.columns.tolist() == ["layer", *columns], "all but it is nothing"
    assert found.layers["perplexity_only"].tolist() == [found.model["perplexity"]]
    assert found.errors.empty


@pytest.mark.parametrize("case", ["gpt2", "gemma2", "granite"])
@pytest.mark.parametrize(("head_outputs", "scale"), [(7, 1), (4096, 1), (33, 100)])
def test_divergence_and_agreement_are_those_of_all_logits(case, head_outputs, scale, blocks, constants):
    """However the head is cut, and where almost all probability is on one token."""
    constants("outliers.models.head", HEAD_OUTPUTS=head_outputs)
    model = make_model(case)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(scale)
    quantized = quantize(model, "absmax")
    with torch.no_grad():
        logits = [torch.cat([one(block[None]).logits for block in blocks]).double() for one in (model, quantized)]
        p, q = (one[:, :-1].log_softmax(-1) for one in logits)
    found = damage(model, blocks, "absmax", by=["model"]).model
    kl = functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean().item()
    assert found["kl"] == pytest.approx(kl, rel=1e-3)
    assert found["top1_agreement"] == pytest.approx((p.argmax(-1) == q.argmax(-1)).double().mean().item())
    assert 0 < found["top1_agreement"] <= 1
    assert found["perplexity"] == perplexity(quantized, blocks)


def test_a_model_that_is_quantized_already_is_measured_as_if_it_was_not(blocks):
    model = make_model("gpt2")
    one, other = (damage(of, blocks, "absmax-vector") for of in (model, quantize(model, "absmax")))
    assert one.errors.equals(other.errors)
    assert one.roles.equals(other.roles)
    assert one.model == other.model


def test_draws_give_mean_and_scatter(blocks):
    model = make_model("gpt2")
    found = damage(model, blocks, "absmax", draws=3)
    values = []
    for draw in range(3):
        quantized = quantize(model, "absmax", skip=["transformer.h.1"])
        with drawn(quantized, draw):
            values.append(perplexity(quantized, blocks))
    first = found.layers.set_index("layer").loc[0]
    assert first["perplexity_only"] == statistics.fmean(values)
    assert first["perplexity_only_deviation"] == statistics.stdev(values)
    assert {"perplexity_deviation", "kl_deviation", "top1_agreement_deviation"} <= set(found.model)
    assert hooks(model) == 0


# Runs


def test_rows_are_what_the_function_finds(tmp_path):
    spec = Damage(**SMALL, schemes=["llm.int8", "absmax"])
    rows = run(spec, tmp_path)
    model, blocks = load_model(MODEL), sample_blocks(MODEL, 32, 3)
    found = damages_of(rows)
    for scheme in names_of(spec):
        want = damage(model, blocks, scheme)
        assert found[scheme].errors.equals(want.errors)
        assert found[scheme].roles.equals(want.roles)
        assert found[scheme].layers.equals(want.layers)
        assert found[scheme].model == want.model
    inputs = [row for row in rows if row["metric"] == "damage.largest_input"]
    assert len(inputs) == 4 * model.config.num_hidden_layers, "they are those of both schemes"


def test_a_calibrated_scheme_is_calibrated_on_the_blocks_that_follow(tmp_path):
    name, by = "absmax+smoothing", ["error", "role"]
    blocks, model = sample_blocks(MODEL, 32, 5), load_model(MODEL)
    found = damage(model, blocks[:3], name, by, calibration=calibrate(model, blocks[3:]))
    rows = run(Damage(**SMALL, schemes=[name], by=by, calibration_blocks=2), tmp_path)
    assert {row["calibration_hash"] for row in rows if row.get("scheme") == name} == {tokens_hash(blocks[3:])}
    for table in ("errors", "roles"):
        expected, got = (getattr(one, table).select_dtypes("number") for one in (found, damages_of(rows)[name]))
        assert got.to_numpy() == pytest.approx(expected.to_numpy(), rel=1e-5)
    with pytest.raises(UserError, match="needs the magnitudes of the inputs"):
        damage(model, blocks[:3], name, by)


def test_variants_of_several_parts(blocks):
    """Errors under an ablation are those from the inputs without the feature."""
    model, ablated = make_model("llama"), Ablated(Intervention((3,)), ("attn_in", "ffn_in"))
    subject = Given(plant(model, [3], 500.0), blocks)
    cells = [Cell(subject, ablated, Inputs()), Cell(subject, Together((ablated, ABSMAX)), Errors())]
    rows = records_of(cells)
    of_norms = [row for row in rows if row["role"] in ("attn_in", "ffn_in")]
    assert all(row["feature"] != 3 for row in of_norms if row["metric"] == "damage.largest_input")
    worst = max(row["value"] for row in of_norms if row["metric"] == "damage.error")
    planted = records_of([Cell(subject, ABSMAX, Errors())])
    assert worst < 0.01 < max(row["value"] for row in planted if row["metric"] == "damage.error")
    for variant, metric in ((ablated, Errors()), (ablated, Places()), (Together((ablated, ABSMAX)), Places())):
        with pytest.raises(UserError, match="expected a scheme"):
            records_of([Cell(subject, variant, metric)])


# What it shows


def test_figures_show_the_values():
    damages = damages_of(kept("damage/smollm2-135m"))
    panels = damage_map(damages).ravel()
    columns = [(one, column) for one in damages.values() for column in ("db", "by_token_db")]
    for axes, (one, column) in zip(panels, columns, strict=True):
        (image,) = axes.images
        for row in one.errors.to_dict("records"):
            of_role = one.errors[(one.errors["role"] == row["role"]) & (one.errors["layer"] == row["layer"])]
            assert image.get_array()[OF_EVERY_STACK.index(row["role"]), row["layer"]] == of_role[column].max()
    limits = {axes.images[0].get_clim() for axes in panels}
    assert len(limits) == 1, "one scale for all"
    bars = damage_bars(damages).ravel()
    assert len(bars) == 4
    one = damages["absmax"]
    heights = [bar.get_height() for bar in bars[0].containers[-1]]
    saved = [math.log(one.model["perplexity"] / value) for value in one.roles["perplexity_without"]]
    assert heights == pytest.approx(saved)


@pytest.mark.parametrize("by", [["error"], ["role"], ["layer"], ["model"]])
def test_parts_of_the_damage_are_shown_alone(by, tmp_path):
    section = damage_section(run(Damage(**SMALL, by=by, draws=2), tmp_path), str)
    assert bool(section.findings) == (by == ["error"]), "three blocks bear no claims"
    assert section.tables
    assert bool(section.drawings) == (by != ["model"])


def test_bars_of_both_kinds_stand_around_the_name_of_their_place():
    whole = [("fp32", 40.0), ("absmax", 80.0)]
    rows = [{"metric": "perplexity", "variant": variant, "value": value} for variant, value in whole]
    for kind, role in itertools.product(("only", "without"), ("attn_in", "ffn_in", "ffn_out")):
        rows.append({"metric": f"damage.perplexity_{kind}", "variant": "absmax", "role": role, "value": 50.0})
    axes = damage_bars(damages_of(rows))
    pairs = zip(*(one for one in axes.containers if isinstance(one, BarContainer)), strict=True)
    middles = [sum(bar.get_x() + bar.get_width() / 2 for bar in pair) / len(pair) for pair in pairs]
    assert middles == pytest.approx([0, 1, 2])


@pytest.mark.parametrize(("field", "name", "shown"), [("layer", int, 12), ("expert", "layers.0.experts.{}".format, 10)])
def test_of_experts_those_that_cost_most_are_shown(field, name, shown):
    places = [{"metric": "damage.perplexity_only", "value": 40.0 + number, field: name(number)} for number in range(12)]
    rows = [{"metric": "perplexity", "value": 40.0}, *places]
    variants = ["fp32", *["absmax"] * 12]
    rows = [row | {"model": "m", "variant": variant} for row, variant in zip(rows, variants, strict=True)]
    rows.insert(1, rows[0] | {"variant": "absmax", "value": 80.0})
    (table,) = (table for table in damage_section(rows, str).tables if table.name == f"damage_{field}s")
    assert len(table.data) == 12
    assert len(table.cells) == shown
