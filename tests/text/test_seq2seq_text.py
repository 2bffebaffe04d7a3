"""What encoder-decoders read and predict: span corruption as T5's, and blocks of which the first half is read."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from outliers.errors import UserError
from outliers.subjects.seq2seq import prefixed, span_corrupted
from outliers.text.corruption import Spans, corrupted, sentinels_of

WORDS = [f"w{number}" for number in range(40)]
END, FIRST = 1, 2  # </s>, <extra_id_0>
TEXT = torch.arange(FIRST + 30, FIRST + 30 + 4000) % 1000 + 100


def tokenizer(sentinels: int = 30, template: str = "$A </s>", **special) -> PreTrainedTokenizerFast:
    marks = [f"<extra_id_{number}>" for number in range(sentinels)]
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", *marks, "<s>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [(token, vocabulary[token]) for token in ("<s>", "</s>")]
    inner.post_processor = processors.TemplateProcessing(template, special_tokens=ends)
    usual = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<pad>"}
    return PreTrainedTokenizerFast(tokenizer_object=inner, **usual | special)


def put_together(read: list[int], targets: list[int], sentinels: set[int]) -> list[int]:
    """The text of which both were made: in the place of each sentinel what follows it in the other."""
    assert read.pop() == targets.pop() == END
    spans, behind = {}, None
    for token in targets:
        if token in sentinels:
            behind = spans.setdefault(token, [])
        else:
            behind.append(token)
    assert list(spans) == [token for token in read if token in sentinels], "the same ones, in the same order"
    return [one for token in read for one in (spans[token] if token in sentinels else [token])]


@given(st.integers(2, 700), st.integers(0, 2**32))
def test_what_is_read_and_what_is_predicted_give_the_text_back(tokens, seed):
    text, marks = torch.arange(1000, 1000 + tokens), torch.arange(FIRST, FIRST + 50)
    read, targets = corrupted(text, marks, torch.tensor([END]), torch.Generator().manual_seed(seed))
    spans = Spans.of(tokens)
    assert (len(read), len(targets)) == (spans.encoder_tokens, spans.targets)
    kept = [token in set(marks.tolist()) for token in read.tolist()[:-1]]
    assert not kept[0] and kept[-1], "what is kept comes first, a span last"
    assert not any(one and other for one, other in itertools.pairwise(kept)), "no two spans touch"
    assert put_together(read.tolist(), targets.tolist(), set(marks.tolist())) == text.tolist()


@given(st.integers(20, 5000))
def test_share_and_length_of_spans(tokens):
    _, predicted, spans = Spans.of(tokens)
    assert abs(predicted / tokens - 0.15) <= 0.5 / tokens + 1e-12
    assert abs(predicted / spans - 3) <= 1.5 / spans
    assert spans < predicted


@given(st.integers(3, 3000))
def test_the_encoder_reads_exactly_a_block(block):
    spans = Spans.fit(block)
    assert spans.encoder_tokens == block == Spans.of(spans.tokens + 1).encoder_tokens - 1


def test_lengths_are_those_of_t5():
    """Raffel et al. cut 568 tokens of which the encoder reads 512, and the decoder predicts 114."""
    spans = Spans.fit(512)
    assert (spans.tokens, spans.targets) == (568, 114)


def test_all_cuts_are_as_likely():
    """Of 33 tokens five are predicted, in two spans; the first has one to four of them, each as often."""
    generator, marks = torch.Generator().manual_seed(0), torch.tensor([FIRST, FIRST + 1])
    drawn = [corrupted(torch.arange(100, 133), marks, torch.tensor([END]), generator)[1].tolist() for _ in range(4000)]
    first = torch.tensor([targets.index(FIRST + 1) - 1 for targets in drawn])
    counts = torch.bincount(first, minlength=5)
    assert counts[1:5].sum() == 4000 and ((counts[1:5] - 1000).abs() < 150).all()


def test_spans_are_those_of_the_seed():
    one, same, other = (span_corrupted(TEXT, tokenizer(), 128, 3, seed) for seed in (1, 1, 2))
    assert torch.equal(one.ids, same.ids) and torch.equal(one.labels, same.labels)
    assert not torch.equal(one.ids, other.ids) and not torch.equal(one.labels, other.labels)
    assert one.ids.shape == (3, 128) and one.labels.shape == (3, 29)
    fewer = span_corrupted(TEXT, tokenizer(), 128, 2, 1)
    assert torch.equal(fewer.ids, one.ids[:2]), "block by block"
    marks = set(sentinels_of(tokenizer()).tolist())
    for number, example in enumerate(one):
        found = put_together(example.ids.tolist(), example.labels.tolist(), marks)
        assert found == TEXT[141 * number :][:141].tolist()


@pytest.mark.parametrize("pattern", ["<extra_id_{}>", "▁<extra_id_{}>"])
def test_sentinels_are_in_their_order_whatever_their_ids(pattern):
    """T5's and mT5's go down, and more than ten of them are no alphabet."""
    vocabulary = {pattern.format(number): 100 - number for number in range(12)} | {"<extra_id_x>": 1, "</s>": 0}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="</s>"))
    found = sentinels_of(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>"))
    assert found.tolist() == list(range(100, 88, -1))


@pytest.mark.parametrize(
    ("template", "before", "after"), [("$A </s>", [], ["</s>"]), ("<s> $A </s>", ["<s>"], ["</s>"]), ("$A", [], [])]
)
def test_half_of_a_block_is_read_between_its_ends(template, before, after):
    reader = tokenizer(template=template)
    found = prefixed(TEXT, reader, 17, 2)
    around = len(before) + len(after)
    ends = [reader.convert_tokens_to_ids(tokens) for tokens in (before, after)]
    assert found.ids.shape == (2, 8) and found.labels.shape == (2, 9)
    for number, (read, predicted) in enumerate(found):
        cut = TEXT[number * (17 - around) :][: 17 - around].tolist()
        assert read.tolist() == [*ends[0], *cut[: 8 - around], *ends[1]]
        assert predicted.tolist() == cut[8 - around :]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: span_corrupted(TEXT, tokenizer(0), 128), "no sentinels"),
        (lambda: span_corrupted(TEXT, tokenizer(eos_token=None), 128), "no sentinels .* or no end"),
        (lambda: span_corrupted(TEXT, tokenizer(), 2), "blocks of 2 tokens; expected at least 3"),
        (lambda: span_corrupted(TEXT, tokenizer(6), 128), "have 7 spans, and the model's tokenizer 6 sentinels"),
        (lambda: span_corrupted(TEXT[:50], tokenizer(), 128), "too short"),
        (lambda: prefixed(TEXT, tokenizer(), 3), "blocks of 3 tokens; expected at least 4"),
    ],
)
def test_mistakes(make, said):
    with pytest.raises(UserError, match=said):
        make()


def test_the_shortest_blocks():
    assert span_corrupted(TEXT, tokenizer(), 3, 1).labels.shape == (1, 3)
    assert prefixed(TEXT, tokenizer(), 4, 1).ids.tolist() == [[int(TEXT[0]), END]]
