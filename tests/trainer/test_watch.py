"""What is measured of a model in the middle of its training, and that the training does not notice."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import device_mesh as meshes
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2LMHeadModel, PreTrainedModel
from transformers.masking_utils import eager_mask

import outliers
from outliers.errors import UserError
from tests.conftest import GPT2

BLOCKS = torch.randint(128, (3, 24), generator=torch.Generator().manual_seed(7))
HELD_OUT = torch.randint(128, (2, 32), generator=torch.Generator().manual_seed(8))
DROPOUT = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}


def small(**fields) -> GPT2LMHeadModel:
    """A random GPT-2 with dropout, in train mode, in which feature 3 has large values."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, bos_token_id=0, eos_token_id=0, **GPT2 | DROPOUT | fields))
    return outliers.plant(model, [3], 16.0).train()


def one_more(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **_others):
    """Softmax with one added to its denominator."""
    scores = query @ key.mT * (scaling or 1) + attention_mask[..., : key.shape[2]]
    room = torch.zeros_like(scores[..., :1])
    probabilities = torch.cat([scores, room], -1).softmax(-1)[..., :-1]
    kept = nn.functional.dropout(probabilities, dropout, module.training)
    return (kept @ value).transpose(1, 2), probabilities


@pytest.fixture
def own_attention(monkeypatch):
    """The name of an attention function that is registered."""
    for kind, function in ((AttentionInterface, one_more), (AttentionMaskInterface, eager_mask)):
        monkeypatch.setitem(kind._global_mapping, "one-more", function)
    return "one-more"


def test_it_is_what_a_trace_and_the_perplexity_say():
    model = small()
    found = outliers.watch(model, HELD_OUT, alpha=4.0)
    trace = outliers.trace(model, HELD_OUT, alpha=4.0)
    states = trace.hidden_states().groupby("role").max()
    row = outliers.table4_row(trace, outliers.perplexity(model, HELD_OUT))
    assert {name: found[name] for name in row} == pytest.approx(row, rel=1e-6)
    assert row["count"] >= 1
    for role, largest in states.iterrows():
        assert found[f"max.{role}"] == largest["infinity_norm"]
        for name in ("kurtosis_tensor", "kurtosis_token", "kurtosis_feature"):
            assert found[f"{name}.{role}"] == largest[name]
    assert found["max.residual"] == trace.massive_activations()["value"].abs().max()
    assert found["attention_sink"] == trace.attention_sinks()["share"][0]
    assert all(isinstance(value, (int, float)) for value in found.values())


def test_the_perplexity_has_a_standard_error_over_the_blocks():
    """By own float64 arithmetic, from the losses of transformers."""
    model = small().eval()
    perplexity, error = (outliers.watch(model, BLOCKS)[name] for name in ("perplexity", "perplexity_error"))
    sums = [23 * model(block[None], labels=block[None]).loss.item() for block in BLOCKS]
    apart = [total - sum(sums) / 3 for total in sums]
    assert error == pytest.approx(perplexity * (3 / 2 * sum(one**2 for one in apart)) ** 0.5 / 69, rel=1e-4)
    assert "perplexity_error" not in outliers.watch(model, BLOCKS[:1])


def hooks_of(model: nn.Module) -> list:
    return [vars(module)[name] for module in model.modules() for name in vars(module) if "hooks" in name]


def test_all_is_as_it_was():
    model = small()
    model.transformer.h[1].eval()  # as it may be where a part is frozen
    model.transformer.wte.register_forward_hook(lambda _module, _inputs, output: output + torch.randn_like(output))
    loss = model(BLOCKS, labels=BLOCKS).loss
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    before = [gradient.clone() for gradient in gradients]
    modes = {name: module.training for name, module in model.named_modules()}
    hooks, random = copy.deepcopy(hooks_of(model)), torch.get_rng_state()
    outliers.watch(model, HELD_OUT)
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True))
    assert all(map(torch.equal, gradients, before))
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert hooks_of(model) == hooks
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.is_grad_enabled()
    assert model.config._attn_implementation == "sdpa"


