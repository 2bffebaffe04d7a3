"""Families beside causal language models: losses, states, planted outliers, streaming and schemes."""

import copy
import functools
import math

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
)

import outliers
from outliers import calibrate, load_int8, load_quantized, save_quantized
from outliers.metrics.latency import encoding
from outliers.models.anatomy import input_embeddings, projections, state_readers
from outliers.models.anatomy.examples import IGNORED, Example, Examples
from outliers.models.anatomy.stack_views import stack_views
from outliers.models.decoder import run_decoder, run_exchanged, run_from
from outliers.models.load import weights_hash
from outliers.models.stream import stream_model
from outliers.quantization.int8 import Int8Linear
from outliers.variants.draw import drawn
from tests.conftest import slow_but

config = AutoConfig.for_model
BERT = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 99, "intermediate_size": 64}
MODERN = {"local_attention": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODERN |= {"cls_token_id": 1, "sep_token_id": 2}
MASKED = {
    "bert": config("bert", **BERT),
    "roberta": config("roberta", **BERT),
    "xlm-roberta": config("xlm-roberta", **BERT),
    "camembert": config("camembert", **BERT),
    "electra": config("electra", **BERT, embedding_size=16),
    "distilbert": config("distilbert", dim=32, n_layers=3, n_heads=4, hidden_dim=64, vocab_size=99),
    "modernbert": config("modernbert", **BERT, **MODERN),
}
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 16, "patch_size": 4}
VIT = {**SIZES, "intermediate_size": 64}
NAMES = {0: "tabby, tabby cat", 1: "dog", 2: "sea_bird", 3: "owl", 4: "fox"}
CLASSES = {"id2label": NAMES, "label2id": {name: number for number, name in NAMES.items()}}
VISION = {
    "vit": config("vit", **VIT, **CLASSES),
    "deit": config("deit", **VIT, **CLASSES, architectures=["DeiTForImageClassification"]),
    "dinov2": config("dinov2", **SIZES, **CLASSES),
    "dinov2-gated": config("dinov2", **SIZES, **CLASSES, use_swiglu_ffn=True),
    "registers": config("dinov2_with_registers", **SIZES, **CLASSES),
    "clip": config("clip", vision_config=VIT, **CLASSES),
    "siglip": config("siglip", vision_config=VIT, **CLASSES),
}
T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
T5 |= {"decoder_start_token_id": 0}
BART = {"vocab_size": 99, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "max_position_embeddings": 64}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 64}
BART |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
BART |= {"forced_eos_token_id": 2}
GEMMA = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GEMMA |= {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 64, "sliding_window": 8}
ENDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
SEQ2SEQ = {
    "t5": config("t5", **T5, num_decoder_layers=3),
    "t5-gated": config("t5", **T5 | {"d_kv": 16}, feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "mt5": config("mt5", **T5),
    "umt5": config("umt5", **T5),
    "bart": config("bart", **BART),
    "mbart": config("mbart", **BART),
    "marian": config("marian", **BART),
    "pegasus": config("pegasus", **BART),
    "t5gemma": config("t5gemma", encoder=GEMMA, decoder=GEMMA | {"num_hidden_layers": 3}, vocab_size=99, **ENDS),
}
CONFIGS = MASKED | VISION | SEQ2SEQ
FEW = ["bert", "modernbert", "registers", "siglip", "t5", "t5gemma"]
ALIKE = ("xlm-roberta", "camembert", "mt5")  # in their modules RoBERTa and T5; test_discover.py has them
every = pytest.mark.parametrize("case", slow_but([case for case in CONFIGS if case not in ALIKE], FEW))


@torch.inference_mode(False)  # whoever is the first to ask for it
def make(case: str):
    """A small random model, whose norms are none of a fresh one."""
    auto = AutoModelForMaskedLM if case in MASKED else AutoModelForSeq2SeqLM
    auto = AutoModelForImageClassification if case in VISION else auto
    torch.manual_seed(0)
    model = auto.from_config(copy.deepcopy(CONFIGS[case])).eval()  # which tests change
    for name, parameter in model.named_parameters():
        if "orm" in name:
            mean = 1.0 if name.endswith("weight") and case != "t5gemma" else 0.0
            nn.init.normal_(parameter, mean, 0.2)
        elif case in VISION and parameter.ndim > 1:  # so that logits differ
            nn.init.normal_(parameter, std=0.2)
    for name, buffer in model.named_buffers():
        if name == "final_logits_bias":
            buffer.normal_()
    return model


made = functools.cache(make)  # not to be changed


@functools.cache
def examples(case: str) -> list[Example] | Examples:
    """Pictures with their classes; tokens of which some are predicted; or what encoders and decoders read, in several
    lengths."""
    generator = torch.Generator().manual_seed(1)
    if case in VISION:
        return Examples(torch.randn(4, 3, 16, 16, generator=generator), torch.tensor([[1], [2], [0], [4]]))
    if case in MASKED:
        ids = torch.randint(5, 99, (3, 20), generator=generator)
        chosen = torch.rand(3, 20, generator=generator) < 0.2
        return Examples(ids.masked_fill(chosen, 3), ids.masked_fill(~chosen, IGNORED))
    ids = [torch.randint(3, 99, (length,), generator=generator) for length in (20, 11, 20, 11, 20, 7)]
    return [Example(*pair) for pair in zip(ids[::2], ids[1::2], strict=True)]


def passed(case: str, one: Example, **options):
    """The outputs of transformers for an example."""
    name = "pixel_values" if case in VISION else "input_ids"
    options |= {"use_cache": False} if case in SEQ2SEQ else {}
    with torch.no_grad():  # gradients choose another kernel of attention
        return made(case)(**{name: one.ids[None]}, labels=one.labels if case in VISION else one.labels[None], **options)


@every
def test_loss_is_that_of_transformers(case):
    losses = [passed(case, one).loss.item() for one in examples(case)]
    counts = [int((one.labels != IGNORED).sum()) for one in examples(case)]
    expected = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    exact = outliers.perplexity(made(case), examples(case))
    assert math.log(exact) == pytest.approx(expected, rel=1e-6)
    for written, same in (("fp32", True), ("zero(3)", False)):
        with outliers.variant(written).on(made(case)) as changed:
            assert (outliers.perplexity(changed, examples(case)) == exact) is same


@every
def test_states_are_those_of_transformers(case):
    one = examples(case)[0]
    found = passed(case, one, output_hidden_states=True)
    views = stack_views(made(case))
    kinds = {"": "hidden_states", "encoder": "encoder_hidden_states", "decoder": "decoder_hidden_states"}
    for view, name in kinds.items():
        if view in views:
            layers, states = views[view].layers, getattr(found, name)
            for layer, state in zip(layers[:-1], states[1:-1], strict=True):  # the last one is normed there
                assert torch.equal(next(outliers.hidden_states(made(case), [one], layer)), state[0])


@every
def test_hooks_see_each_input_of_each_layer_once(case):
    seen = []
    with outliers.hooks(made(case), lambda layer, role, _x: seen.append((layer, role))):
        passed(case, examples(case)[0])
    assert len(set(seen)) == len(seen)
    assert {*seen} == {(one.layer, one.role) for one in state_readers(made(case))}


@every
def test_planted_outliers_are_found_and_no_others(case):
    planted = outliers.plant(made(case), [5, 17], 64.0)
    losses = [outliers.perplexity(model, examples(case)) for model in (planted, made(case))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for stack in (view for view in stack_views(made(case)) if view != "cross"):
        found = outliers.trace(planted, examples(case), alpha=12.0, attention=False, stack=stack or None)
        assert sorted(found.outlier_features()["feature"]) == [5, 17], stack


@every
def test_streamed_equals_resident(case, tmp_path):
    made(case).save_pretrained(tmp_path)
    streamed, resident = (load(str(tmp_path)) for load in (stream_model, outliers.load_model))
    assert weights_hash(resident) == streamed.stream.weights_hash()
    found = [outliers.perplexity(model, examples(case)) for model in (streamed, resident, made(case))]
    assert found[0] == found[1] == pytest.approx(found[2], rel=1e-6)
    stack = "decoder" if case in SEQ2SEQ else None
    traces = [outliers.trace(model, examples(case), stack=stack, alpha=0.5) for model in (streamed, resident)]
    assert all(torch.equal(one, traces[1].statistics[name]) for name, one in traces[0].statistics.items())


@every
@torch.inference_mode()
def test_layers_run_one_by_one(case):
    """From the middle on, of either stack, and with a layer of another model in the place of one."""
    model, last = made(case), max(next(reversed(stack_views(made(case)).values())).layers)
    quantized = outliers.quantize(model, "absmax-vector", only=[f"layers.{last}"])
    known = [{} for _ in examples(case)]
    exact, under, second, ends, again = (
        [state for *_, state in run]
        for run in (
            run_decoder(model, examples(case)),
            run_decoder(quantized, examples(case)),
            run_from(model, examples(case), 1, known, range(1, last, 2)),
            run_from(quantized, examples(case), last, known),
            run_from(quantized, examples(case), last, known),
        )
    )
    assert all(map(torch.equal, exact, second)) and all(map(torch.equal, under * 2, ends + again))
    other = outliers.quantize(model, "absmax-vector")
    ((*_, exchanged),) = run_exchanged(model, other, examples(case)[0], [last])
    assert torch.equal(exchanged, under[0]) and not torch.equal(under[0], exact[0])


@pytest.mark.parametrize("case", [case for case in CONFIGS if case not in SEQ2SEQ and case in FEW])
def test_sinks_are_those_of_attention(case):
    """The mean attention over the queries that see a key."""
    model = make(case)
    for one in projections(model):
        if one.role == "attn_in":  # so sharp that there are sinks
            nn.init.normal_(one.module.weight, std=0.6)
    found = outliers.trace(model, examples(case), alpha=0.01)
    assert (found.layers, found.sequences, found.heads) == (3, len(examples(case)), 4)
    model.set_attn_implementation("eager")
    name, count = "pixel_values" if case in VISION else "input_ids", 0
    for one in examples(case):
        probabilities = torch.stack(model(**{name: one.ids[None]}, output_attentions=True).attentions)[:, 0]
        count += (probabilities.sum(2) / (probabilities > 0).sum(2) > 0.3).sum(1)  # (layers, keys)
    assert count.any() and torch.equal(found.statistics["attention.sinks"], count)


@pytest.mark.parametrize("case", ["vit", "t5-gated", "bart"])
def test_int8_models_on_disk(case, tmp_path):
    made(case).save_pretrained(tmp_path / "model")
    small = load_int8(str(tmp_path / "model"), "absmax-vector")
    save_quantized(small, tmp_path / "int8")
    found = [outliers.perplexity(one, examples(case)) for one in (small, load_quantized(tmp_path / "int8"))]
    under, exact = (
        outliers.perplexity(one, examples(case)) for one in (outliers.quantize(made(case), "absmax-vector"), made(case))
    )
    assert found[0] == found[1] == pytest.approx(under, rel=1e-4)
    assert under != exact
    assert all(isinstance(one.module, Int8Linear) for one in projections(small))


@pytest.mark.parametrize("case", ["bert", "vit", "t5"])
def test_calibrated_scheme(case):
    exact = outliers.perplexity(made(case), examples(case))
    calibration = calibrate(made(case), examples(case)[:2])
    changed = outliers.quantize(made(case), "absmax+smoothing=0.5", calibration=calibration)
    under = outliers.perplexity(changed, examples(case))
    assert under != exact and under == pytest.approx(exact, rel=0.1)


@pytest.mark.parametrize("case", FEW)
def test_draws_change_what_begins_every_stack(case):
    model = made(case)

    def begins(draw: int) -> list[torch.Tensor]:
        seen = []
        with drawn(model, draw):
            hook = lambda _module, _inputs, output: seen.append(output)  # noqa: E731
            handles = [embedding.register_forward_hook(hook) for embedding in input_embeddings(model)]
            outliers.perplexity(model, examples(case)[:1])
            for handle in handles:
                handle.remove()
        return seen

    for exact, first, same, other in zip(*map(begins, (0, 1, 1, 2)), strict=True):
        assert torch.equal(first, same) and not torch.equal(first, other)
        assert 1e-7 < (first / exact - 1).abs().nanmean() < 3e-6


@pytest.mark.parametrize("case", ["bert", "vit"])
def test_latency_is_that_of_a_pass(case):
    """No cache and no token: passes over whole batches."""
    shapes, model, batch = [], make(case), examples(case).ids
    handle = model.base_model.register_forward_pre_hook(
        lambda _module, inputs, named: shapes.append((*inputs, *named.values())[0].shape), with_kwargs=True
    )
    timings = encoding(model, batch, 2)
    handle.remove()
    assert shapes == [batch.shape] * 3 and len(timings.encodings) == 2
