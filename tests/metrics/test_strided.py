"""Strided perplexity beside the rules of transformers' documentation and of llama.cpp, by code of their own."""

import math

import pytest
import torch

from outliers import Sweep, load_model, load_text, load_tokenizer, run
from outliers.models.anatomy.causal import CAUSAL
from outliers.text.blocks import cut_text
from tests.metrics.test_losses import exact_losses

MODEL = "pocket/gpt2-0.1m"
BLOCK = 32


@pytest.fixture(scope="module")
def model():
    return load_model(MODEL)


def tokens(count: int) -> torch.Tensor:
    """The first tokens of the sample."""
    return load_text("sample", load_tokenizer(MODEL), BLOCK, -(-count // BLOCK)).flatten()[:count]


def measured(tmp_path, **options) -> dict:
    (row,) = run(Sweep(models=[MODEL], schemes=["fp32"], block=BLOCK, **options), tmp_path)
    return row


@pytest.mark.parametrize("stride", [8, 12, 32])
def test_a_stride_is_the_rule_of_transformers_documentation(stride, model, tmp_path):
    """Windows end a stride apart, and each scores what the one before has not seen; all tokens count once."""
    blocks = 6
    ids = tokens(BLOCK + (blocks - 1) * stride)
    found, ends = [], 0
    for begin in range(0, len(ids), stride):
        end = min(begin + BLOCK, len(ids))
        found.append(exact_losses(model, ids[None, begin:end])[0, -(end - ends) :])
        ends = end
        if end == len(ids):
            break
    row = measured(tmp_path, stride=stride, blocks=blocks)
    new = [min(len(of_block), stride if number else BLOCK) for number, of_block in enumerate(found)]
    assert row["unit_counts"] == new
    assert row["value"] == pytest.approx(math.exp(torch.cat(found).mean()), rel=1e-6)
    assert row["protocol"] == f"first-blocks+stride={stride}"
    # their script weighs each window by one token less than it scores, as its labels are shifted inside the model
    weights = [number - bool(window) for window, number in enumerate(new)]
    theirs = sum(weight * of_block.mean() for weight, of_block in zip(weights, found, strict=True)) / sum(weights)
    means = [total / count for total, count in zip(row["unit_sums"], row["unit_counts"], strict=True)]
    of_units = sum(weight * mean for weight, mean in zip(weights, means, strict=True)) / sum(weights)
    assert of_units == pytest.approx(theirs.item(), rel=1e-6)


def test_the_second_half_of_blocks_is_the_rule_of_llama_cpp(model, tmp_path):
    """Chunks that do not overlap; positions from the middle on predict, so half a chunk less one token is scored."""
    chunks = tokens(5 * BLOCK).view(5, BLOCK)
    scored = exact_losses(model, chunks)[:, BLOCK // 2 :]
    row = measured(tmp_path, scored=BLOCK // 2 - 1, blocks=5)
    assert row["value"] == pytest.approx(scored.mean().exp().item(), rel=1e-6)
    assert sum(row["unit_counts"]) == scored.numel()


def test_bytes_are_of_scored_tokens(tmp_path):
    row = measured(tmp_path, blocks=3, scored=7)
    cut = cut_text("sample", load_tokenizer(MODEL), BLOCK, 3)
    assert row["unit_bytes"] == cut.sizes[:, -7:].sum(1).tolist()


def test_places_are_those_of_labels():
    cut = cut_text("sample", load_tokenizer(MODEL), BLOCK, 3)
    example = cut.windows(8, None)[1]
    ids, places = CAUSAL.targets(example)
    assert places.tolist() == list(range(BLOCK - 8, BLOCK))
    assert ids.equal(cut.ids.flatten()[8 : 8 + BLOCK])


def test_each_block_begins_with_the_first_token():
    tokenizer = load_tokenizer(MODEL)
    cut = cut_text("sample", tokenizer, BLOCK, 3, bos=True)
    windows = cut.windows(8, None)
    assert set(windows.ids[:, 0].tolist()) == {tokenizer.bos_token_id}
    assert windows.ids[1, 1:].equal(cut.ids[:, 1:].flatten()[8 : 8 + BLOCK - 1])
