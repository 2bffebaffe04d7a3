"""Models whose modules are not what their configuration says, or serve several layers, against plain hooks of torch."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

import outliers
from outliers.metrics.range import largest_numbers
from outliers.models.stream import AS_IT_IS
from tests.small_models import make_model

UNCHANGED = "fp32"


class NoAttention(nn.Module):
    """Stands for the attention of a layer, and adds nothing."""

    def forward(self, hidden_states, *_, **__):
        return torch.zeros_like(hidden_states), None


class Adapted(nn.Module):
    """A projection and something beside it, as adapters are written by hand."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base, self.beside = base, nn.Linear(base.in_features, base.out_features)

    def forward(self, x):
        return self.base(x) + self.beside(x)


class PassedOn(nn.Module):
    """Stands for a layer, and does nothing."""

    def forward(self, hidden_states, *_, **__):
        return hidden_states


def llama(layers: int = 4):
    """A model of more layers than two."""
    model = make_model("llama")
    two = model.model.layers
    model.model.layers = nn.ModuleList(copy.deepcopy(two[number % 2]) for number in range(layers))
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            layer.self_attn.layer_idx = number
            layer.mlp.up_proj.weight.add_(0.1 * number)
    model.config.num_hidden_layers, model.config.layer_types = layers, None
    return model


def kept(linear: nn.Linear, outputs: int | None = None, inputs: int | None = None) -> None:
    """Take the last outputs or inputs of a projection away, as who prunes by hand does."""
    linear.weight = nn.Parameter(linear.weight[:outputs, :inputs].detach().clone())


def pruned():
    """A model whose layer 2 has two heads and 40 units of four and 48."""
    model = llama()
    layer = model.model.layers[2]
    attention, size = layer.self_attn, layer.self_attn.head_dim
    kept(attention.q_proj, 2 * size)
    kept(attention.k_proj, size)
    kept(attention.v_proj, size)
    kept(attention.o_proj, None, 2 * size)
    kept(layer.mlp.gate_proj, 40)
    kept(layer.mlp.up_proj, 40)
    kept(layer.mlp.down_proj, None, 40)
    return model


def with_shared_layers():
    """A model of four layers, which are two modules."""
    model = llama()
    first, second, *_ = model.model.layers
    model.model.layers = nn.ModuleList([first, second, first, second])
    return model


def perplexity_of(model, blocks: torch.Tensor, change: Callable = lambda model: None) -> float:
    """What torch makes of a model in float64, with hooks that a function puts on it."""
    model = copy.deepcopy(model).double()
    change(model)
    with torch.no_grad():
        logits = model(blocks, use_cache=False).logits[:, :-1]
    return functional.cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten()).exp().item()


def zeroed(feature: int) -> Callable:
    """A hook by which a module reads a feature as zero."""

    def hook(_module, inputs):
        x = inputs[0].clone()
        x[..., feature] = 0
        return (x,)

    return hook


def at_second_use(hook: Callable) -> Callable:
    """A hook that acts on every other call."""
    calls = []

    def of_second(*arguments):
        calls.append(None)
        return hook(*arguments) if len(calls) % 2 == 0 else None

    return of_second


def under(model, blocks: torch.Tensor, *written: str) -> list[float]:
    return outliers.perplexities(model, blocks, [outliers.variant(one) for one in written])


def test_a_head_of_a_pruned_layer_is_removed(blocks):
    def change(model):
        attention = model.model.layers[2].self_attn
        size = attention.head_dim
        for projection, head in ((attention.q_proj, 1), (attention.k_proj, 0), (attention.v_proj, 0)):
            place = slice(head * size, (head + 1) * size)

            def hook(module, inputs, output, place=place):
                altered = output.clone()
                (x,) = zeroed(3)(module, inputs)
                altered[..., place] = functional.linear(x, module.weight)[..., place]
                return altered

            projection.register_forward_hook(hook)

    model = pruned()
    found = under(model, blocks, "zero(3@layers.2.heads.1)", UNCHANGED)
    assert found == pytest.approx([perplexity_of(model, blocks, change), perplexity_of(model, blocks)], rel=1e-6)
    with pytest.raises(outliers.UserError, match=r"'heads.3': layer 2 has 2 heads; expected one of 0 to 1"):
        under(model, blocks, "zero(3@heads.3)")


