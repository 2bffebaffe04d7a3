"""The recipe of the pocket family, and the losses that its cards say."""

import json
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    ViTImageProcessorPil,
)

import outliers
from outliers.models.anatomy import family_of
from outliers.models.load import load_model, load_tokenizer
from outliers.models.names import POCKET, pocket_models
from outliers.models.pocket.ladder import CONTEXT, LADDER, STEPS
from outliers.subjects.masked import masked_text
from outliers.subjects.seq2seq import span_corrupted
from outliers.subjects.vision import digits, pictures
from outliers.trainer.corpus import blocks_in_order, wikitext_articles
from outliers.trainer.loop import learning_rate
from outliers.trainer.start import build_config
from tests.conftest import C4, needs_shared

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import train_pocket  # noqa: F401, the configurations of all rungs

OBJECTIVES = {name: LADDER[name.removeprefix("pocket/")].objective for name in pocket_models()}
MADE_BY = {"masked tokens": AutoModelForMaskedLM, "corrupted spans": AutoModelForSeq2SeqLM}
READ = {"masked tokens": masked_text, "corrupted spans": span_corrupted}


@pytest.mark.parametrize("name", pocket_models())
def test_shipped_models_have_the_shape_of_their_recipe(name):
    config = build_config(LADDER[name.removeprefix("pocket/")])
    recipe = family_of(config).made_by.from_config(config)
    shipped = load_model(name)
    assert {n: p.shape for n, p in shipped.named_parameters()} == {n: p.shape for n, p in recipe.named_parameters()}


def test_learning_rate_warms_up_and_ends_at_zero():
    rates = [learning_rate(step, 3e-3, STEPS) for step in range(STEPS + 1)]
    assert rates[0] == pytest.approx(3e-5)
    assert max(rates) == pytest.approx(3e-3, rel=0.01)
    assert rates.index(max(rates)) in (98, 99, 100)
    assert rates[-1] == pytest.approx(0, abs=1e-9)


def test_batches_are_the_text_in_another_order():
    ids = np.arange(40 * CONTEXT, dtype=np.uint16)
    first, again, other = (blocks_in_order(ids, 25, 4, seed).astype(int) for seed in (0, 0, 1))
    assert (first == again).all() and not (first == other).all(), "the order is seeded"
    assert first.shape == (25 * 4, CONTEXT)
    assert (np.diff(first) == 1).all(), "each block is a piece of the text"
    assert len(set(first[: 9 * 4, 0])) == 9 * 4, "no block twice in an epoch"
    assert (blocks_in_order(ids, 10, 4) == first[: 10 * 4]).all(), "a longer training begins as a shorter one"
    with pytest.raises(outliers.UserError, match="has 3 blocks of 10 tokens, and a step takes 4; "):
        blocks_in_order(np.zeros(42, np.uint16), 1, 4, block=10)


def test_wikitext_is_detokenised():
    body = 'He said " yes " ( twice ) , for 1 @,@ 000 @.@ 5 well @-@ known reasons ; it \'s done . ' * 4
    text = f" = First = \n \n {body}\n \n = = Part = = \n \n {body}\n = Second = \n {body}\n"
    articles = wikitext_articles(text)
    assert [article.split("\n")[0] for article in articles] == ["= First =", "= Second ="]
    assert 'He said "yes" (twice), for 1,000.5 well-known reasons; it\'s done.' in articles[0]
    assert "= = Part = =" in articles[0]


# Models of other families: their losses by transformers alone, and what their cards say.


def card(name: str) -> str:
    return (POCKET / name.removeprefix("pocket/") / "README.md").read_text(encoding="utf-8")


def test_loss_of_pictures_is_that_of_transformers_and_of_the_card():
    """Of all that are held out: scikit-learn's own pictures, the processor and the model of transformers."""
    (name,) = [name for name, objective in OBJECTIVES.items() if objective == "pictures"]
    folder, held_out = POCKET / name.removeprefix("pocket/"), digits(held_out=True)
    model = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32)
    pixels = ViTImageProcessorPil.from_pretrained(folder)(list(held_out.pictures), return_tensors="pt").pixel_values
    labels = torch.from_numpy(held_out.digits)
    with torch.no_grad():
        found = model(pixel_values=pixels, labels=labels)
    right = (found.logits.argmax(-1) == labels).float().mean().item()
    assert f"| {right:.1%}, {found.loss.item():.3f} |" in card(name)
    ours = load_model(name)
    text = pictures("sample", ViTImageProcessorPil.from_pretrained(folder), ours.config)
    assert math.log(outliers.perplexity(ours, text)) == pytest.approx(found.loss.item(), rel=1e-6)


@pytest.mark.nightly("outliers/models/pocket/")
@needs_shared
@pytest.mark.parametrize("name", [name for name, objective in OBJECTIVES.items() if objective in READ])
def test_card_of_text_is_measured(name, tmp_path):
    """The perplexity on rows of C4 that the model has not learnt, by transformers alone."""
    rows = [json.loads(row)["text"] for row in C4.read_text(encoding="utf-8").splitlines()[900:]]
    objective = OBJECTIVES[name]
    text = READ[objective](rows, load_tokenizer(name), CONTEXT, 64)
    model = MADE_BY[objective].from_pretrained(POCKET / name.removeprefix("pocket/"), dtype=torch.float32)
    with torch.no_grad():
        losses = [model(input_ids=one.ids[None], labels=one.labels[None]).loss.item() for one in text]
    said = float(re.search(r"\| perplexity of [^|]*\| ([\d.]+) \|", card(name))[1])
    assert math.exp(sum(losses) / 64) == pytest.approx(said, abs=0.0051)
