"""Rotations learned on calibration text: orthogonal, function-preserving, refused where they cannot be."""

import pickle

import pytest
import torch
from outlier_kernels.formats import Quantizer
from outlier_kernels.reference import quantize as codes_of
from safetensors import safe_open
from transformers import AutoConfig

from outliers import Quantized, Sweep, UserError, calibrate, load_text, perplexity, quantize, sweep
from outliers.models.anatomy import projections
from outliers.models.load import load_model, load_tokenizer
from outliers.models.weight_files import INT8
from outliers.quantization.remedies.hadamard import random_rotation, rotate
from outliers.quantization.remedies.learning import cayley_step, check_learned, straight_through
from outliers.quantization.schemes import get_scheme
from outliers.quantization.store import save_quantized
from tests.conftest import in_turn
from tests.small_models import broken_weights, make_model

KINDS = ["gpt2", "llama"]  # transposed weights; fewer heads of keys than of queries


def under(model, name: str, blocks: torch.Tensor):
    """A model under a scheme that was calibrated on some blocks."""
    return quantize(model, name, calibration=calibrate(model, blocks, [name]))


def orthogonal(size: int) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(size, size, dtype=torch.float64))[0]


# A step


def test_a_step_is_the_cayley_transform_down_the_gradient():
    """Li et al., 2020: the curve is orthogonal, and its slope at 0 that which autograd finds, the steepest there is."""
    torch.manual_seed(0)
    matrix, x, y = orthogonal(7), torch.randn(9, 7, dtype=torch.float64), torch.randn(9, 7, dtype=torch.float64)

    def loss(at: torch.Tensor) -> torch.Tensor:
        return ((x @ at - y) ** 3).sum()

    at = matrix.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(at), at)
    for angle in (1e-3, 0.5, 3.0):
        moved = cayley_step(matrix, gradient, angle)
        assert torch.allclose(moved @ moved.T, torch.eye(7, dtype=torch.float64), rtol=0, atol=1e-13)
        skew = gradient @ matrix.T - matrix @ gradient.T
        skew *= angle / skew.norm()
        identity = torch.eye(7, dtype=torch.float64)
        assert torch.allclose(moved, (identity + skew / 2).inverse() @ (identity - skew / 2) @ matrix)
    slope = (loss(cayley_step(matrix, gradient, 1e-5)) - loss(cayley_step(matrix, gradient, -1e-5))) / 2e-5
    on_manifold = gradient @ matrix.T
    assert slope == pytest.approx(-float((on_manifold - on_manifold.T).norm() / 2), rel=1e-6)


def test_a_step_without_a_gradient_stays():
    matrix = orthogonal(5)
    assert torch.allclose(cayley_step(matrix, torch.zeros_like(matrix), 0.5), matrix)


def test_rounding_is_straight_through():
    torch.manual_seed(0)
    x, quantizer = torch.randn(3, 8, requires_grad=True), Quantizer("int4", "row")
    out = straight_through(x, quantizer, None)
    assert torch.allclose(out, codes_of(x.detach(), quantizer).dequantize())
    (gradient,) = torch.autograd.grad((out * torch.arange(8.0)).sum(), x)
    assert torch.equal(gradient, torch.arange(8.0).expand(3, 8))
    kept = torch.arange(8) == 2
    out = straight_through(x, quantizer, kept).detach()
    assert torch.equal(out[:, 2], x[:, 2])
    assert torch.allclose(out[:, ~kept], codes_of(x.detach().masked_fill(kept, 0), quantizer).dequantize()[:, ~kept])