def test_a_trace_of_a_pruned_model_has_the_features_of_each_layer(blocks, caplog):
    model = pruned()
    found = outliers.trace(model, blocks, alpha=1.0)
    assert found.features("ffn_out", by="layer").groupby("layer").size().tolist() == [48, 48, 40, 48]
    alone = outliers.trace(model, blocks, alpha=1.0, attention=False).features("attn_out", by="layer")
    assert alone.groupby("layer").size().tolist() == [32, 32, 16, 32]
    states = list(outliers.hidden_states(model, blocks, layer=2, role="ffn_out"))
    squares = torch.cat(states).double().square().sum(0)
    kurtosis = found.hidden_states().set_index(["layer", "role"])["kurtosis_feature"][2, "ffn_out"]
    assert kurtosis == pytest.approx((squares.square().mean() / squares.mean() ** 2).item(), rel=1e-6)
    assert "the trace is without attention, of which layers have different numbers of heads" in caplog.text
    assert outliers.origins(model, blocks, [3]).rest.max() < 1e-5
    shares = outliers.readers(model, blocks, [3], ["q"], controls=2)["shares"][0]
    assert shares.shape == (4, 4) and [len(row[row == row]) for row in shares] == [4, 4, 2, 4]


def test_a_narrower_model_than_its_configuration(blocks):
    model = llama(2)
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        writes = name.endswith(("o_proj.weight", "down_proj.weight", "norm.weight"))
        narrow = parameter[:24] if writes else parameter[:, :24]
        model.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(narrow.detach().clone())

    def change(model):
        for layer in model.model.layers:
            for projection in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.register_forward_pre_hook(zeroed(3))

    assert under(model, blocks, "zero(3)") == pytest.approx([perplexity_of(model, blocks, change)], rel=1e-6)
    with pytest.raises(outliers.UserError, match=r"feature 30 is out of range; the model's hidden states have fea.*23"):
        outliers.perplexities(model, blocks, [outliers.variant("zero(30)")])


def test_each_use_of_a_layer_is_a_layer(blocks):
    model, seen = with_shared_layers(), []
    for layer in model.model.layers[:2]:
        layer.register_forward_hook(lambda _module, _inputs, output: seen.append(output.abs().max().item()))
    model(blocks, use_cache=False)
    expected, seen[:] = list(seen), []
    found = largest_numbers(model, blocks, AS_IT_IS)
    assert [found["range.input", layer, "residual", ""] for layer in range(4)] == pytest.approx(expected, rel=1e-5)
    assert len(seen) == 4 * len(blocks)  # the hook of somebody's own sees every use
    traced = outliers.trace(model, blocks).statistics["residual.largest"][:, 0]
    assert traced.tolist() == pytest.approx(expected, rel=1e-5)
    states = outliers.hidden_states(model, blocks, 2)
    assert max(state.abs().max().item() for state in states) == pytest.approx(expected[2], rel=1e-5)
    assert [layer is model.model.layers[number % 2] for number, layer in enumerate(model.model.layers)] == [True] * 4


def test_a_place_is_one_use_of_a_layer(blocks):
    def change(model):
        attention = model.model.layers[0].self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            projection.register_forward_pre_hook(at_second_use(zeroed(3)))

    def rounded(x: torch.Tensor) -> torch.Tensor:
        scale = x.float().abs().max() / 127
        return (x.float() / scale).round().double() * scale.double()

    def quantize(model):
        for module in model.model.layers[0].modules():
            if isinstance(module, nn.Linear):
                hook = lambda module, inputs, _: functional.linear(rounded(inputs[0]), rounded(module.weight))  # noqa: E731
                module.register_forward_hook(at_second_use(hook))

    model = with_shared_layers()
    found = under(model, blocks[:1], "zero(3@layers.2.q/layers.2.k/layers.2.v)", "absmax+only=layers.2")
    assert found == pytest.approx([perplexity_of(model, blocks[:1], one) for one in (change, quantize)], rel=1e-6)


def test_a_shared_part_of_layers(blocks):
    model = llama(2)
    first, second = model.model.layers
    second.mlp = first.mlp

    def change(model):
        for name in ("gate_proj", "up_proj"):
            model.model.layers[0].mlp.get_submodule(name).register_forward_pre_hook(at_second_use(zeroed(3)))

    found = under(model, blocks[:1], "zero(3@layers.1.gate/layers.1.up)")
    assert found == pytest.approx([perplexity_of(model, blocks[:1], change)], rel=1e-6)


def test_a_shared_layer_is_trained_as_its_copies(blocks):
    model = with_shared_layers()
    copies = copy.deepcopy(model)
    copies.model.layers = nn.ModuleList(map(copy.deepcopy, model.model.layers))
    losses = [outliers.train_int8(one)(blocks, labels=blocks).loss.item() for one in (model, copies)]
    assert losses[0] == losses[1] != pytest.approx(with_shared_layers()(blocks, labels=blocks).loss.item(), rel=1e-6)


