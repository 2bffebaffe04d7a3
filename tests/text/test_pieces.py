"""Tokens of a document in pieces, against those of the whole document."""

import functools
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.models.byt5.tokenization_byt5 import ByT5Tokenizer

from outliers import UserError, load_tokenizer
from outliers.text import pieces
from outliers.text.documents import sample
from tests.conftest import answer_within, in_turn

SPECIAL = ["<unk>", "<s>", "<mask>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BY_THREES = pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")
BLANKS = normalizers.Replace(" ", "▁")
UNKNOWN_BYTES = {"byte_fallback": True, "fuse_unk": True}


def trained(model, trainer, normalizer=None, words=None):
    """A tokenizer whose vocabulary is learned from the embedded text."""
    backend = Tokenizer(model)
    if normalizer:
        backend.normalizer = normalizer
    if words:
        backend.pre_tokenizer = words
    keywords = {"vocab_size": 500, "special_tokens": SPECIAL, "show_progress": False}
    if trainer is trainers.UnigramTrainer:
        keywords["unk_token"] = "<unk>"
    if isinstance(model, models.BPE):
        keywords["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(sample()[:30], trainer(**keywords))
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def byte_pairs(normalizer=None, words=None, **keywords):
    return trained(models.BPE(unk_token="<unk>", **keywords), trainers.BpeTrainer, normalizer, words)


def unigrams(normalizer=None, words=None):
    return trained(models.Unigram(), trainers.UnigramTrainer, normalizer, words)


# Kind of tokenizer: how it is made.
KINDS = {
    "gpt2": lambda: load_tokenizer("pocket/gpt2-0.1m"),
    "roberta": lambda: byte_pairs(words=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": lambda: byte_pairs(
        words=pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]), ignore_merges=True
    ),
    "falcon": lambda: byte_pairs(
        words=pre_tokenizers.Sequence(
            [pre_tokenizers.Punctuation("contiguous"), GPT2, pre_tokenizers.Digits(), BY_THREES]
        )
    ),
    "llama": lambda: byte_pairs(normalizers.Sequence([normalizers.Prepend("▁"), BLANKS]), **UNKNOWN_BYTES),
    "mistral": lambda: byte_pairs(words=pre_tokenizers.Metaspace(prepend_scheme="first", split=False), fuse_unk=True),
    "gemma": lambda: byte_pairs(BLANKS, pre_tokenizers.Split(" ", "merged_with_previous")),
    "xglm": lambda: unigrams(
        normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
        pre_tokenizers.Metaspace(),
    ),
    "t5": lambda: unigrams(
        normalizers.Sequence([normalizers.NFKC(), normalizers.Strip()]),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    ),
    "bert": lambda: trained(
        models.WordPiece(unk_token="<unk>", max_input_chars_per_word=50),
        trainers.WordPieceTrainer,
        normalizers.BertNormalizer(),
        pre_tokenizers.BertPreTokenizer(),
    ),
    "seven characters": lambda: byte_pairs(words=pre_tokenizers.FixedLength(7)),
    "byt5, in Python": ByT5Tokenizer,
}

tokenizer_of = functools.cache(lambda kind: KINDS[kind]())


def whole(text: str, tokenizer) -> list[int]:
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def in_pieces(parts, tokenizer) -> list[int]:
    return list(itertools.chain(*(piece.ids for piece in pieces.tokenize(parts, tokenizer, "a.txt"))))


@pytest.fixture(autouse=True)
def _no_hang():
    with answer_within(300):  # or a piece of nothing follows another without end
        yield


@pytest.fixture
def short(constants):
    """Pieces with 32 characters of overlap, so that short texts have many."""
    constants("outliers.text.pieces", PIECE=256, LONGEST=16 * 256)


