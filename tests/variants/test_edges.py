"""Features that are replaced where some of the projections read them, against second computations."""

from contextlib import ExitStack

import pytest
import torch

import outliers
from outliers import quantize, trace, variant
from outliers.models.anatomy import decoder_layers, state_readers
from outliers.models.anatomy.parts import QKV, stream_readers
from outliers.models.hooks import attention_hooks, input_hooks
from outliers.tracing.result import STREAM
from outliers.variants.edges import EDGE_PLACES
from tests.conftest import CONFIGS, FIVE, VARIANTS, in_turn
from tests.small_models import make_model
from tests.tracing.test_tracing import hooks

FAST = [*FIVE, "gpt_neox", "phi3", "mixtral"]  # and those whose projections are parted in ways of their own
EVERY = [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in [*CONFIGS, *VARIANTS]]
POSITION = 5


@pytest.fixture
def blocks() -> torch.Tensor:
    return torch.randint(100, (1, 12), generator=torch.Generator().manual_seed(1))


def logits(model, blocks, *written) -> torch.Tensor:
    with torch.inference_mode(), ExitStack() as stack:
        for one in map(variant, written):
            model = stack.enter_context(one.on(model))
        return model(blocks, use_cache=False).logits


def seen_with(model, blocks, changed=None) -> dict[str, torch.Tensor]:
    """What the last layer attends to, (heads, T, T), and what its output projections read, (T, features).

    changed: a projection, its outputs and what their values at one position are multiplied with.
    """
    last, found = len(decoder_layers(model)) - 1, {}

    def hook(_module, _inputs, output):
        output = output.clone()
        output.reshape(-1, output.shape[-1])[POSITION, changed[1]] *= changed[2]
        return output

    with torch.inference_mode(), ExitStack() as stack:
        if changed:
            stack.callback(changed[0].module.register_forward_hook(hook).remove)
        inputs = [one for one in state_readers(model) if one.layer == last and one.role.endswith("out")]
        stack.enter_context(input_hooks(inputs, lambda _layer, role, x: found.update({role: x.clone()})))
        visit = lambda _layer, seen, *_more: found.update(attention=seen[0].clone())  # noqa: E731
        stack.enter_context(attention_hooks(model, visit, last))
        model(blocks, use_cache=False)
    return found


@pytest.mark.parametrize("case", EVERY)
def test_outputs_are_those_with_which_attention_computes(case, blocks):
    """A query changes its own row of probabilities, a key its column, a value none; each in the heads that read it."""
    model = make_model(case)
    heads, before = model.config.num_attention_heads, seen_with(make_model(case), blocks)
    of_qkv = [one for one in stream_readers(model, len(decoder_layers(model)) - 1) if one.name in QKV]
    assert [one.name for one in of_qkv] == list(QKV)
    size = before["attn_out"].shape[1] // heads
    covered: dict[str, list] = {}
    for part in of_qkv:
        covered.setdefault(part.reader.path, []).append(part.outputs.flatten())
        assert part.outputs.shape[1] == size
        for number, outputs in enumerate(part.outputs):
            factors = torch.linspace(-3, 3, size)
            after = seen_with(model, blocks, (part.reader, outputs, factors))
            rows = (after["attention"] - before["attention"]).abs().amax(2)  # (heads, T)
            states = (after["attn_out"] - before["attn_out"]).abs().view(-1, heads, size).amax(2).T
            shared = heads // len(part.outputs)
            of_head = torch.zeros(heads, dtype=torch.bool)
            of_head[shared * number : shared * (number + 1)] = True
            if case == "olmo2" and part.name != "v":
                of_head[:] = True  # it normalizes the queries of all heads together
            assert (states.amax(1) > 1e-6).tolist() == of_head.tolist()
            assert torch.equal(states[:, :POSITION], torch.zeros(heads, POSITION))
            later = (rows[of_head, POSITION + 1 :] > 1e-7).any().item()
            assert later == (part.name == "k")
            assert (rows[:, POSITION] > 1e-7).tolist() == (of_head & (part.name != "v")).tolist()
    for numbers in covered.values():
        every = torch.cat(numbers)
        assert torch.equal(every.sort().values, torch.arange(len(every)))


