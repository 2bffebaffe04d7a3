"""What the rungs of other families learn: corrupted spans, masked tokens and pictures; the same loop trains them."""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from outliers.config.recipe import Recipe
from outliers.models.anatomy.examples import IGNORED
from outliers.models.pocket.ladder import CONTEXT, LADDER, VOCABULARY
from outliers.subjects.vision import HELD_OUT, digits
from outliers.text.corruption import sentinels_of
from outliers.text.documents import sample
from outliers.trainer.corpus import blocks_in_order
from outliers.trainer.loop import learning_rate, train
from outliers.trainer.optimizers import optimizer_of
from tests.text.test_seq2seq_text import put_together

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from train_pocket import OBJECTIVES, begin

OTHERS = {rung.objective: name for name, rung in LADDER.items() if rung.objective != "next tokens"}


@pytest.fixture(autouse=True)
def _not_compiled():
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Of each objective, of the embedded text."""
    folder = tmp_path_factory.mktemp("texts")
    c4, wikitext = folder / "c4.jsonl", folder / "wikitext.txt"
    c4.write_text("\n".join(json.dumps({"text": text}) for text in sample()))
    wikitext.write_text("\n".join(f" = {number} = \n {text}" for number, text in enumerate(sample())))
    return {name: OBJECTIVES[name].prepare(c4, wikitext, folder) for name in OTHERS}


def examples(corpora, objective, seed=0, **fields):
    recipe = Recipe(start=OTHERS[objective], **{"steps": 20, "batch": 4} | fields)
    return OBJECTIVES[objective].examples(corpora[objective], recipe, seed)


def tokenizer(corpora, objective):
    return PreTrainedTokenizerFast.from_pretrained(corpora[objective].folder)


@pytest.mark.parametrize(
    ("objective", "around"), [("corrupted spans", ("", "</s>")), ("masked tokens", ("[CLS]", "[SEP]"))]
)
def test_special_tokens_come_first_and_stand_around_a_text(corpora, objective, around):
    found, text = tokenizer(corpora, objective), "A recipe for 2 loaves: flour, water & salt.\n"
    ids = found(text)["input_ids"]
    assert found.decode(ids) == text.join(around) and len(found) <= VOCABULARY
    assert found.decode(ids, skip_special_tokens=True) == text
    assert sorted(found.all_special_ids) == list(range(len(found.all_special_ids)))
    assert found.pad_token_id == 0 and corpora[objective].ids[-1] == found.eos_token_id


def test_spans_are_those_of_the_blocks(corpora):
    seen, again, other = (examples(corpora, "corrupted spans", seed) for seed in (0, 0, 1))
    assert torch.equal(seen.ids, again.ids) and not torch.equal(seen.ids, other.ids)
    assert seen.ids.shape == (80, CONTEXT)
    reader = tokenizer(corpora, "corrupted spans")
    marks = set(sentinels_of(reader).tolist())
    assert len(marks) == 32
    texts = [
        put_together([*ids], [*labels], marks)
        for ids, labels in zip(seen.ids.tolist(), seen.labels.tolist(), strict=True)
    ]
    blocks = blocks_in_order(corpora["corrupted spans"].ids, 20, 4, 0, len(texts[0]))
    assert texts == blocks.tolist()
    assert len({tuple(row.index(mark) for mark in marks if mark in row) for row in seen.ids.tolist()}) == 80, "anew"


def test_masks_are_those_of_bert(corpora):
    seen, again = (examples(corpora, "masked tokens", batch=64) for _ in range(2))
    assert torch.equal(seen.ids, again.ids) and torch.equal(seen.labels, again.labels)
    blocks = torch.from_numpy(blocks_in_order(corpora["masked tokens"].ids, 20, 64, 0, CONTEXT - 2).astype(np.int64))
    reader, inner, labels = tokenizer(corpora, "masked tokens"), seen.ids[:, 1:-1], seen.labels[:, 1:-1]
    assert (seen.ids[:, 0] == reader.cls_token_id).all() and (seen.ids[:, -1] == reader.sep_token_id).all()
    asked = labels != IGNORED
    assert (asked.sum(1) == round(0.15 * (CONTEXT - 2))).all() and not (seen.labels[:, [0, -1]] != IGNORED).any()
    assert torch.equal(inner[~asked], blocks[~asked]) and torch.equal(labels[asked], blocks[asked])
    masked, kept = inner[asked] == reader.mask_token_id, inner[asked] == labels[asked]
    count = asked.sum().item()
    assert masked.sum() / count == pytest.approx(0.8, abs=0.01)
    assert (~masked & ~kept).sum() / count == pytest.approx(0.1, abs=0.01)
    exchanged = inner[asked][~masked & ~kept]
    assert exchanged.unique().numel() > 0.5 * len(reader), "by any tokens"


def test_pictures_are_seen_once_an_epoch_and_held_out_ones_never(corpora):
    seen, held_out = digits(False), digits(True)
    every = {one.tobytes() for one in seen.pictures}
    assert len(held_out.digits) == HELD_OUT and len(seen.digits) + HELD_OUT == 1797
    assert not every & {one.tobytes() for one in held_out.pictures}
    found = examples(corpora, "pictures", steps=50, batch=64)
    values = torch.from_numpy(seen.pictures).permute(0, 3, 1, 2) / 127.5 - 1
    places = {one.numpy().tobytes(): number for number, one in enumerate(values)}
    shown = [places[one.numpy().tobytes()] for one in found.ids]
    epoch = len(seen.digits) // 64 * 64
    assert len(set(shown[:epoch])) == epoch
    assert (found.labels.numpy() == seen.digits[shown]).all()
    assert shown[:epoch] != shown[epoch : 2 * epoch]


@pytest.mark.parametrize("objective", OTHERS)
def test_a_step_is_that_of_a_plain_loop(corpora, objective, tmp_path):
    seen = examples(corpora, objective, steps=1)
    recipe = Recipe(start=OTHERS[objective], steps=1, batch=4)
    trained, plain = begin(recipe, 0), begin(recipe, 0)
    before = copy.deepcopy(plain.state_dict())
    train(trained, recipe, seen, tmp_path)
    loss = plain(**{plain.main_input_name: seen.ids, "labels": seen.labels}).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    rate = learning_rate(0, recipe.learning_rate, 1)
    optimizer_of("adamw", plain, rate, recipe.weight_decay).step()
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(trained.state_dict()[name], expected, rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(before[name], expected) for name, expected in plain.state_dict().items())
