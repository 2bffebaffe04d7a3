"""Importance matrices: read back by gguf, against sums that plain hooks of torch add up."""

import re

import gguf
import numpy as np
import pytest
import torch

import outliers
from outliers.commands.trace import Tracing
from outliers.errors import UserError
from outliers.models.anatomy import projections, state_readers
from outliers.models.anatomy.experts import call_by_projection
from tests.conftest import few_kinds
from tests.small_models import inputs_of, make_model, make_tokenizer, trace_model
from tests.typed import refused

NOT_IN_LLAMA_CPP = ("gpt_neo", "opt", "opt-350m", "xglm")


def read(path) -> tuple[dict, dict[str, np.ndarray]]:
    """Fields and tensors of a file as the package gguf reads them."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    return fields, {tensor.name: tensor.data for tensor in reader.tensors}


def weights_of(tensors: dict) -> set[str]:
    """The weights that an imatrix has."""
    return {name.removesuffix(".in_sum2") for name in tensors if name.endswith(".in_sum2")}


def sums(model, blocks) -> dict[str, torch.Tensor]:
    """The sums of squares of what each projection, or router, is called with, float64, by its path."""
    model.set_attn_implementation("eager")  # as a trace attends: another order of sums is 1e-6 away
    with (
        torch.no_grad(),
        inputs_of({one.path: one.module for one in state_readers(model) if one.expert is None}) as seen,
    ):
        for block in blocks:
            model(block[None], use_cache=False)
    return {path: sum(x.flatten(0, -2).double().square().sum(0) for x in xs) for path, xs in seen.items()}


@few_kinds
def test_every_projection_has_the_sum_of_its_squares(case, blocks, tmp_path):
    model = make_model(case)
    trace = outliers.trace(model, blocks)
    if case in NOT_IN_LLAMA_CPP:
        with pytest.raises(UserError, match=r"llama\.cpp has no architecture"):
            trace.save_imatrix(tmp_path / "imatrix.gguf")
        return
    trace.save_imatrix(tmp_path / "imatrix.gguf")
    _, tensors = read(tmp_path / "imatrix.gguf")
    names = {path: name for name, path in _paths(model).items()}
    expected = {names[path]: of_path for path, of_path in sums(model, blocks).items() if path in names}
    assert {name for name in weights_of(tensors) if "_exps" not in name} == expected.keys()
    for name, of_projection in expected.items():
        found = tensors[f"{name}.in_sum2"]
        assert found.dtype == np.float32
        assert np.allclose(found, of_projection[None], rtol=1e-6)
        assert tensors[f"{name}.counts"].tolist() == [[blocks.numel()]]


def _paths(model) -> dict[str, str]:
    """The projections and routers that a file has by transformers' own table, by the names there."""
    from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map

    model_type = {"mistral": "llama", "mixtral": "llama", "gpt_neox": "gptneox"}.get(model.config.model_type)
    names = get_gguf_hf_weights_map(model, TensorProcessor(config=model.config.to_dict()), model_type)
    ours = {one.path for one in state_readers(model)}
    return {name: path.removesuffix(".weight") for name, path in names.items() if path.removesuffix(".weight") in ours}


