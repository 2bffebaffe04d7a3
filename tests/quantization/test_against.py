"""A model of somebody else against its original: the same, with one damaged weight, and as other libraries store it."""

import copy
import json

import pytest
import torch
from torch.nn import functional

import outliers
from outliers import UserError, quantize, run, variant
from outliers.commands.damage import Damage, damage
from outliers.metrics.agreement import AgreementReader
from outliers.metrics.layers import layer_by_layer
from outliers.metrics.measurement import MemoryNeeds
from outliers.metrics.perplexity import read_logits
from outliers.models.anatomy import decoder_layers, projections
from outliers.models.decoder import run_decoder
from outliers.quantization.linear import stored_weight
from outliers.quantization.peers import other_fields, weight_of
from outliers.runs.forecast import FreeBytes, model_run_of, need_of
from outliers.runs.frame import records_in
from outliers.subjects.causal import ModelWithText
from outliers.variants.peer import Against
from tests.gguf_files import save_gguf
from tests.models.test_stored import llama, of_bitsandbytes
from tests.small_models import sample_blocks
from tests.typed import refused

MODEL = "pocket/gpt2-0.1m"
SMALL = {"model": MODEL, "block": 32, "blocks": 2}
DAMAGED = "transformer.h.1.mlp.c_fc"


@pytest.fixture(scope="module")
def model():
    return outliers.load_model(MODEL)


@pytest.fixture(scope="module")
def blocks():
    return sample_blocks(MODEL, 32, 2)


@pytest.fixture(scope="module")
def broken(model, tmp_path_factory):
    """The folder of the model with one weight that is far too large."""
    other, folder = copy.deepcopy(model), tmp_path_factory.mktemp("broken")
    other.get_submodule(DAMAGED).weight.data[3, 5] += 2  # of GPT-2: input, output
    other.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def own(model, tmp_path_factory):
    """The folder of an int8 model of ours."""
    folder = tmp_path_factory.mktemp("own")
    outliers.save_quantized(quantize(model, "llm.int8", keep="int8"), folder)
    return str(folder)


@pytest.mark.parametrize("scheme", ["llm.int8", "absmax-vector", "zeropoint-vector"])
def test_of_our_int8_models_the_damage_is_that_of_their_scheme(scheme, model, blocks, tmp_path):
    """Also of LLM.int8(), for no input of this model reaches its threshold."""
    outliers.save_quantized(quantize(model, scheme, keep="int8"), tmp_path)
    found, expected = damage(model, blocks, against=str(tmp_path)), damage(model, blocks, scheme)
    assert found.errors["projection"].tolist() == expected.errors["projection"].tolist()
    for table in ("errors", "roles", "layers"):
        of_both = (getattr(one, table).filter(regex="^(error|by_token|perplexity_only$)") for one in (found, expected))
        values = [columns.to_numpy() for columns in of_both]
        assert values[0] == pytest.approx(values[1], rel=1e-4), table
    assert found.model == pytest.approx(expected.model, rel=1e-2)


def test_a_damaged_projection_is_found_with_the_weight_that_changed_most(model, broken):
    errors = damage(model, [torch.arange(30)], against=broken, by="error").errors
    (row,) = (row for row in errors.to_dict("records") if row["error"])
    assert (row["projection"], row["changed_at"], row["largest_change"]) == (DAMAGED, "[5, 3]", pytest.approx(2))


def test_rows_are_found_again_for_the_same_weights_alone(broken, own, tmp_path):
    (tmp_path / "out").mkdir()
    spec = {**SMALL, "by": "error"}
    first = run(Damage(**spec, against=[broken]), tmp_path / "out")
    again = run(Damage(**spec, against=[broken]), tmp_path / "out")
    assert [row["wall_seconds"] for row in first] == [row["wall_seconds"] for row in again]
    hashes = {row["other_weights_hash"] for row in first if "other_weights_hash" in row}
    assert len(hashes) == 1
    other = outliers.load_model(broken)
    other.get_submodule(DAMAGED).weight.data[3, 5] += 1
    other.save_pretrained(broken)
    changed = run(Damage(**spec, against=[broken]), tmp_path / "out")
    assert {row["other_weights_hash"] for row in changed if "other_weights_hash" in row}.isdisjoint(hashes)
    rows = run(Damage(**spec, against=[own]), tmp_path / "out")
    assert {row["other_quantized_from"] for row in rows if "other_quantized_from" in row} == {"llm.int8"}
    assert len(records_in(tmp_path / "out")) > len(changed)


def test_a_layer_is_taken_whole(model):
    """With its norms, which a fine-tuned model has of its own."""
    ids, other, changed = torch.arange(30), copy.deepcopy(model), copy.deepcopy(model)
    for module in (*decoder_layers(other), decoder_layers(changed)[1]):
        module.ln_1.weight.data *= 1.1
    ((_, agreement),) = layer_by_layer(model, [ids], Against(other))[1]
    with torch.no_grad():
        before, after = (functional.log_softmax(one(ids[None]).logits[0, :-1].double(), -1) for one in (model, changed))
    assert agreement.kl == pytest.approx((before.exp() * (before - after)).sum().item(), rel=1e-4)


def test_of_a_model_with_another_head_the_divergence_is_of_both_heads(model):
    other, ids = copy.deepcopy(model), torch.arange(30)
    other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.detach() * 1.5)
    ((_, _, states),) = run_decoder(model, [ids])
    with torch.no_grad():
        before, after = (functional.log_softmax(one(ids[None]).logits[0, :-1].double(), -1) for one in (model, other))
        ((found,),) = read_logits(ids, [(other, states)], [AgreementReader], (model, states))
    assert found.kl == pytest.approx((before.exp() * (before - after)).sum().item(), rel=1e-4)
    assert damage(model, [ids], against=other, by="model").model["kl"] == pytest.approx(found.kl / 29, rel=1e-9)