@pytest.mark.parametrize("layers", [(0, 1, 0, 1), (0, 0, 0, 0)])
def test_uses_that_share_a_place_in_a_cache_have_no_prefix(layers, blocks):
    model = llama()
    model.model.layers = nn.ModuleList([model.model.layers[number] for number in layers])
    with pytest.raises(outliers.UserError, match=r"several layers .* in one place of a cache \(the layer_idx of"):
        under(model, blocks, "prefix(3)")


@pytest.mark.parametrize(
    "use", [lambda model: outliers.hooks(model, print).__enter__(), lambda model: outliers.plant(model, [3], 8.0)]
)
def test_what_cannot_tell_uses_apart_names_them(use):
    with pytest.raises(
        outliers.UserError, match=r"'model.layers.2' is the same module as 'model.layers.0'; expected a"
    ):
        use(with_shared_layers())


def test_a_layer_that_passes_its_input_on_is_none(blocks):
    model, without = llama(), llama()
    model.model.layers[2] = PassedOn()
    del without.model.layers[2]
    without.model.layers[2].self_attn.layer_idx, without.config.num_hidden_layers = 2, 3
    variants = ("absmax", "zero(3)", "kv=int4", UNCHANGED)
    assert under(model, blocks, *variants) == under(without, blocks, *variants)
    assert outliers.origins(model, blocks, [3]).rest.max() < 1e-5
    assert outliers.damage(model, blocks, "absmax", by=["layer"]).variant == "absmax"
    found, expected = (outliers.trace(one, blocks, alpha=1.0, attention=False) for one in (model, without))
    assert found.features().equals(expected.features())
    assert found.hidden_states()["layer"].unique().tolist() == [0, 1, 3]
    numbers = [table.drop(columns="layer") for table in (found.hidden_states(), expected.hidden_states())]
    assert numbers[0].equals(numbers[1])
    planned = outliers.plan(model, blocks[:1], "w4a4", blocks[1:], cost=0.0001, draws=1)
    assert planned.projections == 3 * 7, "those of the layer that is gone count for nothing"


@pytest.mark.parametrize("number", range(4))
def test_a_prefix_of_a_model_with_a_layer_that_passes_its_input_on(number, blocks):
    model, without = llama(), llama()
    model.model.layers[number] = PassedOn()
    del without.model.layers[number]
    for place, layer in enumerate(without.model.layers):
        layer.self_attn.layer_idx = place
    without.config.num_hidden_layers = 3
    assert under(model, blocks, "prefix(3,5)") == under(without, blocks, "prefix(3,5)")


def test_a_layer_without_attention(blocks):
    model, emptied = llama(), llama()
    model.model.layers[2].self_attn = NoAttention()
    nn.init.zeros_(emptied.model.layers[2].self_attn.o_proj.weight)
    variants = ("prefix(3)", "unattended(0)", "plant(3,factor=8)", "zero(3)", "kv=int4")
    assert under(model, blocks, *variants) == pytest.approx(under(emptied, blocks, *variants), rel=1e-6)


def test_a_projection_that_does_not_tell_its_widths_is_named(blocks):
    model = llama()
    model.model.layers[1].mlp.down_proj = Adapted(model.model.layers[1].mlp.down_proj)
    with pytest.raises(outliers.UserError, match=r"is of tests.*Adapted, which has no in_features and out_features"):
        outliers.trace(model, blocks)
    with pytest.raises(outliers.UserError, match=r"'model.layers.1.mlp.down_proj' is of tests.*Adapted; expected a pl"):
        outliers.calibrate(model, blocks)
    model.model.layers[1].mlp.down_proj.in_features, model.model.layers[1].mlp.down_proj.out_features = 48, 32
    assert outliers.trace(model, blocks).statistics["residual.largest"][:, 0].all()


def test_something_with_weights_in_the_place_of_a_layer_is_refused(blocks):
    model = llama()
    model.model.layers[2] = nn.Sequential(model.model.layers[2])
    with pytest.raises(outliers.UserError, match=r"'model.layers.2' is of torch.*Sequential and has no '.*'; expected"):
        outliers.trace(model, blocks)


def test_a_list_of_more_layers_than_run_is_refused(blocks):
    model = llama()
    model.config.num_hidden_layers = 3
    with pytest.raises(outliers.UserError, match=r"'model.layers' has 4 layers, and the configuration says 3; exp"):
        outliers.trace(model, blocks)


def test_a_copied_layer_attends_as_the_others(blocks):
    """Its configuration is a copy too, and says how it attends."""
    model = llama()
    assert outliers.trace(model, blocks).attention_sinks()["share"].between(0, 1).all()
    assert {layer.self_attn.config._attn_implementation for layer in model.model.layers} == {"sdpa"}
