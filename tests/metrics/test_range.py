"""The largest numbers of a pass against plain hooks, and what is said where a dtype does not hold one."""

import sys
from contextlib import ExitStack

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

import outliers
from outliers.metrics.range import largest_numbers
from outliers.models.anatomy import decoder_layers, state_readers
from outliers.models.load import load_model, load_tokenizer
from outliers.models.stream import AS_IT_IS
from tests.small_models import make_model
from tests.typed import call

BLOCKS = torch.arange(48).view(2, 24)


def test_numbers_are_those_of_hooks(case):
    model, expected = make_model(case), {}

    def largest(key, x):
        expected[key] = max(expected.get(key, 0.0), x.detach().abs().max().item())

    def hook_of(part):
        def hook(_module, inputs, output):
            x = inputs[0].flatten(0, -2)
            largest(("range.input", part.layer, part.role, ""), x)
            largest(
                ("range.output", part.layer, part.role, part.path), output[0] if isinstance(output, tuple) else output
            )
            whole = x[:, : x.shape[1] // 32 * 32].view(len(x), -1, 32).sum(2)
            rest = x[:, x.shape[1] // 32 * 32 :].sum(1)
            largest(("range.block_sum", part.layer, part.role, ""), torch.cat([whole.flatten(), rest]))

        return hook

    def hook_of_layer(number):
        return lambda _module, _inputs, output: largest(
            ("range.input", number, "residual", ""), output[0] if isinstance(output, tuple) else output
        )

    with ExitStack() as stack:
        for part in state_readers(model):  # blocks of mixtures among them
            stack.enter_context(part.module.register_forward_hook(hook_of(part)))
        for number, layer in enumerate(decoder_layers(model)):
            stack.enter_context(layer.register_forward_hook(hook_of_layer(number)))
        for block in BLOCKS:
            model(block[None])
    found = largest_numbers(model, BLOCKS, AS_IT_IS)
    assert expected.keys() <= found.keys()
    assert {place: found[place] for place in expected} == pytest.approx(expected, rel=1e-5)


# OPT multiplies queries before the call, Granite has a scale of its own, and layers of Gemma a window of 8.
@pytest.mark.parametrize("case", ["gpt2", "llama", "granite", "opt", "gemma2"])
def test_attention_logits_are_those_before_the_softmax(case):
    """Of an attention function that computes them in float64."""
    model, expected = make_model(case), []

    def noting(module, query, key, value, attention_mask, scaling=None, **others):
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        logits = query.double() @ keys.double().mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        expected.append(logits[attention_mask.expand_as(logits) == 0].abs().max().item())
        own = sys.modules[type(module).__module__].eager_attention_forward
        return own(module, query, key, value, attention_mask, scaling=scaling, **others)

    found = largest_numbers(model, BLOCKS[:1], AS_IT_IS)
    AttentionInterface.register("noting", noting)
    AttentionMaskInterface.register("noting", eager_mask)
    model.config._attn_implementation = "noting"
    model(BLOCKS[:1])
    logits = [found["range.attention_logit", layer, "", ""] for layer in range(2)]
    assert logits == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A model in which a bias makes numbers beyond float16, in the folder `m`."""
    model = load_model("pocket/gpt2-0.1m")
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.bias[3] = 7e4
    model.save_pretrained(tmp_path / "m")
    load_tokenizer("pocket/gpt2-0.1m").save_pretrained(tmp_path / "m")
    monkeypatch.chdir(tmp_path)


OPTIONS = ("--block", 24, "--blocks", 2)


@pytest.mark.parametrize("command", ["measure", "trace"])
def test_a_number_beyond_float16_is_said(large, monkeypatch, capsys, command):
    metric = ("--metric", "range") if command == "measure" else ()
    code, out, _ = call(monkeypatch, capsys, "m", *metric, *OPTIONS, command=command)
    assert code == 0 and "layer 1, ffn_out: " in out and "is beyond float16; bfloat16 holds it" in " ".join(out.split())
    if command == "measure":  # a trace says it in the same words, and draws figures
        code, out, _ = call(monkeypatch, capsys, "pocket/gpt2-0.1m", *metric, *OPTIONS, command=command)
        assert code == 0 and "beyond float16" not in out


@pytest.mark.parametrize("options", [(), ("--stream",)])
def test_a_weight_beyond_the_dtype_is_said(large, monkeypatch, capsys, options):
    code, _, said = call(monkeypatch, capsys, "--model", "m", *OPTIONS, "--dtype", "float16", *options)
    assert code == 2
    assert "'transformer.h.1.mlp.c_fc.bias' of 'm' holds 70,000, beyond float16, which ends at 65,504" in said
    assert "expected a dtype that holds it: float32 or bfloat16" in said
    with pytest.raises(outliers.UserError, match="holds 70,000, beyond float16"):
        outliers.load_int8("m", "absmax-vector", "float16")
    assert load_model("m", "bfloat16").dtype == torch.bfloat16


@pytest.mark.parametrize(("model", "unknown"), [("pocket/gptj-1.7m", True), ("pocket/gpt2-0.1m", False)])
def test_attention_that_shows_no_logits_is_said(model, unknown, monkeypatch, capsys, tmp_path):
    arguments = [model, "--metric", "range", "--block", 32, "--blocks", 1, "--out", tmp_path]
    code, out, _ = call(monkeypatch, capsys, *arguments, command="measure")
    said = " ".join(out.split())
    assert code == 0
    assert ("every number of the pass but attention logits, which are unknown" in said) == unknown
    assert ("Attention logits are before the softmax" in said) != unknown
