"""Masked language models."""

import math
import shutil
import statistics

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import outliers
from outliers import UserError, run
from outliers.commands.damage import Damage
from outliers.commands.sweep import Sweep
from outliers.config.experiment import Experiment
from outliers.models.anatomy.examples import IGNORED
from outliers.runs.run import show
from outliers.subjects.causal import ModelWithText
from outliers.subjects.masked import masked_text
from tests.subjects.test_families import make
from tests.typed import refused

WORDS = "abcdefghijklmnopqrstuvwxyz"


def tokenizer(**special):
    vocabulary = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", *WORDS]
    inner = Tokenizer(models.WordLevel({word: number for number, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    usual = {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]", "pad_token": "[PAD]"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", **usual | special)


def test_masks_are_those_of_the_seed():
    one, same, other = (masked_text([" ".join(WORDS)] * 4, tokenizer(), 20, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.labels, same.labels) and not torch.equal(one.labels, other.labels)
    asked = one.labels != IGNORED
    assert (asked.sum(1) == round(0.15 * 18)).all() and (one.ids[asked] == 3).all()
    assert (one.ids[:, 0] == 1).all() and (one.ids[:, -1] == 2).all() and not asked[:, [0, -1]].any()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT with planted features 5 and 17, its tokenizer, and a text."""
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("bert")
    made = make("bert")
    outliers.plant(made, [5, 17], 64.0).save_pretrained(place)
    tokenizer().save_pretrained(place)
    letters = torch.randint(len(WORDS), (2000,), generator=torch.Generator().manual_seed(0))
    (place / "text.txt").write_text(" ".join(WORDS[letter] for letter in letters))
    return place


def settings(folder, kind=Experiment, **options):
    """Of 4 blocks of 22 tokens, 20 of which are words."""
    names = {"model": str(folder), "models": [str(folder)]}
    models = {name: value for name, value in names.items() if name in kind.model_fields}
    return kind(name="x", text=str(folder / "text.txt"), **{"block": 22, "blocks": 4} | models | options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bos": True}, "leave --bos out"),
        ({"block": 3}, "at least 4"),
        ({"block": 513}, "longer than the model's context of 512"),
        ({"objective": "span"}, "is of encoder-decoders"),
        ({"objective": "each", "mask_seed": 1}, "without a seed"),
        ({"objective": "each", "mask_seeds": 2}, "without a seed"),
    ],
)
def test_options_of_others(folder, options, message):
    with pytest.raises(UserError, match=message):
        ModelWithText(str(folder), None, settings(folder, **options)).prepare()


def test_a_subject_whose_tokenizer_has_no_mask_token(monkeypatch, capsys, folder, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "model")
    tokenizer(mask_token=None).save_pretrained(broken)
    for command in ("sweep", "trace", "ablate", "damage", "latency", "measure"):
        assert "no mask token" in refused(monkeypatch, capsys, "--model", broken, command=command)


def test_each_token_between_the_special_ones_is_masked_in_a_sequence_of_its_own():
    assert Experiment(name="x", block=8, blocks=3, objective="each").sequences == 3 * 6


def test_seeds_of_masks(folder):
    """Mean and standard deviation of what each seed gives by itself, on the same text."""
    rows = run(settings(folder, Sweep, mask_seeds=3, mask_seed=5, schemes=["fp32"]), folder / "seeds")
    model, text = outliers.load_model(str(folder)), str(folder / "text.txt")
    found = [outliers.perplexity(model, masked_text(text, tokenizer(), 22, 4, seed)) for seed in (5, 6, 7)]
    (row,) = rows
    assert row["value"] == pytest.approx(statistics.fmean(found), rel=1e-12)
    assert row["standard_deviation"] == pytest.approx(statistics.stdev(found), rel=1e-9) != 0
    assert (row["mask_seeds"], row["mask_seed"], row["protocol"]) == (3, 5, "first-blocks+masked")


def test_what_is_said_of_seeds_of_masks(folder):
    spec = settings(folder, Sweep, mask_seeds=2, blocks=8, schemes=["fp32", "absmax"])
    section = show(spec, folder / "said", run(spec, folder / "said"))
    assert section.drawings[0].caption.endswith("Bars: one standard deviation by text and masks.")
    assert [one.text.partition("beyond ")[2] for one in section.findings] == ["the scatter of text and masks."]
    spec = settings(folder, Damage, mask_seeds=3, blocks=8, schemes=["absmax"], by=["model"])
    findings = show(spec, folder / "damage", run(spec, folder / "damage")).findings
    assert findings[0].text.endswith(", within the scatter of text and masks.")


def test_pseudo_perplexity(folder):
    """Salazar et al., 2020: each token from all others of its block, by transformers alone."""
    (row,) = run(settings(folder, Sweep, objective="each", schemes=["fp32"]), folder / "each")
    model, whole = outliers.load_model(str(folder)), masked_text(str(folder / "text.txt"), tokenizer(), 22, 4)
    whole = torch.where(whole.labels == IGNORED, whole.ids, whole.labels)
    total = 0.0
    for ids in whole:
        masked = ids.repeat(20, 1)
        masked[torch.arange(20), torch.arange(1, 21)] = 3
        logits = model(input_ids=masked).logits[torch.arange(20), torch.arange(1, 21)]
        total += torch.nn.functional.cross_entropy(logits.double(), ids[1:21], reduction="sum").item()
    assert math.log(row["value"]) == pytest.approx(total / 80, rel=1e-6)
    assert row["protocol"] == "first-blocks+each-masked"