# Learning


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_learned_is_orthogonal_and_shared(kind, blocks):
    model = make_model(kind)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    changed = under(model, "w4a4+rotation=3", blocks)
    made = {(one.layer, one.role): one.module.operand.fitted[0] for one in projections(changed)}
    first = made[0, "attn_in"]
    heads = model.config.num_attention_heads
    assert first.shape == 2 * (model.config.hidden_size,)
    assert all(torch.equal(first, made[layer, role]) for layer in (0, 1) for role in ("attn_in", "ffn_in"))
    assert made[0, "attn_out"].shape == 2 * (model.config.hidden_size // heads,)
    assert not torch.equal(made[0, "attn_out"], made[1, "attn_out"])
    for one in (first, made[0, "attn_out"], made[1, "attn_out"]):
        identity = torch.eye(len(one))
        assert (one @ one.T - identity).abs().max() < 1e-5
        assert (one - rotate(identity, random_rotation(identity, 0))).abs().max() > 1e-3, "it is turned"
    assert made[0, "ffn_out"].ndim == 1, "a Hadamard matrix"
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(one.requires_grad for one in model.parameters())


@in_turn("kind remedies", KINDS, ["rotation=2", "smoothing+rotation=2", "reorder+smoothing@ffn_in+rotation=2"])
def test_the_function_is_kept(as_they_are, kind, remedies, blocks):
    model = make_model(kind)
    exact, got = model(blocks).logits, under(model, f"same+{remedies}", blocks)(blocks).logits
    assert (got - exact).norm() <= 1e-5 * exact.norm()


@in_turn(
    "kind name", KINDS, ["w4a4+{}", "w4a8-g8+smoothing+{}+clip=0.99", "llm.int8+tokens=3+{}", "w4+{}", "w4a4+{}@ffn_in"]
)
def test_what_learns_computes_what_the_scheme_does(kind, name, blocks):
    """The loss of the first step is that of the model under the scheme, whose rotations nothing was learned of."""
    model, losses = make_model(kind), []
    unlearned = under(model, name.format("rotation=0"), blocks[:1])
    expected, exact = (perplexity(one, blocks[:1]) for one in (unlearned, model))
    model.register_forward_hook(lambda _module, _inputs, output: losses.append(output.get("loss")))
    calibrate(model, blocks[:1], [name.format("rotation=1")])
    first = next(loss for loss in losses if loss is not None)
    assert abs(float(first.detach().exp()) - expected) < 0.1 * abs(expected - exact), "but for codes that flip"


def test_the_loss_on_calibration_text_falls():
    model, tokenizer = load_model("pocket/gpt2-1.7m"), load_tokenizer("pocket/gpt2-1.7m")
    blocks = load_text("sample", tokenizer, 64, 2)
    before, after = (perplexity(under(model, f"w4a4+rotation={steps}", blocks), blocks) for steps in (0, 24))
    assert after < 0.95 * before


def test_it_is_learned_once_and_the_same_again(blocks):
    """For all schemes that differ in what comes after; an edit of the model would be seen, were it learned again."""
    model = make_model("llama")
    found = calibrate(model, blocks, ["w4a4+rotation=2", "w4a4+rotation=2+attention"])
    assert len(found.learned) == 1
    first = quantize(model, "w4a4+rotation=2", calibration=found)
    expected = first(blocks).logits
    assert torch.equal(under(make_model("llama"), "w4a4+rotation=2", blocks)(blocks).logits, expected)
    kept = pickle.loads(pickle.dumps(found))
    assert torch.equal(quantize(model, "w4a4+rotation=2", calibration=kept)(blocks).logits, expected)
    assert quantize(first, "w4a4+rotation=2", calibration=found).model.layers[0].mlp.up_proj.made is not None


def test_where_gptq_follows_it_is_learned_with_exact_weights(blocks):
    """Unless nothing else is quantized that it could be learned under."""
    names = "w4+rotation=2+gptq", "w4a4+rotation=2", "w4a4+rotation=2+gptq"
    alone, rounded_weights, exact_weights = calibrate(make_model("llama"), blocks, names).learned.items()
    assert alone[0].weights is not None
    assert rounded_weights[0].weights is not None and exact_weights[0].weights is None
    of_one, of_other = (kept.magnitudes[0, "attn_in"].learned for _, kept in (rounded_weights, exact_weights))
    assert not torch.equal(of_one, of_other)


def test_it_starts_from_the_random_hadamard_matrix(blocks):
    model = make_model("llama")
    roles = "attn_in/ffn_in/ffn_out"
    started = under(model, f"w4a8+rotation=0@{roles}", blocks)(blocks).logits
    expected = quantize(model, f"w4a8+hadamard@{roles}")(blocks).logits
    assert (started - expected).norm() < 0.1 * expected.norm()


def test_an_int8_model_keeps_a_matrix_once(tmp_path, blocks):
    model, name = make_model("llama"), "w4a8+smoothing+rotation=2"
    small = quantize(model, name, keep="int8", calibration=calibrate(model, blocks, [name]))
    save_quantized(small, tmp_path)
    with safe_open(tmp_path / INT8, "pt") as file:
        matrices = [key for key in sorted(file.keys()) if key.endswith("fitted_2") and file.get_tensor(key).ndim == 2]
    assert len(matrices) == 1 + len(model.model.layers), "R1 once, and an R2 a layer"


# Refusals


def test_where_nothing_can_be_learned(blocks):
    model = make_model("llama")
    with pytest.raises(UserError, match=r"'w4a4.rotation' needs the magnitudes .* expected a calibration"):
        quantize(model, "w4a4+rotation")
    with pytest.raises(UserError, match="needs the learned transforms of the inputs, which"):
        quantize(model, "w4a4+rotation", calibration=calibrate(model, blocks, ["w4a4+rotation=2"]))
    assert Quantized(get_scheme("w4a4+rotation")).in_memory
    assert not Quantized(get_scheme("w4a4+hadamard")).in_memory
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    with pytest.raises(UserError, match=r"the loss under 'w4a4.rotation=1' is nan on calibration text; expected"):
        calibrate(model, blocks, ["w4a4+rotation=1"])


def test_refused_at_the_door(tmp_path):
    fields = {"block": 32, "blocks": 2, "schemes": ["w4a4+rotation"]}
    with pytest.raises(UserError, match=r"w4a4.rotation in a streamed model; expected one in memory"):
        sweep(Sweep(models=[broken_weights(tmp_path / "model")], stream=True, **fields), tmp_path / "out")
    with pytest.raises(UserError, match=r"'w4a4.rotation' of 't5'; expected a causal language model, or hadamard"):
        check_learned(AutoConfig.for_model("t5"), get_scheme("w4a4+rotation"))
