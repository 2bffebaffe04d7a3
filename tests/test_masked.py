"""Masked language models."""

import copy
import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    CamembertConfig,
    DebertaV2Config,
    DistilBertConfig,
    ElectraConfig,
    ModernBertConfig,
    PreTrainedTokenizerFast,
    RobertaConfig,
    XLMRobertaConfig,
)

import outliers
from outliers.errors import UserError
from outliers.models.anatomy import anatomy_of, projections
from outliers.models.anatomy.examples import IGNORED
from outliers.models.decoder import run_decoder, run_from
from outliers.models.stream import stream_model
from outliers.quantization.calibration import calibrate
from outliers.specification.kinds import Settings
from outliers.subjects.causal import Causal
from outliers.subjects.masked import masked_text
from outliers.subjects.served import Served

SHAPE = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 99}
WORDS = "abcdefghijklmnopqrstuvwxyz"
# As of the larger DeBERTa-v2: distances are projected as states are, in buckets, and a convolution follows layer 0.
DISENTANGLED = {
    "relative_attention": True,
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 10,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
CONFIGS = {
    "bert": BertConfig(**SHAPE, intermediate_size=64),
    "roberta": RobertaConfig(**SHAPE, intermediate_size=64),
    "xlm-roberta": XLMRobertaConfig(**SHAPE, intermediate_size=64),
    "camembert": CamembertConfig(**SHAPE, intermediate_size=64),
    "deberta-v2": DebertaV2Config(**SHAPE, **DISENTANGLED, intermediate_size=64, conv_kernel_size=3),
    "deberta-v3": DebertaV2Config(**SHAPE, **DISENTANGLED, intermediate_size=64, legacy=False),
    "electra": ElectraConfig(**SHAPE, intermediate_size=64, embedding_size=16),
    "distilbert": DistilBertConfig(dim=32, n_layers=3, n_heads=4, hidden_dim=64, vocab_size=99),
    "modernbert": ModernBertConfig(
        **SHAPE, intermediate_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2
    ),
}


def tokenizer(**special):
    vocabulary = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *WORDS]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    usual = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", **usual | special)


@pytest.fixture(params=CONFIGS)
def model(request):
    torch.manual_seed(0)
    made = AutoModelForMaskedLM.from_config(copy.deepcopy(CONFIGS[request.param])).eval()  # which tests change
    for name, parameter in made.named_parameters():  # so that no layer norm is that of a fresh model
        if "orm" in name:
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("weight") else 0.0, 0.2)
    return made


@pytest.fixture
def text():
    return masked_text([" ".join(WORDS)] * 4, tokenizer(), 20)


def test_loss_is_that_of_transformers(model, text):
    losses = [model(input_ids=one.ids[None], labels=one.labels[None]).loss.item() for one in text]
    assert math.log(outliers.perplexity(model, text)) == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def test_states_are_those_of_transformers(model, text):
    states = model(input_ids=text[0].ids[None], output_hidden_states=True).hidden_states
    between = anatomy_of(model.config).between  # what layer 1 reads is more than layer 0 puts out
    places = [(1, "attn_in") if between else (0, "residual"), (1, "residual")]
    found = [next(outliers.hidden_states(model, [text[0]], *place)) for place in places]
    assert all(torch.equal(one, state[0]) for one, state in zip(found, states[1:], strict=False))


def test_states_from_a_layer_on(model, text):
    whole = [state for _, _, state in run_decoder(model, text)]
    known = [{} for _ in text]
    with torch.inference_mode():
        for first in (1, 2):
            found = [state for _, _, state in run_from(model, text, first, known)]
            assert all(map(torch.equal, found, whole))


def test_planted_outliers_are_found_and_no_others(model, text):
    planted = outliers.plant(model, [5, 17], 64.0)
    assert outliers.perplexity(planted, text) == pytest.approx(outliers.perplexity(model, text), rel=1e-5)
    assert sorted(outliers.trace(planted, text, attention=False).outlier_features()["feature"]) == [5, 17]