@pytest.mark.parametrize("case", ["llama", "phi3", "gemma2"])
def test_gates_and_units_are_those_with_which_a_layer_computes(case, blocks):
    """What is multiplied with a gate changes its sign with it; the gate goes through a function that is not odd."""
    model, there = make_model(case), seen_with(make_model(case), blocks)["ffn_out"][POSITION]
    gate, up = (one for one in stream_readers(model, 1) if one.name in ("gate", "up"))
    assert torch.equal(seen_with(model, blocks, (up.reader, up.outputs[0], -1))["ffn_out"][POSITION], -there)
    other = seen_with(model, blocks, (gate.reader, gate.outputs[0], -1))["ffn_out"][POSITION]
    assert not torch.allclose(other, -there)
    unit = seen_with(model, blocks, (up.reader, up.outputs[0, 3:4], -1))["ffn_out"][POSITION]
    assert torch.equal((unit != there).nonzero().flatten(), torch.tensor([3]))


@in_turn("case method", FAST, ["zero", "shuffle", "mean"])
def test_all_readers_together_are_the_role(case, method, blocks):
    """Bit for bit: as places of one variant, as one variant each, by heads, and by layers."""
    model = make_model(case)
    every = [one for layer in (0, 1) for one in stream_readers(model, layer)]
    ffn = [f"layers.{one.reader.layer}.{one.name}" for one in every if one.name in EDGE_PLACES["ffn_in"]]
    heads = "/".join(f"heads.{head}" for head in range(model.config.num_attention_heads))
    known = trace(model, blocks, STREAM, attention=False)

    def under(*places):
        with torch.inference_mode(), ExitStack() as stack:
            for place in places:
                ablated = variant(f"{method}(3,17@{place})")
                stack.enter_context((ablated.knowing(known) if ablated.needs_trace else ablated).on(model))
            return model(blocks, use_cache=False).logits

    of_attention, of_both = under("attn_in"), under("attn_in/ffn_in")
    assert not torch.equal(of_attention, of_both)
    assert torch.equal(under("q/k/v"), of_attention)
    assert torch.equal(under("q", "k", "v"), of_attention)
    assert torch.equal(under(heads), of_attention)
    assert torch.equal(under("/".join(["q", "k", "v", *ffn])), of_both)
    assert torch.equal(under("layers.0/layers.1"), of_both)
    assert torch.equal(under("layers.0:2"), of_both)
    assert torch.equal(under("q", "k", "v", *ffn), of_both)
    each = [under(name) for name in ("q", "k", "v")]
    assert not any(torch.equal(one, other) for one in each for other in (of_attention, of_both))
    assert hooks(model) == 0


def zeroed(x, features=(3, 17)):
    changed = x.clone()
    changed[..., list(features)] = 0
    return changed


@pytest.mark.parametrize(
    ("case", "place", "modules"),
    [
        ("mixtral", "router", ["0.mlp.gate", "1.mlp.gate"]),
        ("gpt-oss", "experts", ["0.mlp.experts", "1.mlp.experts"]),
        ("qwen3-moe-dense-first", "layers.0.gate", ["0.mlp.gate_proj"]),
        ("llama", "layers.1.attn_norm", ["1.input_layernorm"]),
        ("gpt2", "norm", [f"{layer}.ln_{number}" for layer in (0, 1) for number in (1, 2)]),
        ("gptj", "ffn_norm", ["0.ln_1", "1.ln_1"]),
    ],
)
def test_modules_of_their_own(case, place, modules, blocks):
    """By hooks on the input of the modules; queries and others are compared with TransformerLens."""
    model = make_model(case)
    got = logits(model, blocks, f"zero(3,17@{place})")
    assert not torch.equal(got, logits(model, blocks))
    for name in modules:
        layer, _, path = name.partition(".")
        module = decoder_layers(model)[int(layer)].get_submodule(path)
        module.register_forward_pre_hook(lambda _module, inputs: (zeroed(inputs[0]), *inputs[1:]))
    assert torch.equal(got, logits(model, blocks))


