"""Tokens of a long document, piece by piece, and exactly those of the whole document.

What a tokenizer makes of a text depends on what stands around it: the start of a text may get a space, a word ends
where the text does, and merges can ripple from a cut into the text. But it depends on little of it. So a document is
read in pieces that overlap, and two of them are joined in the middle of their overlap, between two words, if both have
the same tokens in the half of it around the middle: what comes before the overlap, which the second piece
lacks, and what comes after it, which the first one lacks, does not reach there. Where they differ, longer pieces are
tried.

    first piece   --------------------
    second piece              --------------------
    the same                    ====

Some tokenizers have special tokens that swallow all blanks beside them, however many: so something else must follow.

Words are what the model of a tokenizer sees one at a time. Inside a word only byte-pair merges may be cut, which agree
for good once they have made the same token at the same place. A unigram model weighs all ways to split a word against
each other, however long it is.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from tokenizers.models import BPE
from transformers import BatchEncoding, PreTrainedTokenizerBase

from outliers.errors import UserError

PIECE = 2**18  # characters
LONGEST = 16 * PIECE  # of two pieces; a million characters take about 150 MB while they are tokenized
OVERLAPS = 8  # in a piece
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token that is one byte, in a vocabulary of characters


class Piece(NamedTuple):
    """Tokens that follow each other. sizes: called, the UTF-8 bytes that each stands for; None where nobody knows.
    is_end: whether they end a document which has no end of its own."""

    ids: Sequence[int]
    sizes: Callable[[], Sequence[int] | np.ndarray | None] = lambda: None
    is_end: bool = False


def tokenize(parts: Iterable[str], tokenizer: PreTrainedTokenizerBase, name: str) -> Iterator[Piece]:
    """The tokens of one document without special tokens, as many at a time as are known.

    parts: of the document; no more are read than the tokens that are asked for need. name: of the text, for errors.
    """
    pieces = _pieces(parts)
    tokens, done, count = _Tokens(next(pieces, ""), tokenizer), 0, 1
    while following := "".join(itertools.islice(pieces, count)):
        place = tokens.overlap()
        after = _Tokens(tokens.text[place:] + following, tokenizer)
        if joint := _joint(tokens, after, place):
            yield tokens.part(done, joint[0])
            tokens, done, count = after, joint[1], 1
        elif len(tokens.text) + len(following) < LONGEST:
            tokens, count = _Tokens(tokens.text + following, tokenizer), 2 * count
        else:
            raise UserError(
                f"a document of text '{name}' is too long: its tokens depend on more than {LONGEST >> 20} million "
                "characters around them, or it has none; split it into documents of at most 1 million characters, as "
                "the rows of a .jsonl file"
            )
    yield tokens.part(done, None)


def _pieces(parts: Iterable[str]) -> Iterator[str]:
    """Parts joined and cut into pieces of at least `PIECE` characters and less than two, but for the last one."""
    text = ""
    for part in parts:
        for at in range(0, len(part), PIECE):
            text += part[at : at + PIECE]
            if len(text) >= PIECE:
                yield text
                text = ""
    if text:
        yield text


class _Tokens:
    """Token ids of a text, int64 (tokens,), the characters at which they begin, and whether a word does there."""

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase):
        self.text, self.tokenizer, self.encoding = text, tokenizer, _encode(text, tokenizer)
        self.ids = np.array(self.encoding["input_ids"], dtype=np.int64)
        if self.encoding.is_fast:
            starts = np.array(self.encoding.encodings[0].offsets, np.int64).reshape(-1, 2)[:, 0]
            self.starts = np.maximum.accumulate(starts)
            self.words = np.diff(np.array(self.encoding.word_ids(), dtype=np.int64), prepend=-1) != 0
        else:  # one in Python does not say, but has a rule for each word; SentencePiece has a model for all of a text
            self.words = np.full(len(self.ids), not hasattr(tokenizer, "sp_model"))

    def part(self, first: int, last: int | None) -> Piece:
        """Some of the tokens."""
        some = slice(first, last)
        return Piece(self.ids[some].tolist(), partial(_sizes, self.encoding, self.text, self.tokenizer, some))

    def overlap(self) -> int:
        """The character from which the next piece has the text too: of a word, or of a token in a long word.

        In a long run of one character, or of digits that are taken three at a time, tokens would not agree otherwise.
        """
        size = len(self.text) // OVERLAPS
        place = len(self.text) - size
        if self.encoding.is_fast:
            words = self.starts[self.words]
            for starts in (words, self.starts):
                before = starts[: starts.searchsorted(place, "right")]
                if len(before) and place - before[-1] < size:
                    return int(before[-1])
        return place

    def at(self, place: int) -> int:
        """The number of tokens before a character."""
        if self.encoding.is_fast:
            return int(self.starts.searchsorted(place))
        if place < len(self.text) / 2:
            return len(_encode(self.text[:place], self.tokenizer)["input_ids"])
        return len(self.ids) - len(_encode(self.text[place:], self.tokenizer)["input_ids"])


def _joint(before: _Tokens, after: _Tokens, place: int) -> tuple[int, int] | None:
    """The number of tokens that are taken of a piece, and of those left out of the one after it, which begins at a
    character of the first; None if they disagree."""
    size = len(before.text) - place
    marks = [place + size * quarter // 4 for quarter in (1, 2, 3)]
    first, middle, last = (before.at(mark) for mark in marks)
    shift = first - after.at(marks[0] - place)
    ours, theirs = slice(first, last), slice(first - shift, last - shift)
    if not (
        first < middle < last  # what comes last may go on
        and [after.at(mark - place) + shift for mark in marks[1:]] == [middle, last]
        and np.array_equal(before.ids[ours], after.ids[theirs])
        and before.text[marks[1] : marks[2]].strip()
    ):
        return None
    between = np.flatnonzero(before.words[first + 1 : middle + 1])
    if len(between):
        middle = first + 1 + int(between[-1])
    elif not (before.encoding.is_fast and isinstance(before.tokenizer.backend_tokenizer.model, BPE)):
        return None
    return middle, middle - shift


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
    try:
        return tokenizer(text, add_special_tokens=False, verbose=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library of tokenizers raises nothing narrower, and of Rust nothing better
        raise UserError(f"the model's tokenizer cannot split the text ({error}); check its files") from error


def _sizes(encoding: BatchEncoding, text: str, tokenizer: PreTrainedTokenizerBase, part: slice) -> np.ndarray | None:
    """The UTF-8 bytes that each token of a text stands for, int64 (tokens,); None of a tokenizer in Python.

    A token reaches from the end of the one before it to its own, and the last one to the end of the text, so that what
    a tokenizer drops, such as a blank, counts too. Tokens that share a character have its bytes as their vocabulary
    says, and the first of them what is left.
    """
    if not encoding.is_fast:
        return None
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    lengths = sum(points >= least for least in (0, 0x80, 0x800, 0x10000))  # bytes of each character
    before = np.append(0, np.cumsum(lengths, dtype=np.int64))
    ids = encoding["input_ids"]
    starts, ends = np.array(encoding.encodings[0].offsets, np.int64).reshape(-1, 2).T
    ends = np.maximum.accumulate(ends)
    sizes = np.diff(before[np.append(ends[:-1], len(text))], prepend=0) if len(ends) else ends
    shared = np.flatnonzero(starts[1:] < ends[:-1]) + 1  # with the token before
    for tokens in np.split(shared, np.flatnonzero(np.diff(shared) > 1) + 1):
        if len(tokens):
            first, last = tokens[0] - 1, tokens[-1]
            names = tokenizer.convert_ids_to_tokens([ids[token] for token in tokens])
            left = int(sizes[first : last + 1].sum())
            for token, name in zip(tokens[::-1], names[::-1], strict=True):
                sizes[token] = min(left, 1 if BYTE.fullmatch(name) else len(name))
                left -= sizes[token]
            sizes[first] = left
    return sizes[part]
