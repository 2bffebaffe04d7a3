"""Adapters of PEFT beside the weights of a model: against PEFT's own merge, resident, streamed and in commands."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM

import outliers
from outliers import UserError, perplexity
from outliers.models.names import POCKET
from outliers.models.stream import stream_model
from outliers.runs.frame import records_in
from tests.small_models import make_model
from tests.typed import call, refused

peft = pytest.importorskip("peft", reason="PEFT is not installed")

KINDS = {  # a model, and how it is adapted
    "lora": ("llama", peft.LoraConfig, {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
    "patterns": ("llama", peft.LoraConfig, {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}}),
    "dora": ("llama", peft.LoraConfig, {"target_modules": ["v_proj", "up_proj"], "use_dora": True}),
    "conv1d": ("gpt2", peft.LoraConfig, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "whole": ("llama", peft.LoraConfig, {"target_modules": ["o_proj"], "modules_to_save": ["lm_head"]}),
    "loha": ("llama", peft.LoHaConfig, {"target_modules": ["k_proj"]}),
    "biases": ("opt", peft.LoraConfig, {"target_modules": ["q_proj", "fc2"], "lora_bias": True}),
    "scales": ("opt", peft.IA3Config, {"target_modules": ["k_proj", "fc2"], "feedforward_modules": ["fc2"]}),
    "norms": ("opt", peft.LNTuningConfig, {"target_modules": ["self_attn_layer_norm"]}),
    "embedding": ("llama", peft.LoraConfig, {"target_modules": ["embed_tokens", "lm_head"]}),
}


def adapted(kind: str, folder):
    """A model with an adapter beside its weights in a folder; returned as PEFT merges it."""
    name, config, fields = KINDS[kind]
    make_model(name).save_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder)
    rank = {"r": 4} if "r" in config.__dataclass_fields__ else {}
    model = peft.get_peft_model(base, config(**rank, **fields))
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return model.merge_and_unload()


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_merged_as_by_peft(kind, tmp_path, blocks):
    theirs, name = adapted(kind, tmp_path / "tuned"), f"{tmp_path}/tuned+adapter"
    ours = outliers.load_model(name)
    for own, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, theirs.get_parameter(own), rtol=1e-6, atol=1e-7)
    expected, plain = perplexity(theirs, blocks), perplexity(outliers.load_model(f"{tmp_path}/tuned"), blocks)
    assert perplexity(ours, blocks) == pytest.approx(expected, rel=1e-5)
    assert perplexity(stream_model(name), blocks) == pytest.approx(expected, rel=1e-5)
    assert abs(plain / expected - 1) > 1e-4


def pocket_with_adapter(folder) -> str:
    """A pocket model, with its tokenizer, and an adapter beside it."""
    shutil.copytree(POCKET / "gpt2-0.1m", folder)
    model = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder), peft.LoraConfig(target_modules=["c_fc"], fan_in_fan_out=True)
    )
    for own, parameter in model.named_parameters():
        parameter.data += ("lora_" in own) * 0.1
    model.save_pretrained(folder)
    return str(folder)


def test_an_adapter_is_left_out_and_said_unless_it_is_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # long paths are cut
    folder = pocket_with_adapter("tuned")
    arguments = ["--block", "32", "--blocks", "1", "--metric", "perplexity"]
    _, _, err = call(monkeypatch, capsys, folder, *arguments, "--out", tmp_path / "a", command="measure")
    assert f"'{folder}' holds a LORA adapter of '{folder}' beside its weights, which is left out" in err
    code, _, err = call(
        monkeypatch, capsys, folder, *arguments, "--adapter", "--out", tmp_path / "b", command="measure"
    )
    assert (code, err) == (0, "")
    (without,), (row,) = records_in(tmp_path / "a"), records_in(tmp_path / "b")
    assert row["adapter"] == f"LORA adapter of '{folder}'"
    assert row["model"] == f"{folder}+adapter"
    assert "adapter" not in without
    assert row["weights_hash"] != without["weights_hash"]
    assert row["value"] != without["value"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": "all"}, "has bias 'all', which is not read; merge it by PEFT"),
        ({"init_lora_weights": "pissa"}, "began as 'pissa'"),
        ({"peft_type": None}, "is no configuration of an adapter"),
        ({"r": 2}, "cannot load the adapter of"),
        ({"target_modules": ["c_proj"]}, "asks for none such; download it again"),
        ({"peft_type": "UNHEARD_OF"}, "cannot load the adapter of"),
    ],
)
def test_adapters_that_cannot_be_merged_are_one_line(change, message, tmp_path):
    folder = pocket_with_adapter(tmp_path / "tuned")
    file = tmp_path / "tuned" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=message):
        outliers.load_model(f"{folder}+adapter")


def test_adapters_that_are_missing_or_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # long paths are cut
    folder = pocket_with_adapter("tuned")
    with pytest.raises(UserError, match=r"'pocket/gpt2-0.1m' has no adapter_config.json; leave --adapter out"):
        outliers.load_model("pocket/gpt2-0.1m+adapter")
    (tmp_path / "tuned" / "model.safetensors").unlink()
    alone = f"'{folder}' holds no model but a LORA adapter of '{folder}'; copy it beside the weights"
    with pytest.raises(UserError, match=alone):
        outliers.load_model(folder)
    (tmp_path / "tuned" / "config.json").unlink()
    for function in (outliers.load_model, stream_model):
        with pytest.raises(UserError, match=alone):
            function(folder)
    capsys.readouterr()
    assert alone in refused(monkeypatch, capsys, folder, command="trace")
