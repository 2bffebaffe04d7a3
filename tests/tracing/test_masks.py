"""Masks of outlier features and tokens: exact where outliers are planted, and read back by others' readers."""

import json

import pytest
import safetensors.torch
import torch

import outliers
from outliers.commands.trace import Tracing
from outliers.criterion import in_transformerlens
from tests.small_models import inputs_of, make_model, padded, trace_model

PLANTED = [3, 17]


@pytest.fixture
def planted():
    """A small Llama with two planted outlier features."""
    return outliers.plant(make_model("llama"), features=PLANTED, factor=6.0)


def inputs(model, blocks) -> dict[str, torch.Tensor]:
    """What projections and layers read, (blocks, T, features) by names of TransformerLens, by plain hooks of torch."""
    modules, layers = {}, [*model.model.layers, model.model.norm]
    for number, layer in enumerate(model.model.layers):
        of_layer = {"attn_in": layer.self_attn.q_proj, "ffn_in": layer.mlp.up_proj, "residual": layers[number + 1]}
        modules |= {in_transformerlens(number, role): module for role, module in of_layer.items()}
    with torch.no_grad(), inputs_of(modules) as seen:
        for block in blocks:
            model(block[None], use_cache=False)
    return {name: torch.cat(states) for name, states in seen.items()}


def test_planted_features_and_their_tokens_are_marked(planted, blocks):
    trace = outliers.trace(planted, blocks)
    assert set(trace.outlier_features()["feature"]) == set(PLANTED)
    masks = outliers.masks(planted, blocks, trace)
    for name, x in inputs(planted, blocks).items():
        if "resid" in name:
            continue
        large = (x.abs() >= 6)[..., PLANTED]
        features = torch.zeros(32, dtype=torch.bool)
        features[PLANTED] = large.any((0, 1))
        assert torch.equal(masks.features[name], features)
        assert torch.equal(masks.tokens[name], large.any(-1))
    of_inputs = [mask for name, mask in masks.tokens.items() if "resid" not in name]
    assert len(of_inputs) == 4
    assert all(0 < mask.sum() < mask.numel() for mask in of_inputs)  # what is marked is a part


def test_massive_activations_of_the_residual_stream_are_marked(blocks):
    model = make_model("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[7, 5] = 5000.0
        model.model.embed_tokens.weight[7, 1] = 120.0  # above 100, and not 1,000 times the median
    blocks[:, 4], blocks[1, 9] = 7, 7
    expected = blocks == 7
    masks = outliers.masks(model, blocks)
    x = inputs(model, blocks)["blocks.1.hook_resid_post"].abs()
    assert all((of_block[4, 5] >= 1000 * of_block.median()) for of_block in x)
    for layer in (0, 1):
        name = f"blocks.{layer}.hook_resid_post"
        assert torch.equal(masks.tokens[name], expected)
        assert masks.features[name].nonzero().flatten().tolist() == [5]


def test_files_are_read_without_this_project(planted, blocks, tmp_path):
    masks = outliers.masks(planted, blocks)
    masks.save(tmp_path / "mine")
    tensors = safetensors.torch.load_file(tmp_path / "mine.safetensors")
    written = json.loads((tmp_path / "mine.json").read_text())
    assert tensors.keys() == {f"{name}.{kind}" for name in masks.tokens for kind in ("features", "tokens")}
    assert written["hooks"].keys() == masks.tokens.keys()
    for name, of_hook in written["hooks"].items():
        features, tokens = tensors[f"{name}.features"], tensors[f"{name}.tokens"]
        assert (features.dtype, features.shape, tokens.dtype) == (torch.bool, (32,), torch.bool)
        assert name == in_transformerlens(of_hook["layer"], of_hook["role"])
        assert features.nonzero().flatten().tolist() == of_hook["features"]
        assert [row.nonzero().flatten().tolist() for row in tokens] == of_hook["tokens"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_never_marked(planted, blocks, side):
    sequences, ids, mask = padded(blocks, side)
    found, expected = outliers.masks(planted, ids, attention_mask=mask), outliers.masks(planted, sequences)
    assert all(torch.equal(found.tokens[name], tokens) for name, tokens in expected.tokens.items())
    assert not any(
        tokens[row, len(one) :].any() for tokens in found.tokens.values() for row, one in enumerate(sequences)
    )


def test_a_run_writes_them_and_says_what_they_are_of(tmp_path):
    spec = Tracing(model="pocket/gpt2-1.7m", blocks=2, block=128, alpha=5.0, masks=True)
    trace, rows = trace_model(spec, tmp_path)
    written = json.loads((tmp_path / "masks.json").read_text())
    assert (written["labels"]["model"], written["labels"]["text"]) == ("pocket/gpt2-1.7m", "sample")
    assert {name: written["labels"][name] for name in ("tokens_hash", "weights_hash")} == {
        name: rows[0][name] for name in ("tokens_hash", "weights_hash")
    }
    criterion = {"alpha": 5.0, "layers": 0.25, "positions": 0.06, "massive": 100.0, "massive_ratio": 1000.0}
    assert written["labels"]["criterion"] == criterion
    found = {feature for of_hook in written["hooks"].values() for feature in of_hook["features"]}
    assert found == set(trace.outlier_features()["feature"]) != set()
