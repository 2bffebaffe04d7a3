"""Continuations of a text, against greedy decoding by plain forward passes."""

import pytest
import torch

import outliers
from outliers.metrics.continuation import continued
from outliers.metrics.records import Continuation
from outliers.views.continuation import continuation_section

FIELDS = {"models": ["pocket/gpt2-0.1m"], "text": "sample", "block": 32, "blocks": 1}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    cells = outliers.Cells(metrics=[Continuation(prompt=12, tokens=6)], variants=["fp32", "w4"], **FIELDS)
    return outliers.run(cells, tmp_path_factory.mktemp("rows"))


def greedy(model, ids: list[int], tokens: int) -> list[int]:
    with torch.no_grad():
        for _ in range(tokens):
            ids = [*ids, model(torch.tensor([ids])).logits[0, -1].argmax().item()]
    return ids[-tokens:]


def test_each_token_is_the_most_probable_one(rows):
    model, tokenizer = (load(FIELDS["models"][0]) for load in (outliers.load_model, outliers.load_tokenizer))
    prompt = outliers.load_text("sample", tokenizer, block=32, blocks=1)[0, :12].tolist()
    for row, changed in zip(rows, (model, outliers.quantize(model, "w4")), strict=True):
        assert row["prompt_text"] == tokenizer.decode(prompt)
        assert row["continuation_ids"] == greedy(changed, prompt, 6)
        assert row["continuation"] == tokenizer.decode(row["continuation_ids"])


def test_the_table_says_where_a_continuation_departs(rows):
    exact, other = rows[0], rows[1] | {"continuation_ids": [*rows[0]["continuation_ids"][:2], -1]}
    section = continuation_section([exact, other])
    assert [row[1] for row in section.tables[0].cells] == ["6", "2"]
    assert section.findings[0].text == "Under w4 gpt2-0.1m continues a text with other tokens, from token 3 on."


def test_a_prompt_leaves_room_in_the_context(tmp_path):
    cells = outliers.Cells(metrics=[Continuation(prompt=128, tokens=250)], **FIELDS | {"block": 128})
    (row,) = outliers.run(cells, tmp_path)
    assert row["value"] == 250


def test_several_tokens_may_end_a_text():
    model = outliers.load_model("pocket/gpt2-0.1m")
    prompt = torch.arange(3, 19)
    usual = continued(model, prompt, 4)
    model.config.eos_token_id = [usual[1], usual[2]]
    assert continued(model, prompt, 4) == usual[: 1 + min(map(usual.index, usual[1:3]))]