# As other libraries have it


def test_a_model_of_bitsandbytes_in_memory_computes_as_it_does(model, blocks, tmp_path):
    other = of_bitsandbytes(model, tmp_path, load_in_8bit=True)
    computed = damage(model, blocks, against=other, by="error").errors
    stored = damage(model, blocks, against=str(tmp_path / "theirs"), by="error").errors
    scheme = damage(model, blocks, "llm.int8-bnb", by="error").errors
    assert computed["error"].to_numpy() == pytest.approx(scheme["error"].to_numpy(), rel=0.01)
    assert (stored["error"] < computed["error"]).all()  # of a file the weights alone are quantized
    assert computed["weight_error"].to_numpy() == pytest.approx(stored["weight_error"].to_numpy(), rel=1e-4)
    exact = [stored_weight(one.module) for one in projections(model)]
    assert computed["largest_weight"].abs().tolist() == [weight.abs().max().item() for weight in exact]
    theirs = [weight_of(one.module) for one in projections(other)]
    errors = [((a - b).square().sum() / b.square().sum()).item() for a, b in zip(theirs, exact, strict=True)]
    assert computed["weight_error"].to_numpy() == pytest.approx(errors, rel=1e-4)


def test_rows_say_what_another_file_was_quantized_to(tmp_path):
    model = llama(4096)
    assert other_fields(str(save_gguf(model, tmp_path / "other.gguf", "Q4_0")), model)["other_quantized_from"] == "Q4_0"


def test_a_model_of_torchao_in_memory(blocks):
    pytest.importorskip("torchao", reason="torchao is not installed")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = llama(4096)
    other = copy.deepcopy(model)
    of_layers = lambda module, path: "layers" in path and isinstance(module, torch.nn.Linear)  # noqa: E731
    quantize_(other, Int8WeightOnlyConfig(), filter_fn=of_layers)
    found = damage(model, blocks, against=other)
    for one, theirs in zip(projections(model), projections(other), strict=True):
        weight = theirs.module.weight.dequantize()
        error = ((weight - one.module.weight).square().sum() / one.module.weight.square().sum()).item()
        row = found.errors.set_index("projection").loc[one.path]
        assert 0 < row["weight_error"] == pytest.approx(error, rel=1e-5)
        assert row["error"] == pytest.approx(error, rel=0.5)
    assert 0 < found.model["kl"] < 1e-3


# In a sweep, and by its writing


def test_a_sweep_says_what_a_folder_of_codes_is_for(own, monkeypatch, capsys, tmp_path):
    assert "holds an int8 model of outliers.save_quantized" in refused(monkeypatch, capsys, own, "--out", tmp_path)


def test_another_model_under_a_scheme(broken, model, blocks):
    """Also where a run, which is in inference mode, was the first to load it."""
    with torch.inference_mode(), variant(f"against({broken})").on(model):
        pass
    with variant(f"against({broken})+absmax").on(model) as changed:
        found = outliers.perplexity(changed, blocks)
    assert found == outliers.perplexity(quantize(outliers.load_model(broken), "absmax"), blocks)


# At the door


def test_models_that_are_not_alike_are_refused(monkeypatch, capsys, model, tmp_path):
    def answer(other: str) -> str:
        capsys.readouterr()  # of transformers, which draws bars
        return refused(monkeypatch, capsys, MODEL, "--against", other, "--out", tmp_path / "out", command="damage")

    llama().save_pretrained(tmp_path / "llama")
    assert "is a model of the architecture 'llama'; expected one of 'gpt2'" in answer(str(tmp_path / "llama"))
    assert "of the shape (4096, " in answer("pocket/gpt2-0.5m")
    tokenizer = outliers.load_tokenizer(MODEL)
    model.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "other")
    content = json.loads((tmp_path / "other" / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    ids["the"], ids["and"] = ids["and"], ids["the"]
    (tmp_path / "other" / "tokenizer.json").write_text(json.dumps(content))
    assert "the tokenizer of" in answer(str(tmp_path / "other"))
    assert not list((tmp_path / "out").glob("rows.jsonl"))


def test_what_cannot_be_asked_for(model, blocks):
    with pytest.raises(UserError, match="expected one of the two"):
        damage(model, blocks)
    with pytest.raises(UserError, match="expected one of the two"):
        damage(model, blocks, "absmax", against=model)
    with pytest.raises(UserError, match=r"in torch\.bfloat16, and the other one in torch\.float32"):
        damage(model, blocks, against=copy.deepcopy(model).bfloat16())
    with pytest.raises(UserError, match="leave --stream out"):
        run(Damage(**SMALL, against=[MODEL], stream=True))


def test_the_forecast_counts_the_other_model(model):
    weights = sum(parameter.nbytes for parameter in model.parameters())
    of_model = model_run_of(ModelWithText(MODEL, None, Damage(**SMALL)), MemoryNeeds())
    needs = [of_model._replace(memory_needs=MemoryNeeds(other_models=count)) for count in (0, 2)]
    alone, beside = (need_of(one, FreeBytes(2**40)).memory for one in needs)
    assert beside - alone == pytest.approx(3 * weights, rel=0.01)  # two models, and what reading leaves of the heap
