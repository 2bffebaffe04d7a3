"""Attention whose probabilities come summed, against transformers' own plain products, bit by bit."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from outliers.models import attention
from outliers.models.anatomy import decoder_layers
from outliers.models.attention import eager
from outliers.models.hooks import attention_hooks
from tests.conftest import CONFIGS, every_kind
from tests.small_models import make_model

# Architectures whose attention is no softmax of products under a mask alone, or is not looked up by a name.
OTHERS = {"gptj", "gpt_neo", "bloom", "xglm", "gemma2", "gemma3", "falcon", "mpt", "gpt-oss"}
OTHERS |= {"falcon-rw", "falcon-40b", "falcon-11b"}


def attended(model, ids: torch.Tensor, summed: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The decoder's last hidden states, and the probabilities of each layer, summed or not."""
    seen = []
    with torch.inference_mode(), attention_hooks(model, lambda _, given, *_more: seen.append(given), summed=summed):
        return model.base_model(ids, use_cache=False).last_hidden_state, seen


def assert_same(model, ids: torch.Tensor, is_summed: bool = True) -> None:
    """Outputs bit by bit, and sums but for the order of float32 sums.

    In one of three tries: on a busy machine MKL may take fewer threads for a product, which it then sums otherwise.
    """
    implementation = model.config._attn_implementation
    for _try in range(3):
        (want, whole), (got, seen) = attended(model, ids, False), attended(model, ids, True)
        if torch.equal(got, want):
            break
    assert torch.equal(got, want)
    for summed, probabilities in zip(seen, whole, strict=True):
        assert (summed.shape[2] == 1) == is_summed
        torch.testing.assert_close(summed.sum(2), probabilities.sum(2))
    assert model.config._attn_implementation == implementation


@every_kind
def test_every_architecture(case, blocks):
    if case in ("gemma3", "gemma2"):  # some of whose layers see a window of the keys
        _, seen = attended(make_model(case), blocks[:1], True)
        assert len({given.shape[2] for given in seen}) == (2 if case == "gemma3" else 1)
    else:
        assert_same(make_model(case), blocks[:1], case not in OTHERS)


@pytest.mark.parametrize(("length", "threads"), [(2, 1), (127, 2), (129, 1), (256, 2), (301, 1), (513, 2)])
def test_lengths_of_some_blocks_of_queries(length, threads):
    """With the width of heads of a real model, and fewer keys than queries; the scaling is a power of two, or not."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for width in (64, 80):
            kind, fields = CONFIGS["llama"]
            sizes = {"hidden_size": 4 * width, "num_attention_heads": 4, "head_dim": width}
            sizes |= {"max_position_embeddings": 520, "num_hidden_layers": 1}
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(
                AutoConfig.for_model(kind, **fields | sizes, vocab_size=100)
            ).eval()
            with torch.no_grad():
                decoder_layers(model)[0].self_attn.q_proj.weight *= 100  # attention that differs from key to key
            assert_same(model, torch.randint(100, (1, length), generator=torch.Generator().manual_seed(1)))
    finally:
        torch.set_num_threads(before)


def test_a_cache_with_more_places_gets_a_mask_of_its_own(blocks):
    """And not the one of a sequence as long that attends to itself."""
    model, masks = make_model("llama"), []
    want, _ = attended(model, blocks[:1], False)
    decoder_layers(model)[0].register_forward_pre_hook(
        lambda _module, _given, named: masks.append(named["attention_mask"]), with_kwargs=True
    )
    with torch.inference_mode(), attention_hooks(model, lambda *_: None, summed=True):
        for more in ({"use_cache": False}, {"past_key_values": StaticCache(model.config, max_cache_len=32)}):
            torch.testing.assert_close(model.base_model(blocks[:1], **more).last_hidden_state, want)
    assert [mask.shape[3] for mask in masks] == [24, 32]


@pytest.mark.parametrize("change", ["two sequences", "bfloat16", "padding", "upcast", "one head"])
def test_what_goes_to_the_architectures_own_function(change, blocks):
    model, ids, given = make_model("gpt2"), blocks[:1], {}
    if change == "two sequences":
        ids = blocks[:2]
    elif change == "bfloat16":
        model = model.bfloat16()
    elif change == "padding":
        given = {"attention_mask": (torch.arange(24) < 20)[None].long()}
    elif change == "upcast":
        model.config.reorder_and_upcast_attn = True
    else:
        kind, fields = CONFIGS["gpt2"]
        config = AutoConfig.for_model(kind, **fields | {"n_head": 1}, vocab_size=100)
        model = AutoModelForCausalLM.from_config(config).eval()
    shapes = []
    with attention_hooks(model, lambda _, probabilities, *_more: shapes.append(probabilities.shape), summed=True):
        assert model.config._attn_implementation == ("eager" if change == "upcast" else attention.OURS)
        got = model.base_model(ids, use_cache=False, **given).last_hidden_state
    with eager(model):
        want = model.base_model(ids, use_cache=False, **given).last_hidden_state
    assert torch.equal(got, want)
    assert {shape[2] for shape in shapes} == {24}
