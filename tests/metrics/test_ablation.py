"""Ablations against second computations, and what they must leave alone."""

import pytest
import torch
from scipy.stats import binom

from outliers import perplexity, plant, trace
from outliers.commands.ablate import ablate
from outliers.metrics.ablations import interval_of_mean
from outliers.models.anatomy import decoder_layers, layers_of, projections
from outliers.variants.ablated import METHODS, Intervention
from tests.small_models import inputs_of, make_model, padded, top1_softmax
from tests.tracing.test_tracing import hooks


def without_weights(model, features, layers, roles=("attn_in",)):
    """A second way to zero features at the input of projections: zero the weights that read them."""
    with torch.no_grad():
        for projection in projections(model):
            if projection.role in roles and projection.layer in layers:
                weight = projection.module.weight
                weight = weight if type(projection.module).__name__ == "Conv1D" else weight.T
                weight[list(features)] = 0
        for layer in layers if "ffn_in" in roles else ():
            for name in layers_of(model)[layer].anatomy.router:
                decoder_layers(model)[layer].get_submodule(name).weight[:, list(features)] = 0
    return model


def attentions(model, blocks):
    """Probabilities as transformers returns them, (layers, sequences, heads, T, T)."""
    model.config._attn_implementation = "eager"
    with torch.no_grad():
        return torch.stack(model(blocks, output_attentions=True, use_cache=False).attentions)


def test_top1_of_every_architecture(case, blocks):
    """Layer by layer: zeroed weights in one layer give its probabilities, from the unchanged input."""
    model, features = make_model(case), (3, 17)
    before = model(blocks).logits
    as_it_is, without = top1_softmax(model, blocks, [Intervention(()), Intervention(features)])
    assert hooks(model) == 0
    assert torch.equal(model(blocks).logits, before)
    want = attentions(make_model(case), blocks)
    assert as_it_is == pytest.approx(want.amax(-1).double().mean().item(), rel=1e-5)
    layers = len(decoder_layers(model))
    changed = [attentions(without_weights(make_model(case), features, [n]), blocks)[n] for n in range(layers)]
    assert without == pytest.approx(torch.stack(changed).amax(-1).double().mean().item(), rel=1e-5)
    assert abs(without - as_it_is) > 1e-4


@pytest.mark.parametrize("where", [("attn_in",), ("attn_in", "ffn_in")])
def test_perplexity_of_every_architecture(case, blocks, where):
    table = ablate(make_model(case), blocks, [3, 17], where=where).set_index(["subject", "draw"])["perplexity"]
    assert table["none"].item() == pytest.approx(perplexity(make_model(case), blocks), rel=1e-6)
    layers = range(len(decoder_layers(make_model(case))))
    zeroed = without_weights(make_model(case), (3, 17), layers, where)
    assert table["outliers"].item() == pytest.approx(perplexity(zeroed, blocks), rel=1e-5)
    assert table["outliers"].item() != pytest.approx(table["none"].item(), rel=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_methods(method):
    """What q, k and v of each layer see: the method's values in the features, and all else as it was."""
    model, blocks = make_model("llama"), torch.randperm(100)[None, :24]  # no two tokens alike
    first = [p for p in projections(model) if p.role == "attn_in" and p.layer == 0]

    def inputs() -> list[torch.Tensor]:
        """What q, k and v are called with."""
        with torch.no_grad(), inputs_of({one.path: one.module for one in first}) as seen:
            model(blocks)
        return [x[0].clone() for (x,) in seen.values()]

    before, others = inputs()[0], [n for n in range(32) if n not in (2, 9)]
    with Intervention((2, 9), method, seed=1, means={(0, "attn_in"): before.mean(0)}).on(first):
        q, k, v = inputs()
    assert torch.equal(q, k) and torch.equal(q, v)
    assert torch.equal(q[:, others], before[:, others])
    if method == "zero":
        assert (q[:, [2, 9]] == 0).all()
    if method == "mean":
        assert torch.allclose(q[:, [2, 9]], before[:, [2, 9]].mean(0).expand(24, 2), rtol=1e-5)
    if method == "shuffle":
        assert torch.equal(q[:, [2, 9]].sort(0).values, before[:, [2, 9]].sort(0).values)
        assert not torch.equal(q[:, 2], before[:, 2])
        came_from = [(q[:, n, None] == before[:, n]).int().argmax(1).tolist() for n in (2, 9)]
        assert all(sorted(order) == list(range(24)) for order in came_from)
        assert came_from[0] != came_from[1], "a permutation for each feature"


def test_top1_counts_each_query_alike(blocks):
    """Of sequences of several lengths: every one of their queries, in one mean."""
    model, (sequences, *_) = make_model("llama"), padded(blocks, "right")
    (found,) = top1_softmax(model, sequences)
    queries = [attentions(make_model("llama"), one[None]).amax(-1).double().flatten() for one in sequences]
    assert found == pytest.approx(torch.cat(queries).mean().item(), rel=1e-6)
    alone = [top1_softmax(model, one[None])[0] for one in sequences]
    assert abs(found - sum(alone) / 3) > 1e-3, "the mean of those of each sequence is another number"


def test_means_are_over_all_tokens(blocks):
    """Of sequences of several lengths: a feature that is the same everywhere costs nothing where it is its mean."""
    model, (sequences, *_) = make_model("gpt2"), padded(blocks, "right")
    with torch.no_grad():
        for layer in model.transformer.h:
            layer.ln_1.weight[4], layer.ln_1.bias[4] = 0, 20
    table = ablate(model, sequences, [4], methods=["mean"]).set_index("subject")
    assert table.loc["outliers", "damage"] == pytest.approx(0, abs=1e-6)


def test_controls_are_no_outliers(blocks):
    """Also where a user names only some of them."""
    model = plant(make_model("gpt2"), range(4, 20), 32.0)
    outliers = set(trace(model, blocks, attention=False).outlier_features()["feature"])
    assert {4, 5, 19} <= outliers
    table = ablate(model, blocks, [4])
    drawn = {feature for features in table.loc[table["subject"] == "control", "features"] for feature in features}
    assert len(drawn) > 3 and not drawn & outliers


def test_table_and_draws(blocks):
    model = make_model("gpt2")
    table = ablate(model, blocks, [3, 17], methods=["zero", "shuffle"], seed=5)
    assert table.equals(ablate(model, blocks, [17, 3], methods=["zero", "shuffle"], seed=5))
    assert len(table) == 1 + 2 * (1 + 10 + 2)
    assert table["subject"].value_counts().to_dict() == {"none": 1, "outliers": 2, "control": 20, "single": 4}
    draws = table[table["subject"] == "control"]
    by_method = [group["features"].tolist() for _, group in draws.groupby("method")]
    assert by_method[0] == by_method[1], "all methods are compared on the same draws"
    assert len(set(by_method[0])) > 5
    for features in by_method[0]:
        assert len(set(features)) == 2
        assert not set(features) & {3, 17}
    other = ablate(model, blocks, [3, 17], seed=6)
    assert other[other["subject"] == "control"]["features"].tolist() != by_method[0]


def test_interval_of_a_mean_that_is_known():
    """Means of resamples of zeros and ones are binomial, and so are their percentiles."""
    for ones, size in ((8, 16), (2, 16)):
        values = [1] * ones + [0] * (size - ones)
        expected = binom.ppf([0.025, 0.975], size, ones / size) / size
        assert interval_of_mean(values) == pytest.approx(expected)
