"""Sequences behind tokens that nothing quantizes, which tokens a text names, and positions that nothing attends to."""

from contextlib import nullcontext

import pytest
import torch
from torch.nn import functional
from transformers import DynamicCache

import outliers
from outliers import Calibration, UserError, calibrate, load_model, perplexities, perplexity
from outliers.config.experiment import Experiment
from outliers.models.hooks import attention_hooks
from outliers.models.stream import AS_IT_IS, stream_model
from outliers.subjects.causal import ModelWithText
from outliers.subjects.given import Given
from outliers.subjects.model_cache import ModelCache
from outliers.variants.cached import Prefixed
from outliers.variants.unattended import Unattended
from tests.conftest import C4, FIVE, needs_shared, needs_smollm2, slow_but
from tests.small_models import make_model

TOKENS = (3, 41)
BEHIND = outliers.variant("prefix(3,41)")


def loss(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Perplexity of all but the first token of each sequence."""
    predicted = logits[:, :-1].double().flatten(0, 1)
    return functional.cross_entropy(predicted, ids[:, 1:].flatten()).exp().item()


def joined(blocks: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.tensor([TOKENS]).expand(len(blocks), -1), blocks], 1)


@torch.inference_mode()
def test_a_prefix_is_what_a_model_reads_first(case, blocks):
    model = make_model(case)
    expected = loss(model(joined(blocks)).logits[:, len(TOKENS) :], blocks)
    plain = perplexity(model, blocks)
    with BEHIND.on(model) as behind:
        assert perplexity(behind, blocks) == pytest.approx(expected, rel=1e-5)
    assert abs(expected / plain - 1) > 1e-4
    assert perplexity(model, blocks) == plain, "it is as it was"


@pytest.mark.parametrize("case", ["gpt2", "llama", "mpt"])
@torch.inference_mode()
def test_nothing_quantizes_a_prefix(case, blocks):
    """The quantized model on the exact model's own cache: a scale of the whole tensor does not know of the prefix."""
    model = make_model(case)
    quantized = outliers.quantize(model, "absmax")
    logits = [
        quantized(block[None], past_key_values=model(torch.tensor([TOKENS]), use_cache=True).past_key_values).logits
        for block in blocks
    ]
    with outliers.variant("prefix(3,41)+absmax").on(model) as behind:
        assert perplexity(behind, blocks) == pytest.approx(loss(torch.cat(logits), blocks), rel=1e-6)


@torch.inference_mode()
def test_a_cache_in_few_bits_leaves_the_prefix_exact(blocks):
    """As the format itself leaves the first positions exact."""
    model, places = make_model("llama"), len(TOKENS)
    with outliers.variant(f"kv=int2/first={places}").on(model):
        whole = model(joined(blocks)).logits[:, places:]
    with outliers.variant("prefix(3,41)+kv=int2").on(model) as behind:
        torch.testing.assert_close(behind(blocks).logits, whole)


@torch.inference_mode()
def test_generation_behind_a_prefix(blocks):
    """Token by token, of prompts of several lengths, as of the whole sequence at once."""
    model = make_model("llama")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    prompts, mask = blocks[:2, :9].clone(), torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    with BEHIND.on(model) as behind:
        found = behind.generate(prompts, attention_mask=mask, **options)[:, 9:]
    for sequence, own in zip(found, (prompts[0], prompts[1, 4:]), strict=True):
        expected = model.generate(joined(own[None]), **options)[0, len(own) + len(TOKENS) :]
        assert torch.equal(sequence, expected)


@torch.inference_mode()
def test_positions_are_those_of_the_sequence(blocks):
    """Unattended, the first one is the first behind the prefix."""
    model = make_model("llama")
    with outliers.variant(f"unattended({len(TOKENS)})").on(model):
        expected = model(joined(blocks)).logits[:, len(TOKENS) :]
    with outliers.variant("prefix(3,41)+unattended(0)").on(model) as behind:
        torch.testing.assert_close(behind(blocks).logits, expected)


def calibration(blocks: list[list[int]], outlier_tokens: list[list[list[int]]]) -> Calibration:
    return Calibration(torch.tensor(blocks), {}, torch.tensor(outlier_tokens, dtype=torch.bool))


def test_the_most_frequent_outlier_tokens():
    """Once a position, in however many layers; of equally frequent ones those that the text has more of."""
    text = calibration(
        [[7, 8, 9, 9], [7, 9, 8, 5]],
        [[[1, 0, 0, 0], [1, 0, 0, 0]], [[0, 1, 1, 0], [0, 0, 0, 0]], [[0, 1, 0, 0], [0, 0, 0, 0]]],
    )
    assert text.prefix(3) == (7, 9, 8)
    assert text.prefix() == (7,), "one a block, in the layers with the most"
    more = calibration([[1, 8, 8, 2]], [[[0, 1, 1, 0]], [[0] * 4], [[0] * 4]])
    both = text.merge(more)
    assert both.prefix() == (8, 7), "four in three blocks of the first layer"
    with pytest.raises(UserError, match="3 outlier tokens in 2 blocks of calibration text; expected 4"):
        text.prefix(4)


def test_an_outlier_token_exceeds_64_medians(blocks):
    """Of the tokens of its block, in each layer by itself."""
    model = make_model("gpt2")
    assert not calibrate(model, blocks).outlier_tokens.any()
    read, into = next(outliers.hidden_states(model, blocks, 1, "ffn_in"))[7], model.transformer.h[1].mlp.c_fc
    with torch.no_grad():  # a unit that one token alone lets fire
        into.weight[:, 5], into.bias[5] = 300 * read, -270 * read.square().sum()
    largest = {layer: [] for layer in (0, 1)}
    with outliers.hooks(model, lambda layer, _role, x: largest[layer].append(x.abs().amax(1)), roles=["ffn_out"]):
        perplexity(model, blocks)
    expected = torch.stack([torch.stack([one > 64 * one.median() for one in of]) for of in largest.values()])
    assert torch.equal(calibrate(model, blocks).outlier_tokens, expected)
    assert expected[1, 0, 7] and not expected[0].any()


def test_others_are_calibrated_behind_the_prefix(blocks):
    """What is massive at the first position of a text is so no longer."""
    model, subject = make_model("llama"), Given(make_model("llama"), blocks)
    variant = outliers.variant("prefix(3,41)+w8a8+smoothing")
    subject.calibration = blocks
    model_cache = ModelCache(bar=None)
    model_cache._loaded = model, {}
    (known,) = model_cache.completed([variant], subject)
    with BEHIND.on(model) as behind:
        expected = calibrate(behind, blocks)
    for place, magnitudes in known.variants[1].calibration.magnitudes.items():
        assert torch.equal(magnitudes.inputs, expected.magnitudes[place].inputs)


@pytest.mark.nightly("outliers/variants/")
@needs_shared
@needs_smollm2
def test_a_full_stop_before_each_block_of_c4():
    """Perplexity by forty lines around transformers alone, rounded as they were printed: 40.02."""
    model, tokenizer = outliers.load_model("smollm2-135m"), outliers.load_tokenizer("smollm2-135m")
    (stop,) = tokenizer.encode(".", add_special_tokens=False)
    with outliers.variant(f"prefix({stop})").on(model) as behind:
        assert perplexity(behind, outliers.load_text(str(C4), tokenizer, 512, 4)) == pytest.approx(40.02, abs=0.01)


def test_experts_alone_have_no_outlier_tokens(blocks):
    with pytest.raises(UserError, match="0 outlier tokens in 3 blocks of calibration text; expected 1"):
        calibrate(make_model("mixtral"), blocks).prefix()


def test_a_prefix_is_calibrated_first():
    with pytest.raises(UserError, match="'prefix' needs the outlier tokens; expected their ids"):
        outliers.variant("prefix").on(make_model("gpt2")).__enter__()


@pytest.mark.parametrize("case", ["gemma2", "gpt-oss"])
@torch.inference_mode()
def test_a_prefix_longer_than_the_window(case, blocks):
    model, tokens = make_model(case), blocks[0, :12]
    expected = model(torch.cat([tokens, blocks[1]])[None]).logits[:, len(tokens) :]
    with outliers.variant(f"prefix({','.join(map(str, tokens.tolist()))})").on(model) as behind:
        torch.testing.assert_close(behind(blocks[1][None]).logits, expected)


def test_a_prefix_fits_the_context_with_its_block(blocks):
    model = make_model("gpt2")
    message = "blocks of 63 tokens behind a prefix of 2 exceed the model's context of 64"
    with BEHIND.on(model) as behind, pytest.raises(UserError, match=message):
        behind(torch.zeros(1, 63, dtype=torch.int64))


# Positions that nothing attends to


@pytest.mark.parametrize("case", slow_but([*FIVE, "bloom", "gpt_neo", "mpt", "gemma2"]))
def test_no_later_position_attends(case, blocks, tmp_path):
    """By the probabilities of plain products; fused kernels and a streamed model compute the same."""
    model, seen, some = make_model(case), [], Unattended((0, 3))
    with some.on(model), attention_hooks(model, lambda _layer, found, *_more: seen.append(found)):
        plain = perplexity(model, blocks)
    assert len(seen) == model.config.num_hidden_layers * len(blocks)
    for found in seen:
        assert found[..., 1:, 0].max() == found[..., 4:, 3].max() == 0
        assert found[..., 0, 0].min() > 0
    without, with_all = perplexities(model, blocks, [some, AS_IT_IS])
    assert without == pytest.approx(plain, rel=1e-5) != pytest.approx(with_all, rel=1e-5)
    model.save_pretrained(tmp_path)
    assert perplexities(stream_model(str(tmp_path)), blocks, [some]) == [without]


@pytest.mark.parametrize("case", slow_but(["gpt_neo", "gemma2", "mpt", "llama"], ["gpt_neo", "gemma2"]))
@pytest.mark.parametrize("before", [(), (5, 7)])
def test_no_position_attends_where_earlier_ones_are_cached(case, before, blocks):
    model, ids = make_model(case), blocks[:1]
    with torch.no_grad(), Prefixed(before).on(model) if before else nullcontext(), Unattended((0, 3)).on(model):
        cache = DynamicCache(config=model.config)
        parts = [model(part, past_key_values=cache).logits for part in ids.tensor_split([5, 6], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), model(ids).logits)


def test_a_position_behind_the_text_changes_nothing(blocks):
    without, with_all = perplexities(make_model("gpt2"), blocks, [Unattended((500,)), AS_IT_IS])
    assert without == pytest.approx(with_all, rel=1e-6)


@pytest.mark.parametrize("name", ["pocket/bert-1.4m", "pocket/t5-1.9m"])
def test_no_position_of_an_encoder_attends(name):
    """Where all positions see each other, all others; and the mask stays one that lets them see the rest."""
    model = load_model(name)
    blocks = ModelWithText(name, None, Experiment(name="text", block=32, blocks=2)).blocks
    seen, some = [], Unattended((3,))
    with some.on(model), attention_hooks(model, lambda _layer, found, *_more: seen.append(found)):
        perplexity(model, blocks)
    others = torch.arange(32) != 3
    encoders = [found for found in seen if found.shape[-2:] == (32, 32) and found[..., 0, 1].max() > 0]
    assert len(encoders) == model.config.num_hidden_layers * len(blocks)
    for found in encoders:
        assert found[..., others, 3].max() == 0 < found[..., 3, 3].max()
        assert found[..., 0, 4:].max() > 0
