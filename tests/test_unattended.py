"""Positions to which no later one attends."""

import pytest

from outliers.metrics.perplexity.measure import perplexities, perplexity
from outliers.models.hooks import attention_hooks
from outliers.models.stream import AS_IT_IS, stream_model
from outliers.variants.unattended import Unattended
from tests.conftest import FIVE, make_model, slow_but


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


def test_a_position_behind_the_text_changes_nothing(blocks):
    without, with_all = perplexities(make_model("gpt2"), blocks, [Unattended((500,)), AS_IT_IS])
    assert without == pytest.approx(with_all, rel=1e-6)
