"""The recipe of the pocket family, and the kept statistics of its training."""

import numpy as np
import pandas as pd
import pytest
from transformers import AutoModelForCausalLM

from outliers.models.load import load_model
from outliers.models.names import POCKET, pocket_models
from outliers.models.pocket.ladder import CONTEXT, LADDER, STEPS
from outliers.training.corpus import blocks_in_order, wikitext_articles
from outliers.training.loop import learning_rate
from outliers.training.start import build_config


@pytest.mark.parametrize("name", pocket_models())
def test_shipped_models_have_the_shape_of_their_recipe(name):
    recipe = AutoModelForCausalLM.from_config(build_config(LADDER[name.removeprefix("pocket/")]))
    shipped = load_model(name)
    assert {n: p.shape for n, p in shipped.named_parameters()} == {n: p.shape for n, p in recipe.named_parameters()}


def test_learning_rate_warms_up_and_ends_at_zero():
    rates = [learning_rate(step, 3e-3, STEPS) for step in range(STEPS + 1)]
    assert rates[0] == pytest.approx(3e-5)
    assert max(rates) == pytest.approx(3e-3, rel=0.01)
    assert rates.index(max(rates)) in (98, 99, 100)
    assert rates[-1] == pytest.approx(0, abs=1e-9)


def test_batches_are_the_text_in_another_order():
    ids = np.arange(40 * CONTEXT, dtype=np.uint16)
    first, again, other = (blocks_in_order(ids, 25, 4, seed).astype(int) for seed in (0, 0, 1))
    assert (first == again).all() and not (first == other).all(), "the order is seeded"
    assert first.shape == (25 * 4, CONTEXT)
    assert (np.diff(first) == 1).all(), "each block is a piece of the text"
    assert len(set(first[: 9 * 4, 0])) == 9 * 4, "no block twice in an epoch"
    assert (blocks_in_order(ids, 10, 4) == first[: 10 * 4]).all(), "a longer training begins as a shorter one"


def test_wikitext_is_detokenised():
    body = 'He said " yes " ( twice ) , for 1 @,@ 000 @.@ 5 well @-@ known reasons ; it \'s done . ' * 4
    text = f" = First = \n \n {body}\n \n = = Part = = \n \n {body}\n = Second = \n {body}\n"
    articles = wikitext_articles(text)
    assert [article.split("\n")[0] for article in articles] == ["= First =", "= Second ="]
    assert 'He said "yes" (twice), for 1,000.5 well-known reasons; it\'s done.' in articles[0]
    assert "= = Part = =" in articles[0]


def test_emergence_along_the_training_is_kept():
    table = pd.read_csv(POCKET / "emergence.csv")
    assert set(table["model"]) == set(pocket_models())
    for _, points in table.groupby("model"):
        assert len(points) >= 10
        assert points["step"].is_monotonic_increasing
        assert points["perplexity"].iloc[-1] < 0.2 * points["perplexity"].iloc[0]
    last = table.groupby("model").last()
    for name in pocket_models():
        assert last.loc[name, "parameters"] == load_model(name).num_parameters()


def test_outlier_features_grow_with_size_and_with_training():
    """As in the paper: none in the smallest models, and in the larger ones they appear during training."""
    table = pd.read_csv(POCKET / "emergence.csv")
    last = table.groupby("model").last()
    assert last.loc["pocket/gpt2-0.1m", "features_hit"] == 0
    middle = table[table["model"] == "pocket/gpt2-1.7m"].set_index("step")
    assert middle["features_hit"].iloc[0] == 0
    assert middle["features_hit"].iloc[-1] > 0
    assert middle["max"].iloc[-1] > 6 > middle["max"].iloc[0]