@pytest.mark.parametrize("part", ["attention.self.key", "output.dense"])
def test_planting_without_biases(part):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(copy.deepcopy(CONFIGS["bert"])).eval()
    model.bert.encoder.layer[1].get_submodule(part).bias = None
    with pytest.raises(UserError, match="have no biases"):
        outliers.plant(model, [3], 8)


def test_trace_and_attention(model, text):
    for one in projections(model):
        if one.role == "attn_in":  # so sharp that there are sinks
            torch.nn.init.normal_(one.module.weight, std=0.6)
    found = outliers.trace(model, text, alpha=0.01)
    assert (found.layers, found.sequences, found.heads) == (3, len(text), 4)
    model.set_attn_implementation("eager")
    attentions = [model(input_ids=one.ids[None], output_attentions=True).attentions for one in text]
    received = torch.stack([torch.stack(of_one)[:, 0].mean(2) for of_one in attentions])  # over all queries
    expected = (received > 0.3).sum((0, 2))
    assert expected.any() and torch.equal(found.statistics["attention.sinks"], expected)


def test_calibrated_scheme(model, text):
    found = calibrate(model, text[:2])
    assert torch.equal(found.blocks, text.ids[:2])
    with outliers.variant("absmax+smoothing=0.5").calibrated(found).on(model) as changed:
        assert outliers.perplexity(changed, text) == pytest.approx(outliers.perplexity(model, text), rel=0.05)


def test_streamed_equals_resident(model, text, tmp_path):
    model.save_pretrained(tmp_path)
    found = [outliers.perplexity(load(str(tmp_path)), text) for load in (stream_model, outliers.load_model)]
    assert found[0] == found[1] == outliers.perplexity(model, text)


@pytest.mark.parametrize("scheme", ["absmax", "absmax-vector", "llm.int8"])
def test_schemes(model, text, scheme):
    exact = outliers.perplexity(model, text)
    under = outliers.perplexity(outliers.quantize(model, scheme), text)
    assert under != exact and under == pytest.approx(exact, rel=0.05)


def test_ablation_of_nothing_changes_no_bit(model, text):
    with outliers.variant("fp32").on(model) as same:
        assert outliers.perplexity(same, text) == outliers.perplexity(model, text)


def test_masks_are_those_of_the_seed():
    one, same, other = (masked_text([" ".join(WORDS)] * 4, tokenizer(), 20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.labels, same.labels) and not torch.equal(one.labels, other.labels)
    asked = one.labels != IGNORED
    assert (asked.sum(1) == round(0.15 * 18)).all() and (one.ids[asked] == 3).all()
    assert (one.ids[:, 0] == 1).all() and (one.ids[:, -1] == 2).all() and not asked[:, [0, -1]].any()


def test_no_mask_token():
    with pytest.raises(UserError, match="no mask token"):
        masked_text(["a b c d e f"], tokenizer(mask_token=None), 4)


@pytest.mark.parametrize(
    ("kind", "option", "message"),
    [
        (Causal, {"bos": True}, "leave --bos out"),
        (Causal, {"block": 3}, "at least 4"),
        (Causal, {}, ""),
        (Served, {}, "which generates text"),
    ],
)
def test_subject(tmp_path, kind, option, message):
    torch.manual_seed(0)
    AutoModelForMaskedLM.from_config(BertConfig(**SHAPE, intermediate_size=64)).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text(" ".join(WORDS) * 20)
    settings = Settings(name="x", text=str(tmp_path / "text.txt"), **{"block": 20, "blocks": 2} | option)
    subject = kind(str(tmp_path), None, settings)
    if message:
        with pytest.raises(UserError, match=message):
            subject.prepare()
    else:
        assert subject.blocks.shape == (2, 20)


def test_mask_seed_of_a_causal_model():
    with pytest.raises(UserError, match="leave --mask-seed out"):
        Causal("pocket/gpt2-0.1m", None, Settings(name="x", mask_seed=1)).prepare()