@pytest.mark.parametrize("scheme", ["absmax", "llm.int8+alpha=1"])
def test_fused_projections_are_of_two_inputs(scheme, blocks):
    """The queries of GPT-2 from the changed input, keys and values from the other one, under a scheme."""
    model = make_model("gpt2")
    got = logits(model, blocks, f"zero(3,17@q)+{scheme}")
    changed = quantize(model, variant(scheme).scheme)

    def hook(module, inputs, output):
        return torch.cat([module.forward(zeroed(inputs[0]))[..., :32], output[..., 32:]], -1)

    for layer in changed.transformer.h:
        layer.attn.c_attn.register_forward_hook(hook)
    assert torch.equal(got, logits(changed, blocks))


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_edges_on_one_another(case, blocks):
    """Changes of one output add up, whichever came first."""
    model = make_model(case)
    both = logits(model, blocks, "zero(3,17@k)")
    assert torch.equal(logits(model, blocks, "zero(3@k)", "zero(17@k)"), both)
    assert torch.equal(logits(model, blocks, "zero(17@k)+zero(3@k)"), both)
    assert torch.equal(logits(model, blocks, "zero(3@attn_in)+zero(17@k)"), logits(model, blocks, "zero(17@k)+zero(3)"))
    scheme = "absmax-vector"
    want = logits(model, blocks, f"zero(3,17@k)+{scheme}")
    assert torch.equal(logits(model, blocks, f"zero(3@k)+{scheme}+zero(17@k)"), want)


def test_a_head_shares_its_keys_with_others(blocks):
    """Of four heads two share one of keys and values in this model."""
    model = make_model("llama")
    of_heads = [logits(model, blocks, f"zero(3@layers.1.heads.{head}.k)") for head in range(4)]
    assert torch.equal(of_heads[0], of_heads[1])
    assert torch.equal(of_heads[2], of_heads[3])
    assert not torch.equal(of_heads[1], of_heads[2])
    both = logits(model, blocks, "zero(3@layers.1.heads.0.k/layers.1.heads.2.k)")
    assert torch.equal(both, logits(model, blocks, "zero(3@layers.1.k)"))
    whole = logits(model, blocks, "zero(3@layers.1.heads.3)")
    assert torch.equal(whole, logits(model, blocks, "zero(3@layers.1.heads.3.q/layers.1.heads.2.k/layers.1.heads.3.v)"))


@pytest.mark.parametrize("case", ["gpt2", "llama"])
def test_who_looks_at_inputs_sees_them_once_and_unchanged(case, blocks):
    model = make_model(case)
    before, under = (trace(model, blocks, alpha=1.0, variant=variant(one)) for one in ("fp32", "zero(3@layers.1.k)"))
    for role in ("attn_in", "ffn_in"):
        assert torch.equal(before.statistics[f"{role}.hits"][0], under.statistics[f"{role}.hits"][0])
    assert torch.equal(before.statistics["attn_in.sum"][1], under.statistics["attn_in.sum"][1])
    assert not torch.equal(before.statistics["ffn_in.sum"][1], under.statistics["ffn_in.sum"][1])


def test_hooks_come_off_after_an_error(blocks):
    model = make_model("gpt2")
    with pytest.raises(ZeroDivisionError), variant("zero(3@q/ffn_in/norm)+zero(3@layers.1.heads.1)").on(model):
        assert hooks(model) > 0
        raise ZeroDivisionError
    assert hooks(model) == 0


def test_top1_of_cells(tmp_path):
    names = ["fp32", "zero(3)", "zero(3@q/k/v)", "zero(3@layers.0.k)", "zero(3@up)", "zero(3@layers.0.k/up)"]
    spec = outliers.Cells(models=["pocket/gpt2-0.1m"], variants=names, metrics=["top1"], block=32, blocks=1)
    found = dict(zip(names, (row["value"] for row in outliers.run(spec, tmp_path)), strict=True))
    assert found.pop("zero(3@q/k/v)") == found["zero(3)"]
    assert len({*found.values()}) == len(found)
