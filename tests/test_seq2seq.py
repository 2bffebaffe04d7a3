"""Encoder-decoders: states, loss, schemes, planted outliers, streaming, and every command."""

import functools
import math

import pytest
import torch
from transformers import (
    AutoModelForSeq2SeqLM,
    BartConfig,
    MarianConfig,
    MBartConfig,
    MT5Config,
    PegasusConfig,
    T5Config,
    T5GemmaConfig,
    UMT5Config,
)

import outliers
from outliers.models.anatomy import projections
from outliers.models.anatomy.examples import Example
from outliers.models.anatomy.views import views_of
from outliers.models.decoder import inference, run_decoder, run_exchanged, run_from
from outliers.models.load import weights_hash
from outliers.models.stream import stream_model
from outliers.quantization.schemes import TABLE1
from tests.test_quantization import equation
from tests.test_seq2seq_text import tokenizer

T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
BART = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 64}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 64}
BART |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
BART |= {"forced_eos_token_id": 2}
GEMMA = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "sliding_window": 8}
CONFIGS = {
    "t5": T5Config(**T5, num_decoder_layers=3),
    "t5-gated": T5Config(**T5 | {"d_kv": 16}, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": MT5Config(**T5),
    "umt5": UMT5Config(**T5),
    "bart": BartConfig(**BART),
    "mbart": MBartConfig(**BART),
    "marian": MarianConfig(**BART),
    "pegasus": PegasusConfig(**BART),
    "t5gemma": T5GemmaConfig(
        encoder=GEMMA,
        decoder=GEMMA | {"num_hidden_layers": 3},
        vocab_size=99,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=1,
    ),
}
BEHIND = ("bart", "marian")  # their norms come behind the sums
every = pytest.mark.parametrize("case", CONFIGS)


@functools.cache
def made(case: str):
    """A small random model, whose norms are none of a fresh one; not to be changed."""
    torch.manual_seed(0)
    model = AutoModelForSeq2SeqLM.from_config(CONFIGS[case]).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            mean = 1.0 if name.endswith("weight") and case != "t5gemma" else 0.0
            torch.nn.init.normal_(parameter, mean, 0.2)
    for name, buffer in model.named_buffers():
        if name == "final_logits_bias":
            buffer.normal_()
    return model


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """The folder of a model with a tokenizer that has sentinels, or some that have none."""

    @functools.cache
    def of(case: str, sentinels: int = 30):
        path = tmp_path_factory.mktemp(case)
        made(case).save_pretrained(path)
        tokenizer(sentinels).save_pretrained(path)
        (path / "text.txt").write_text(" ".join(f"w{number * 7 % 40}" for number in range(1200)))
        return path

    return of


@functools.cache
def examples() -> list[Example]:
    """What encoders and decoders read, of which one is shorter than the others."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, 99, (length,), generator=generator) for length in (20, 11, 20, 11, 20, 7)]
    return [Example(*pair) for pair in zip(ids[::2], ids[1::2], strict=True)]


@every
def test_loss_is_that_of_transformers(case):
    with torch.no_grad():
        losses = [made(case)(input_ids=one.ids[None], labels=one.labels[None]).loss.item() for one in examples()]
    counts = [len(one.labels) for one in examples()]
    expected = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert math.log(outliers.perplexity(made(case), examples())) == pytest.approx(expected, rel=1e-6)


@every
def test_states_are_those_of_transformers(case):
    model, one = made(case), examples()[0]
    with torch.no_grad():  # gradients choose another kernel of attention
        out = model(input_ids=one.ids[None], labels=one.labels[None], output_hidden_states=True, use_cache=False)
    for view, states in (("encoder", out.encoder_hidden_states), ("decoder", out.decoder_hidden_states)):
        layers = views_of(model)[view].layers
        for layer, state in zip(layers[:-1], states[1:-1], strict=True):  # the last one is normed there
            assert torch.equal(next(outliers.hidden_states(model, [one], layer)), state[0])


@every
def test_streamed_equals_resident(case, folder):
    streamed, resident = (load(str(folder(case))) for load in (stream_model, outliers.load_model))
    assert weights_hash(resident) == weights_hash(made(case))
    found = [outliers.perplexity(model, examples()) for model in (streamed, resident, made(case))]
    assert found[0] == found[1] == found[2]
    assert streamed.stream.weights_hash() == weights_hash(resident)
    traces = [outliers.trace(model, examples(), stack="decoder", alpha=0.5) for model in (streamed, resident)]
    assert all(torch.equal(one, traces[1].statistics[name]) for name, one in traces[0].statistics.items())


@every
def test_nine_schemes_equal_float64(case):
    """A projection of each stack, and one of the cross-attention, from the inputs of the exact model."""
    parts = {one.role: one for one in projections(made(case))}
    chosen = [parts["attn_out"], parts["cross_kv"], next(projections(made(case)))]
    generator = torch.Generator().manual_seed(2)
    for name, one in zip(TABLE1[1:] * 3, chosen * 3, strict=False):
        weight = one.module.weight.detach().double()
        x = torch.randn(7, weight.shape[1], generator=generator, dtype=torch.float64)
        x[2, [3, 11]] = -9.0
        changed = outliers.quantize(made(case), name).double().get_submodule(one.path)
        bias = 0 if one.module.bias is None else one.module.bias.detach().double()
        with torch.no_grad():
            torch.testing.assert_close(changed(x), equation(x, weight, name) + bias, rtol=1e-12, atol=1e-12)


@every
def test_planted_outliers_are_found_and_no_others(case):
    planted = outliers.plant(made(case), [5, 17], 64.0)
    assert outliers.perplexity(planted, examples()) == pytest.approx(
        outliers.perplexity(made(case), examples()), rel=1e-5
    )
    for stack in ("encoder", "decoder"):
        found = outliers.trace(planted, examples(), stack=stack, attention=False).outlier_features()
        assert sorted(found["feature"]) == [5, 17], stack


@every
def test_ablation_of_nothing_changes_no_bit(case):
    model = made(case)
    exact = outliers.perplexity(model, examples())
    for written, same in (("fp32", True), ("zero(3)", False)):
        with outliers.variant(written).on(model) as changed:
            assert (outliers.perplexity(changed, examples()) == exact) is same


@every
def test_layers_run_one_by_one(case):
    """From the middle of either stack on, and with a layer of another model in the place of one."""
    model = made(case)
    quantized = outliers.quantize(model, "absmax-vector", only=["layers.3"])

    @inference
    def states(model, run):
        return [state for *_, state in run(model)]

    known = [{} for _ in examples()]
    exact, under = (states(one, lambda of: run_decoder(of, examples())) for one in (model, quantized))
    first = states(model, lambda of: run_from(of, examples(), 1, known))
    third = states(quantized, lambda of: run_from(of, examples(), 3, known))
    assert all(map(torch.equal, exact, first)) and all(map(torch.equal, under, third))
    exchanged = states(
        model, lambda of: run_exchanged(of, outliers.quantize(model, "absmax-vector"), examples()[0], [3])
    )
    assert torch.equal(exchanged[0], under[0]) and not torch.equal(under[0], exact[0])
