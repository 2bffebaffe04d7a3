"""Training in int8: each product by its definition, and models that train."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import outliers
from outliers.errors import UserError
from outliers.models.anatomy import projections
from outliers.quantization.products import ProductNumerics, product
from outliers.trainer.layers import FFN, LINEAR, TRAINED, train_int8
from tests.conftest import pairwise
from tests.models.test_experts import made as mixture
from tests.small_models import make_model


def codes(matrix: np.ndarray) -> np.ndarray:
    """What absmax codes of each row stand for, float64."""
    scale = np.abs(matrix).max(-1, keepdims=True) / 127
    scale[scale == 0] = 1
    return np.round(matrix / scale) * scale


def by_definition(left: np.ndarray, right: np.ndarray, outliers: np.ndarray) -> np.ndarray:
    """left · rightᵀ in float64 of what codes stand for, outlier dimensions exactly (equation 8)."""
    rest = codes(np.where(outliers, 0, left)) @ codes(np.where(outliers, 0, right)).T
    return rest + left[:, outliers] @ right[:, outliers].T


def largest(matrix: np.ndarray, share: float) -> np.ndarray:
    """The columns with the largest magnitudes, so many of them."""
    magnitudes = np.abs(matrix).max(0)
    found = np.zeros(len(magnitudes), bool)
    found[np.argsort(-magnitudes, kind="stable")[: math.ceil(share * len(magnitudes))]] = True
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 20), st.integers(1, 40), st.integers(1, 20), st.sampled_from([0.0, 0.02, 0.1, 0.5]), st.integers()
)
def test_each_product_of_a_step_is_its_definition(tokens, features, outputs, share, seed):
    random = np.random.default_rng(abs(seed))
    x, w, g = (random.standard_normal(shape) for shape in ((tokens, features), (outputs, features), (tokens, outputs)))
    left, right = (torch.tensor(one, requires_grad=True) for one in (x, w))
    found = product(left, right, ProductNumerics(share))
    found.backward(torch.tensor(g))
    np.testing.assert_allclose(found.detach(), by_definition(x, w, largest(x, share)), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(left.grad, by_definition(g, w.T, largest(g, share)), rtol=1e-12, atol=1e-12)
    of_w = np.where(largest(x, share), g.T @ x, by_definition(g.T, x.T, np.zeros(tokens, bool)))
    np.testing.assert_allclose(right.grad, of_w, rtol=1e-12, atol=1e-12)


def test_features_from_a_threshold_on():
    random = np.random.default_rng(0)
    x, w, g = (random.standard_normal(shape) for shape in ((8, 12), (6, 12), (8, 6)))
    x[3, 5] = -6
    left, right = (torch.tensor(one, requires_grad=True) for one in (x, w))
    found = product(left, right, ProductNumerics(outlier_threshold=6.0))
    found.backward(torch.tensor(g))
    outliers = np.arange(12) == 5
    none = np.zeros(8, bool)
    np.testing.assert_allclose(found.detach(), by_definition(x, w, outliers), atol=1e-12)
    np.testing.assert_allclose(left.grad, by_definition(g, w.T, none[:6]), atol=1e-12)
    of_w = np.where(outliers, g.T @ x, codes(g.T) @ codes(x.T).T)
    np.testing.assert_allclose(right.grad, of_w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_batches_are_their_matrices(share):
    torch.manual_seed(0)
    left, right = torch.randn(2, 3, 5, 1030, requires_grad=True), torch.randn(2, 3, 7, 1030, requires_grad=True)
    gradient, how = torch.randn(2, 3, 5, 7), ProductNumerics(share)
    found = product(left, right, how)
    found.backward(gradient)
    for place in [(0, 0), (1, 2)]:
        alone = [one.detach()[place].requires_grad_() for one in (left, right)]
        product(*alone, how).backward(gradient[place])
        torch.testing.assert_close(found[place], product(*alone, how), rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(left.grad[place], alone[0].grad, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(right.grad[place], alone[1].grad, rtol=1e-6, atol=1e-5)


def test_gradients_of_the_exact_product():
    torch.manual_seed(0)
    operands = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 4, 5), (2, 3, 5))]
    assert torch.autograd.gradcheck(lambda left, right: product(left, right, ProductNumerics(exact=True)), operands)


def test_gradients_rounded_by_chance_are_right_on_average():
    torch.manual_seed(0)
    gradient, right = torch.randn(4, 6), torch.randn(6, 5)
    left = torch.zeros(4, 5, requires_grad=True)
    of_codes = torch.tensor(codes(right.T.double().numpy()).T)

    def of_left(stochastic: bool) -> torch.Tensor:
        (found,) = torch.autograd.grad(product(left, right, ProductNumerics(stochastic=stochastic)), left, gradient)
        return found.double()

    exact = gradient.double() @ of_codes
    mean = torch.stack([of_left(True) for _ in range(2000)]).mean(0)
    bias, spread = (mean - exact).abs().max(), (of_left(True) - exact).abs().max()
    assert bias < 0.1 * (of_left(False) - exact).abs().max()
    assert 0 < spread < 0.5


@pairwise("case dtype attention", ["gpt2", "opt", "llama"], [torch.float32, torch.bfloat16], [False, True])
def test_a_model_in_int8_is_near_itself(case, dtype, attention, blocks):
    exact = make_model(case).to(dtype)
    model = train_int8(copy.deepcopy(exact), attention=attention, decomposition=0.02)
    losses = []
    for one in (exact, model):
        loss = one(blocks[:2], labels=blocks[:2]).loss
        loss.backward()
        losses.append(loss)
    assert losses[0] != losses[1]
    assert abs(losses[0] - losses[1]) < 0.02 * losses[0]
    want, found = (torch.cat([p.grad.float().flatten() for p in one.parameters()]) for one in (exact, model))
    assert 0 < torch.linalg.norm(found - want) < 0.1 * torch.linalg.norm(want)


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss", "llama4_text"])
def test_gradients_of_experts_are_their_definition(kind, blocks):
    """Of rows that chose an expert, in the parameter of all; the model is called as before when all is undone."""
    model = mixture(kind).double().requires_grad_()
    if kind != "llama4_text":  # which is in no registry
        model.set_experts_implementation("eager")
    before, exact = model.config._experts_implementation, model(blocks).logits
    train_int8(model, linear=False)
    experts = {part.path: part for part in projections(model) if part.expert is not None}
    seen = {}

    def see(module, inputs, output):
        output.register_hook(lambda gradient: seen.update({module: (inputs[0], gradient)}))

    for part in experts.values():
        part.module.register_forward_hook(see)
    model(blocks, labels=blocks).loss.backward()
    assert len(seen) > len(experts) // 2
    for path, part in experts.items():
        owner, number = model.get_submodule(path.rsplit(".", 2)[0]), part.expert
        found = getattr(owner, path.rpartition(".")[2]).grad[number]
        expected = np.zeros_like(part.module.weight.detach())
        if part.module in seen:
            x, gradient = (one.detach().numpy() for one in seen[part.module])
            expected = by_definition(gradient.T, x.T, np.zeros(len(x), bool))
        np.testing.assert_allclose(found.T if owner.is_transposed else found, expected, rtol=1e-9, atol=1e-15)
    train_int8(model, ffn=False, linear=False)
    assert model.config._experts_implementation == before and torch.equal(model(blocks).logits, exact)


@pytest.mark.parametrize(("ffn", "linear"), [(True, False), (False, True), (True, True)])
def test_which_projections_are_in_int8(ffn, linear):
    model = train_int8(make_model("gpt2"), ffn, linear)
    found = {one.role for one in projections(model) if type(one.module) in TRAINED.values()}
    assert found == {*(FFN if ffn else ()), *(LINEAR if linear else ())}


def test_taken_back_and_saved(tmp_path, blocks):
    exact = make_model("llama")
    model = copy.deepcopy(exact)
    parameters, classes = list(map(id, model.parameters())), [type(module) for module in model.modules()]
    assert train_int8(model, attention=True) is model
    assert list(map(id, model.parameters())) == parameters
    assert outliers.perplexity(model, blocks) != outliers.perplexity(exact, blocks)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert outliers.perplexity(again, blocks) == outliers.perplexity(exact, blocks)
    train_int8(model, ffn=False, linear=False)
    assert [type(module) for module in model.modules()] == classes
    assert outliers.perplexity(model, blocks) == outliers.perplexity(exact, blocks)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attention": True}, "attention of 'gptj' cannot be replaced"),
        ({"decomposition": 1.0}, "decomposition is 1.0"),
        ({"decomposition": -0.1}, "decomposition is -0.1"),
        ({"outlier_threshold": 0}, "outlier_threshold is 0"),
        ({"decomposition": 0.1, "outlier_threshold": 6.0}, "one of the two"),
    ],
)
def test_mistakes(given, said):
    with pytest.raises(UserError, match=said):
        train_int8(make_model("gptj"), **given)


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_gradient_checkpointing_gives_the_same_gradients(blocks):
    gradients = []
    for checkpointing in (False, True):
        model = train_int8(make_model("llama"), decomposition=0.02, attention=True).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(blocks[:2], labels=blocks[:2]).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_autocast_multiplies_in_int8_all_the_same(blocks):
    """Products of codes must not be made in bfloat16, which holds no sum of them."""
    losses = []
    for autocast in (False, True):
        model = train_int8(make_model("gpt2"), attention=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(blocks[:2], labels=blocks[:2]).loss
        loss.backward()
        losses.append(loss.item())
    assert losses[0] != losses[1]
    assert abs(losses[1] / losses[0] - 1) < 0.005


@pytest.mark.nightly("kernels/outlier_kernels/", "outliers/quantization/")
def test_compiled(blocks):
    """Also of a share that differs from that of the last model, which must not become one that varies."""

    def loss_of(model):
        return model(blocks[:2], use_cache=False).logits.square().mean()

    def step(model, of):
        model.zero_grad()
        loss = of(model)
        loss.backward()
        return loss, [parameter.grad for parameter in model.parameters()]

    compiled = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    for share in (0.0, 0.02, 0.1):
        model = make_model("gpt2")
        model.transformer.h = model.transformer.h[:1]
        train_int8(model, decomposition=share)
        torch.testing.assert_close(step(model, compiled), step(model, loss_of))
