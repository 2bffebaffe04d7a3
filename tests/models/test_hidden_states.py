"""Hidden states for those who ask for them, and hooks of one's own."""

import pytest
import torch

import outliers
from outliers import Quantized, UserError, hidden_states, load_model, quantize
from outliers.models.anatomy import decoder_layers
from outliers.models.stream import stream_model
from outliers.quantization.schemes import get_scheme
from tests.small_models import make_model


@pytest.mark.parametrize("role", ["residual", "attn_in", "attn_out", "ffn_in", "ffn_out"])
def test_streamed_and_under_a_scheme(role, blocks, tmp_path):
    make_model("opt").save_pretrained(tmp_path)
    resident, streamed = load_model(str(tmp_path)), stream_model(str(tmp_path), memory=0)
    scheme = get_scheme("absmax")
    cases = [(resident, {}), (quantize(resident, scheme), {"variant": Quantized(scheme)})]
    for model, of_variant in cases:
        expected = list(hidden_states(model, blocks, 1, role))
        found = list(hidden_states(streamed, blocks, 1, role, **of_variant))
        assert all(map(torch.equal, found, expected))
        assert len(found) == len(blocks)
    assert all(parameter.is_meta for layer in decoder_layers(streamed) for parameter in layer.parameters())


def test_a_block_is_run_when_it_is_asked_for_and_no_further_than_its_layer(blocks):
    model, ran = make_model("llama"), []
    for number, layer in enumerate(decoder_layers(model)):
        layer.register_forward_pre_hook(lambda _module, _inputs, number=number: ran.append(number))
    states = hidden_states(model.train(), blocks, 0, "ffn_out")
    assert ran == []
    first = next(states)
    assert (ran, first.shape) == ([0], (len(blocks[0]), model.config.intermediate_size))
    assert model.training
    assert torch.is_grad_enabled()
    first.requires_grad_().sum().backward()  # no tensor of inference mode
    states.close()
    assert not any(module._forward_pre_hooks for module in decoder_layers(model)[0].mlp.modules())


def test_padding_is_no_token(blocks):
    model = make_model("llama")
    padded, mask = torch.stack([blocks[0], blocks[1]]), torch.ones(2, len(blocks[0]))
    mask[1, :5] = 0
    found = list(outliers.hidden_states(model, padded, 1, "attn_out", attention_mask=mask))
    alone = next(hidden_states(model, [blocks[1][5:]], 1, "attn_out"))
    assert [len(state) for state in found] == [len(blocks[0]), len(blocks[0]) - 5]
    assert torch.equal(found[1], alone)


def test_hooks_around_whatever_runs_the_model(blocks):
    model, seen = make_model("gpt2"), []
    with outliers.hooks(model, lambda *state: seen.append(state), ["ffn_out", "residual"], [1]):
        model(blocks[:2])
        outliers.perplexity(model, blocks[:1])
    assert [(layer, role) for layer, role, _ in seen] == [(1, "ffn_out"), (1, "residual")] * 2
    assert [len(x) for *_, x in seen] == [blocks[:2].numel()] * 2 + [len(blocks[0])] * 2
    expected = outliers.perplexity(model, blocks)
    assert len(seen) == 4, "the hooks are off"
    with outliers.hooks(model, lambda _layer, _role, x: torch.zeros_like(x), ["attn_in"]):
        assert outliers.perplexity(model, blocks) != expected
    assert outliers.perplexity(model, blocks) == expected


def test_hooks_on_a_streamed_model(blocks, tmp_path):
    make_model("opt").save_pretrained(tmp_path)
    model, seen = stream_model(str(tmp_path)), []
    with outliers.hooks(model, lambda layer, role, _x: seen.append((layer, role)), "ffn_in"):
        outliers.perplexity(model, blocks)
    assert seen == [(layer, "ffn_in") for layer in range(len(decoder_layers(model))) for _ in blocks]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"layer": 9}, "layer 9 of a model with 2; expected 0 to 1"),
        ({"layer": 0, "role": "ffn_out"}, "each expert of layer 0 reads a state of its own in role ffn_out"),
        ({"layer": 0, "role": "mlp"}, "unknown role 'mlp'"),
    ],
)
def test_what_is_not_there(arguments, said, blocks):
    model = make_model("mixtral")
    with pytest.raises(UserError, match=said):
        hidden_states(model, blocks, **arguments)
    for layers in ([2], [0, 99], []):
        with pytest.raises(UserError, match=r"the layers 0 to 1"), outliers.hooks(model, print, layers=layers):
            pass