RUNS = st.builds(
    lambda what, times: what * times,
    st.sampled_from([*"a =-\n1é漢\t.\u0301\u3000'\"▁\0", "ab", "the ", "\r\n", " \n", "12", "漢字"]),
    st.sampled_from([1, 2, 3, 17, 64, 150, 400]),
)
PROSE = st.builds(
    lambda text, at, size: text[at : at + size], st.sampled_from(sample()), st.integers(0, 400), st.integers(0, 600)
)
PARTS = st.lists(
    RUNS
    | PROSE
    | st.text("0123456789", max_size=100)
    | st.text("ab", max_size=100)
    | st.text(max_size=40)
    | st.sampled_from(["<|endoftext|>", " <mask> ", "</s>", "<unk>"]),
    min_size=25,
    max_size=60,
)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_whole(short, kind):
    """And they stand for all of its bytes."""
    tokenizer = tokenizer_of(kind)
    joined = 0

    @settings(max_examples=30)
    @given(PARTS)
    def check(parts):
        nonlocal joined
        text = "".join(parts)
        try:
            pieces_of_text = list(pieces.tokenize(parts, tokenizer, "a.txt"))
        except UserError:  # one that is refused is not wrong
            return
        joined += len(pieces_of_text) > 1
        ids = [token for piece in pieces_of_text for token in piece.ids]
        assert ids == whole(text, tokenizer)
        if ids and tokenizer.is_fast:
            sizes = np.concatenate([piece.sizes() for piece in pieces_of_text])
            assert (len(sizes), sizes.sum()) == (len(ids), len(text.encode()))
            assert sizes.min() >= 0

    check()
    assert joined >= 15, "hardly any text was cut"


def test_pieces_are_joined_in_the_middle_of_an_eighth_that_both_have(short):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    first = next(pieces.tokenize(["a " * 1000], tokenizer, "a.txt"))
    assert 2 * len(first.ids) == 256 - 256 // 8 // 2


def test_a_word_that_a_unigram_model_weighs_is_not_cut(short):
    """Two ways to split it can cost the same but for the rounding of all that comes before."""
    costs = {"<unk>": -20.0, "a": -2.1, "aa": -3.3, "aaa": -5.4, "b": -2.7, "ab": -4.8, "ba": -4.8}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.Unigram(list(costs.items()), 0)))
    choose = random.Random(0)
    texts = ["".join(choose.choice(["a", "a", "b", "aaaaa"]) for _ in range(3000)) for _ in range(20)]
    for text in texts:
        with pytest.raises(UserError, match=r"of text 'a.txt' is too long: its tokens depend on"):
            in_pieces([text], tokenizer)
        assert in_pieces([text[:3000]], tokenizer) == whole(text[:3000], tokenizer), "it fits where it ends in time"


class SentencePiece(ByT5Tokenizer):
    """A tokenizer that hands texts to that library, as far as can be seen from outside."""

    sp_model = None


def test_what_sentencepiece_splits_is_not_cut(short):
    with pytest.raises(UserError, match="is too long"):
        in_pieces(["words " * 1000], SentencePiece())


@in_turn("kind run", ["gpt2", "llama3", "llama", "seven characters"], ["a", "1", "ab"])
def test_long_runs_are_joined(short, kind, run):
    """Of one character, or of digits by threes: where an overlap begins decides how all of it is split."""
    text = "So it goes. " + run * 9000
    found = [piece.ids for piece in pieces.tokenize([text], tokenizer_of(kind), "a.txt")]
    assert len(found) > 1
    assert list(itertools.chain(*found)) == whole(text, tokenizer_of(kind))


@pytest.mark.parametrize("size", [0, 1, 255, 256, 1023, 1024, 1025, 1279, 1280, 1281, 2000])
def test_every_size(short, size):
    tokenizer, text = tokenizer_of("gpt2"), "".join(sample())[:size]
    for parts in ([text], list(text), text.splitlines(keepends=True)):
        assert in_pieces(parts, tokenizer) == whole(text, tokenizer)


def test_a_tokenizer_without_tokens_ends(short):
    silent = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    with pytest.raises(UserError, match="or it has none"):
        in_pieces(itertools.repeat("words"), silent)


@pytest.mark.parametrize("parts", [("a" * 420, "\r\n" * 400, "<unk>"), ("a" * 420, "<unk>", " " * 900)])
def test_a_special_token_may_swallow_blanks_of_other_pieces(short, parts):
    tokenizer = tokenizer_of("byt5, in Python")
    parts = [*parts, "the end " * 200]
    assert len(list(pieces.tokenize(parts, tokenizer, "a.txt"))) > 1
    assert in_pieces(parts, tokenizer) == whole("".join(parts), tokenizer)
