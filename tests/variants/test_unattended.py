"""Positions to which no later one attends."""

from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache

from outliers import load_model, perplexities, perplexity
from outliers.config.experiment import Experiment
from outliers.models.hooks import attention_hooks
from outliers.models.stream import AS_IT_IS, stream_model
from outliers.subjects.causal import ModelWithText
from outliers.variants.cached import Prefixed
from outliers.variants.unattended import Unattended
from tests.conftest import FIVE, slow_but
from tests.small_models import make_model


@pytest.mark.parametrize("case", slow_but([*FIVE, "bloom", "gpt_neo", "mpt", "gemma2"]))
def test_no_later_position_attends(case, blocks, tmp_path):
    """By the probabilities of plain products; fused kernels and a streamed model compute the same."""
    model, seen, some = make_model(case), [], Unattended((0, 3))
    with some.on(model), attention_hooks(model, lambda _layer, found, *_more: seen.append(found)):
        plain = perplexity(model, blocks)
    assert len(seen) == model.config.num_hidden_layers * len(blocks)
    for found in seen:
        assert found[..., 1:, 0].max() == found[..., 4:, 3].max() == 0
        assert found[..., 0, 0].min() > 0
    without, with_all = perplexities(model, blocks, [some, AS_IT_IS])
    assert without == pytest.approx(plain, rel=1e-5) != pytest.approx(with_all, rel=1e-5)
    model.save_pretrained(tmp_path)
    assert perplexities(stream_model(str(tmp_path)), blocks, [some]) == [without]


@pytest.mark.parametrize("case", slow_but(["gpt_neo", "gemma2", "mpt", "llama"], ["gpt_neo", "gemma2"]))
@pytest.mark.parametrize("before", [(), (5, 7)])
def test_no_position_attends_where_earlier_ones_are_cached(case, before, blocks):
    model, ids = make_model(case), blocks[:1]
    with torch.no_grad(), Prefixed(before).on(model) if before else nullcontext(), Unattended((0, 3)).on(model):
        cache = DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache).logits for part in ids.tensor_split([5, 6], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits)


def test_a_position_behind_the_text_changes_nothing(blocks):
    without, with_all = perplexities(make_model("gpt2"), blocks, [Unattended((500,)), AS_IT_IS])
    assert without == pytest.approx(with_all, rel=1e-6)


@pytest.mark.parametrize("name", ["pocket/bert-1.4m", "pocket/t5-1.9m"])
def test_no_position_of_an_encoder_attends(name):
    """Where all positions see each other, all others; and the mask stays one that lets them see the rest."""
    model = load_model(name)
    blocks = ModelWithText(name, None, Experiment(name="text", block=32, blocks=2)).blocks
    seen, some = [], Unattended((3,))
    with some.on(model), attention_hooks(model, lambda _layer, found, *_more: seen.append(found)):
        perplexity(model, blocks)
    others = torch.arange(32) != 3
    encoders = [found for found in seen if found.shape[-2:] == (32, 32) and found[..., 0, 1].max() > 0]
    assert len(encoders) == model.config.num_hidden_layers * len(blocks)
    for found in encoders:
        assert found[..., others, 3].max() == 0 < found[..., 3, 3].max()
        assert found[..., 0, 4:].max() > 0
