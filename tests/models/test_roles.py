"""Roles that a pass finds beside those of every stack: what reads them is traced, quantized, and told apart."""

import pytest
import torch
from torch import nn

import outliers
from outliers import trace
from outliers.criterion import QUANTIZED, ROUTER
from outliers.errors import UserError
from outliers.models.anatomy import layers_of, state_readers
from outliers.models.hooks import attached, input_hooks
from outliers.tracing.result import Trace
from outliers.variants.edges import replaced_readers
from scripts.every_type import tiny
from tests.models.test_types import small
from tests.small_models import inputs_of as seen_by

BLOCKS = torch.randint(3, 512, (2, 24), generator=torch.Generator().manual_seed(0))


def readers_of(model: nn.Module, of_routers: str = "ffn_in") -> dict[str, tuple[int, str]]:
    """The layer and the role of each module that reads a hidden state of all tokens, by its path."""
    return {
        f"{layer.path}.{name}": (layer.number, of_routers if role == ROUTER else role)
        for layer in layers_of(model)
        for role in (*QUANTIZED, ROUTER)
        for name in getattr(layer.anatomy, role)
        if ".experts." not in name
    }


def inputs_of(model: nn.Module, paths: list[str]) -> dict[str, torch.Tensor]:
    """The inputs (sequences, T, features) of modules, float64."""
    with torch.no_grad(), seen_by({path: model.get_submodule(path) for path in paths}) as seen:
        for block in BLOCKS:
            model(block[None], use_cache=False)
    return {path: torch.stack([x.double().view(24, -1) for x in of]) for path, of in seen.items()}


@pytest.mark.parametrize("kind", ["deepseek_v3", "falcon_h1", "mamba", "nemotron_h"])
def test_a_trace_has_the_input_of_every_projection(kind, tmp_path):
    """Several of a role in a layer, roles that layers lack, and layers of several widths; and the trace of two parts,
    saved."""
    model = tiny(kind)
    expected = readers_of(model)
    parts = [trace(model, part, alpha=1.0, attention=False) for part in BLOCKS.split(1)]
    parts[0].merge(parts[1]).save(tmp_path / "trace")
    found = Trace.load(tmp_path / "trace")
    inputs = inputs_of(model, list(expected))
    states = found.hidden_states().set_index(["layer", "role"])
    by_layer = {role: found.features(role, by="layer").set_index(["layer", "feature"]) for role in found.roles}
    seen = set()
    for role, of_layers in found.modules.items():
        for layer, paths in enumerate(of_layers if role != "residual" else ()):
            assert bool(paths) == ((layer, role) in states.index)
            for path in set(paths) & expected.keys():
                x = inputs[path]
                assert expected[path] == (layer, role.partition(" ")[0])
                assert states["infinity_norm"][layer, role] == pytest.approx(x.abs().amax().item())
                squares = x.square().sum((0, 1))
                kurtosis = (squares.square().mean() / squares.mean() ** 2).item()
                assert states["kurtosis_feature"][layer, role] == pytest.approx(kurtosis, rel=1e-6)
                hits = (x.abs() >= 1).sum((0, 1))
                assert by_layer[role].loc[layer]["hits"].sort_index().tolist() == hits.tolist()
                seen.add(path)
    assert seen == expected.keys()


def test_a_state_that_several_shapes_show_is_changed_once():
    """Routers and shared experts read the state of a mixture in other shapes; values that were turned stay so."""
    model, seen = tiny("qwen2_moe"), []
    places = [reader for reader in state_readers(model, 0) if reader.role == "ffn_in"]
    assert len(places) > 1
    router = model.get_submodule(f"{layers_of(model)[0].path}.mlp.gate")
    for change in (lambda *_state: None, lambda _layer, _role, x: x.flip(0)):
        with torch.no_grad(), input_hooks(places, change):
            handle = router.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0].view(24, -1)))
            with attached([handle]):
                model(BLOCKS[:1], use_cache=False)
    assert torch.equal(seen[1], seen[0].flip(0))


