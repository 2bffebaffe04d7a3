"""Outlier features against a second computation, and on a trained model."""

import pytest
import torch

from outliers.models.anatomy import projections
from outliers.models.load import load_model, load_tokenizer
from outliers.text.blocks import load_text
from outliers.tracing.features import outlier_features
from tests.conftest import C4, STORIES, make_model, needs_shared


def test_definition(blocks):
    """The fractions, counted once more in plain loops over the norms' outputs of GPT-2."""
    model, alpha = make_model("gpt2"), 1.5
    states = {}
    for layer, block in enumerate(model.transformer.h):
        for name in ("ln_1", "ln_2"):
            found = states.setdefault((layer, name), [])
            getattr(block, name).register_forward_hook(lambda *args, found=found: found.append(args[2]))
    table = outlier_features(model, blocks, alpha=alpha).set_index("feature")
    for feature in (0, 7, 31):
        layers = positions = pairs = 0
        for sequence in range(3):
            hit = {k: (x[sequence][0, :, feature].abs() >= alpha).tolist() for k, x in states.items()}
            layers += sum(any(hit[layer, "ln_1"] + hit[layer, "ln_2"]) for layer in range(2)) / 2
            positions += sum(any(h[t] for h in hit.values()) for t in range(24)) / 24
            pairs += sum(sum(h) for h in hit.values()) / (4 * 24)
        row = table.loc[feature]
        assert row["layers"] == pytest.approx(layers / 3)
        assert row["positions"] == pytest.approx(positions / 3)
        assert row["positions_mean"] == pytest.approx(pairs / 3)
        assert row["outlier"] == (layers / 3 >= 0.25 and positions / 3 >= 0.06)
    largest = max(x.abs().max().item() for found in states.values() for x in found)
    assert table["max"].max() == pytest.approx(largest)


def test_every_architecture_is_traced_and_left_alone(model, blocks):
    before = model(blocks).logits
    table = outlier_features(model, blocks, alpha=0.5)
    assert sorted(table["feature"]) == list(range(32))
    assert not any(p.module._forward_pre_hooks for p in projections(model))
    assert torch.equal(model(blocks).logits, before)


def test_hooks_come_off_after_an_error(blocks):
    model = make_model("gpt2")
    with pytest.raises(IndexError):
        outlier_features(model, blocks + 100)
    assert not any(p.module._forward_pre_hooks for p in projections(model))


@needs_shared
def test_trained_model_on_c4():
    blocks = load_text(str(C4), load_tokenizer(str(STORIES)), 256, 32)
    table = outlier_features(load_model(str(STORIES)), blocks)
    found = table[table["outlier"]].set_index("feature")
    assert set(found.index) == {18, 20}
    assert found.loc[18, ["layers", "positions"]].tolist() == pytest.approx([0.63, 0.114], abs=0.01)
    assert found.loc[20, ["layers", "positions"]].tolist() == pytest.approx([0.69, 0.172], abs=0.01)