def trained(model: PreTrainedModel, run: nn.Module, look, half: bool = False, steps: int = 3) -> list[torch.Tensor]:
    """The losses and the last weights of a model whose batches are accumulated; look: called wherever one may look."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    torch.manual_seed(1)
    for _ in range(steps):
        for block in BLOCKS:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                look()  # before autocast keeps its first weight
                first = run(input_ids=block[None], labels=block[None]).loss
                look()
                second = run(input_ids=block[None].flip(1), labels=block[None].flip(1)).loss
            look()
            (first + second).backward()
            look()
            losses.append(first.detach() + second.detach())
        optimizer.step()
        optimizer.zero_grad()
        look()
    return [*losses, *(parameter.detach().clone() for parameter in model.parameters())]


compiled = partial(torch.compile, backend="aot_eager")


def compiled_by_layer(model: PreTrainedModel) -> nn.Module:
    for layer in model.transformer.h:
        layer.compile(backend="aot_eager")
    return model


def checkpointed(model: PreTrainedModel) -> nn.Module:
    model.activation_checkpointing_enable()
    return model


def with_own_attention(model: PreTrainedModel) -> nn.Module:
    model.config._attn_implementation = "one-more"
    return model


@pytest.mark.nightly("outliers/trainer/", "outliers/tracing/")
@pytest.mark.parametrize(
    ("wrap", "half"),
    [
        (lambda model: model, False),
        (partial(outliers.train_int8, attention=True, stochastic=True), True),
        (checkpointed, False),
        (with_own_attention, True),
        pytest.param(compiled, False, marks=pytest.mark.slow),
        pytest.param(compiled_by_layer, True, marks=pytest.mark.slow),
    ],
)
def test_the_training_does_not_notice(wrap, half, own_attention):
    with_and_without = []
    for watches in (True, False):
        model = small()
        run = wrap(model)
        found = []

        def look(model=run, found=found, watches=watches):
            found.extend([outliers.watch(model, HELD_OUT)] if watches else [])

        with_and_without.append(trained(model, run, look, half))
        assert not watches or found[0]["perplexity"] != found[-1]["perplexity"]
    assert all(map(torch.equal, *with_and_without))


def test_what_is_wrapped_is_measured_as_itself(own_attention):
    for wrap in (compiled, compiled_by_layer, checkpointed, nn.DataParallel):
        model = small()
        expected = outliers.watch(model, HELD_OUT)
        assert outliers.watch(wrap(model), HELD_OUT) == expected


def test_autocast_changes_nothing():
    model = small()
    with torch.autocast("cpu", torch.bfloat16):
        found = outliers.watch(model, HELD_OUT)
    assert found == outliers.watch(model, HELD_OUT)


def test_an_own_attention_is_measured_as_it_is(own_attention):
    model = small()
    usual = outliers.watch(model, HELD_OUT)
    model.config._attn_implementation = own_attention
    found = outliers.watch(model, HELD_OUT)
    assert found["perplexity"] != usual["perplexity"]
    assert found["perplexity"] == pytest.approx(outliers.perplexity(model, HELD_OUT), rel=1e-9)
    assert found["attention_sink"] <= usual["attention_sink"]
    assert model.config._attn_implementation == own_attention


def test_an_attention_without_probabilities_is_refused(monkeypatch, own_attention):
    table = AttentionInterface._global_mapping
    monkeypatch.setitem(table, own_attention, lambda *arguments, **others: (one_more(*arguments, **others)[0], None))
    model = small()
    model.config._attn_implementation = own_attention
    with pytest.raises(UserError, match=r"'one-more' gives no probabilities.*attention=False"):
        outliers.watch(model, HELD_OUT)
    assert "attention_sink" not in outliers.watch(model, HELD_OUT, attention=False)


def test_weights_of_which_a_process_has_a_part_are_refused():
    model = small()
    model.transformer.ln_f.weight.data = torch.empty(0)  # as ZeRO-3 leaves it
    with pytest.raises(UserError, match=r"'transformer\.ln_f\.weight' are spread over several processes"):
        outliers.watch(model, HELD_OUT)


def test_sharded_weights_are_refused():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = small()
        mesh = meshes.init_device_mesh("cpu", (1,))
        weight = DTensor.from_local(model.transformer.ln_f.weight.data, mesh, [Replicate()])
        model.transformer.ln_f.weight = nn.Parameter(weight)
        with pytest.raises(UserError, match="spread over several processes"):
            outliers.watch(model, HELD_OUT)
        distributed = nn.parallel.DistributedDataParallel(small())
        assert outliers.watch(distributed, HELD_OUT) == outliers.watch(distributed.module, HELD_OUT)
    finally:
        torch.distributed.destroy_process_group()