def test_a_model_without_attention():
    """Mamba has losses without features, readers, and no attention; what it lacks is refused by name."""
    model = tiny("mamba")
    measured = outliers.ablate(model, BLOCKS, [3], controls=10)
    assert "top1_softmax" not in measured and measured["damage"].abs().max() > 0
    assert set(outliers.readers(model, BLOCKS, [3], controls=2)["place"]) == {"", "attn_in"}
    for refused, said in (
        (lambda: outliers.perplexities(model, BLOCKS, [outliers.variant("zero(3@ffn_in)")]), "no layer of this model"),
        (lambda: outliers.perplexities(model, BLOCKS, [outliers.variant("zero(3@q)")]), "has no such reader"),
        (lambda: outliers.origins(model, BLOCKS, [3]), "mixes positions by a recurrence"),
        (lambda: outliers.super_weights(model, BLOCKS), "has no second feed-forward projection"),
    ):
        with pytest.raises(UserError, match=said):
            refused()


def test_queries_of_a_latent_state_are_no_part_of_what_reads_the_stream():
    """In DeepSeek-V3 the residual stream is read by projections to latent states, which are its mixer."""
    model = tiny("deepseek_v3")
    with pytest.raises(UserError, match=r"'heads\.0\.q': layer 0 has no such reader"):
        outliers.perplexities(model, BLOCKS, [outliers.variant("zero(3@heads.0.q)")])
    whole, mixer = (replaced_readers(model, [place], 0) for place in ("attn_in", "layers.0.mixer"))
    names = [one.path.rpartition(".")[2] for one in whole.inputs]
    assert whole == mixer and names == ["q_a_proj", "kv_a_proj_with_mqa"]


def test_writers_of_a_layer_that_adds_something_else():
    outliers.origins(small(), BLOCKS % 100, [3])
    model = small()
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda x, **keywords: forward(x, **keywords) + 0.01 * x
    with pytest.raises(UserError, match=r"'model\.layers\.1' of 'phi' put out differs by .* from what the layer adds"):
        outliers.origins(model, BLOCKS % 100, [3])


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen2_moe", "gpt_oss"])
def test_routers_are_quantized_where_that_is_asked_for(kind):
    """Against absmax of what a router reads, in float64; otherwise, and where routers are skipped, they stay exact."""
    model, seen = tiny(kind), {}
    path = next(path for path, (_, role) in readers_of(model, ROUTER).items() if role == ROUTER)

    def see(_module, inputs: tuple, output: torch.Tensor | tuple) -> None:
        seen["input"], seen["logits"] = inputs[0].double().view(-1, 64), output if len(output) > 3 else output[0]

    def rounded(x: torch.Tensor) -> torch.Tensor:
        return (127 * x / x.abs().max()).round() * x.abs().max() / 127

    alone = outliers.quantize(model, "absmax+router", only=[ROUTER])
    without = outliers.quantize(alone, "absmax", only=["attn_out"])
    for changed, change in ((alone, rounded), (without, lambda x: x)):
        with torch.no_grad(), attached([changed.get_submodule(path).register_forward_hook(see)]):
            changed(BLOCKS[:1], use_cache=False)
        router = model.get_submodule(path)
        bias = 0 if getattr(router, "bias", None) is None else router.bias.double()
        expected = change(seen["input"]) @ change(router.weight.double()).T + bias
        assert torch.allclose(seen["logits"].double(), expected, atol=1e-5)
    exact, skipped = (outliers.quantize(model, name, skip=[*skip]) for name, skip in SAME)
    assert outliers.perplexity(exact, BLOCKS) == outliers.perplexity(skipped, BLOCKS)
    assert outliers.perplexity(outliers.quantize(alone, "fp32"), BLOCKS) == outliers.perplexity(model, BLOCKS)


SAME = (("absmax", ()), ("absmax+router", (ROUTER,)))