@pytest.mark.parametrize("floor", [None, 1e-6, 0])
def test_features_that_never_fire_have_the_floor(floor, blocks, tmp_path, caplog):
    """Of zeros alone llama.cpp makes NaN in older versions, and weights of 0 in newer ones."""
    model = make_model("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[[3, 5, 7, 9]] = 0
    trace = outliers.trace(model, blocks)
    trace.save_imatrix(tmp_path / "imatrix.gguf", *[] if floor is None else [floor])
    _, tensors = read(tmp_path / "imatrix.gguf")
    means = tensors["blk.1.ffn_down.weight.in_sum2"][0] / tensors["blk.1.ffn_down.weight.counts"].item()
    least = 1e-12 if floor is None else floor
    assert np.allclose(means[[3, 5, 7, 9]], least, rtol=1e-6, atol=0)
    assert (means > least).sum() == 48 - 4
    assert trace.dead_features().to_records(index=False).tolist() == [(1, "ffn_out", n) for n in (3, 5, 7, 9)]
    assert "4 of 288 inputs of projections never fire on this text" in caplog.text
    assert f"'imatrix.gguf' is {least:g} (ffn_out of layer 1: 3, 5, 7, …)" in caplog.text
    with pytest.raises(UserError, match="floor is -1; expected a positive number, such as 1e-12"):
        trace.save_imatrix(tmp_path / "imatrix.gguf", -1)


@pytest.mark.parametrize("case", ["mixtral", "gpt-oss"])
def test_experts_have_the_sums_over_their_tokens(case, blocks, tmp_path, caplog):
    """In llama.cpp's tensors of all experts of a layer, each with a count of its own."""
    model = make_model(case)
    outliers.trace(model, blocks).save_imatrix(tmp_path / "imatrix.gguf")
    _, tensors = read(tmp_path / "imatrix.gguf")
    experts = {one.path: one.module for one in projections(model) if one.expert is not None}
    call_by_projection(model)
    with torch.no_grad(), inputs_of(experts) as seen:
        for block in blocks:
            model(block[None], use_cache=False)
    for path, xs in seen.items():
        layer, number, name = re.fullmatch(r".*layers\.(\d)\.mlp\.experts\.(\d)\.(.*)_proj", path).groups()
        for kind in ("gate", "up") if name == "gate_up" else ("down",):
            of_file = f"blk.{layer}.ffn_{kind}_exps.weight"
            assert tensors[f"{of_file}.counts"][int(number)].tolist() == [sum(map(len, xs))]
            expected = sum(x.double().square().sum(0) for x in xs)
            assert np.allclose(tensors[f"{of_file}.in_sum2"][int(number)], expected, rtol=1e-5)
    assert not caplog.messages


def test_experts_without_tokens_are_said(tmp_path, caplog):
    outliers.trace(make_model("mixtral"), torch.full((1, 24), 3)).save_imatrix(tmp_path / "imatrix.gguf")
    assert "4 of 8 experts got no token of this text; in 'imatrix.gguf' they have counts of 0" in caplog.text
    _, tensors = read(tmp_path / "imatrix.gguf")
    assert sorted(tensors["blk.0.ffn_down_exps.weight.counts"].flatten().tolist()) == [0, 0, 24, 24]


def test_roles_that_were_not_traced_have_none(blocks, tmp_path):
    outliers.trace(make_model("llama"), blocks, roles=["ffn_out"]).save_imatrix(tmp_path / "imatrix.gguf")
    assert weights_of(read(tmp_path / "imatrix.gguf")[1]) == {"blk.0.ffn_down.weight", "blk.1.ffn_down.weight"}


def test_a_trace_of_an_earlier_version_has_none(blocks, tmp_path):
    trace = outliers.trace(make_model("llama"), blocks)
    trace.modules = {}
    with pytest.raises(UserError, match="of an earlier version"):
        trace.save_imatrix(tmp_path / "imatrix.gguf")


def test_a_run_writes_one(tmp_path):
    spec = {"model": "pocket/gpt2-0.1m", "blocks": 2, "block": 64}
    trace_model(Tracing(**spec), tmp_path)
    assert not (tmp_path / "imatrix.gguf").exists()
    trace_model(Tracing(**spec, imatrix=True), tmp_path)  # the trace is there already
    fields, tensors = read(tmp_path / "imatrix.gguf")
    assert fields == {
        "general.type": "imatrix",
        "imatrix.datasets": ["sample"],
        "imatrix.chunk_count": 2,
        "imatrix.chunk_size": 64,
    }
    assert weights_of(tensors) == {
        f"blk.{layer}.{name}.weight" for layer in (0, 1) for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    }


def test_an_unknown_architecture_is_refused_before_it_is_traced(monkeypatch, capsys, tmp_path):
    make_model("opt").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    capsys.readouterr()  # the progress of saving
    options = ("--block", 32, "--blocks", 2, "--imatrix", "--out", tmp_path / "out")
    said = refused(monkeypatch, capsys, tmp_path / "model", *options, command="trace")
    assert "llama.cpp has no architecture 'opt'" in said
