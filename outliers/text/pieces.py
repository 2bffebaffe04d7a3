"""Tokenize a long document piece by piece, with exactly the tokens of the whole document.

The tokens of a text depend on its surroundings: its start may get a space, a word ends where the text does, and merges
can ripple from a cut into the text. But they depend on little of it. So a document is read in overlapping pieces, and
two pieces are joined in the middle of their overlap, between two words, if both have the same tokens in the middle half
of the overlap: then neither the text before the overlap, which the second piece lacks, nor the text after it, which the
first lacks, has an influence there. If they differ, longer pieces are tried.

    first piece   --------------------
    second piece              --------------------
    the same                    ====

Some tokenizers have special tokens that swallow all blanks beside them, however many, so the text after the
joint must hold something else.

A word is the unit that the tokenizer's model sees at a time. Within a word only byte-pair merges may be cut: they agree
for good once they have produced the same token at the same place. A unigram model weighs all ways to split a word
against each other, however long the word is.
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
from outliers.terminal.printing import silence

PIECE = 2**18  # characters
LONGEST = 16 * PIECE  # characters of two pieces at most; tokenizing a million takes about 150 MB
OVERLAPS = 8  # a piece shares 1 / OVERLAPS of its length with the next
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a byte token in a vocabulary of characters


class Piece(NamedTuple):
    """Consecutive tokens of a document.

    sizes: a function that returns the UTF-8 bytes that each token covers, or None if unknown. is_end: whether the
    tokens are an end that was appended to the document.
    """

    ids: Sequence[int]
    sizes: Callable[[], Sequence[int] | np.ndarray | None] = lambda: None
    is_end: bool = False


def tokenize(parts: Iterable[str], tokenizer: PreTrainedTokenizerBase, name: str) -> Iterator[Piece]:
    """Yield the tokens of one document without special tokens, as soon as they are certain.

    parts: strings that make up the document, read only as far as the requested tokens need. name: of the text, for
    errors.

    Raises:
        UserError: the tokens depend on more surrounding text than `LONGEST` characters.
    """
    pieces = _pieces(parts)
    tokens, done, count = _Tokens(next(pieces, ""), tokenizer), 0, 1
    while following := "".join(itertools.islice(pieces, count)):
        place = tokens.overlap_start()
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
    """Join parts and cut them into pieces of at least `PIECE` and less than 2 × `PIECE` characters; the last may be
    shorter."""
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
    """The tokens of a text: their ids, int64 (tokens,), first characters, and whether each begins a word."""

    def __init__(self, text: str, tokenizer: PreTrainedTokenizerBase):
        self.text, self.tokenizer, self.encoding = text, tokenizer, _encode(text, tokenizer)
        self.ids = np.array(self.encoding["input_ids"], dtype=np.int64)
        if self.encoding.is_fast:
            starts = np.array(self.encoding.encodings[0].offsets, np.int64).reshape(-1, 2)[:, 0]
            self.starts = np.maximum.accumulate(starts)
            self.words = np.diff(np.array(self.encoding.word_ids(), dtype=np.int64), prepend=-1) != 0
        else:  # Python tokenizers give no offsets, but treat each word alone; SentencePiece models the whole text
            self.words = np.full(len(self.ids), not hasattr(tokenizer, "sp_model"))

    def part(self, first: int, last: int | None) -> Piece:
        some = slice(first, last)
        return Piece(self.ids[some].tolist(), partial(_sizes, self.encoding, self.text, self.tokenizer, some))

    def overlap_start(self) -> int:
        """Return the character at which the overlap with the next piece begins: that of a word, or of a token within a
        long word.

        Otherwise, in a long run of one character, or of digits that are grouped in threes, the tokens of the two pieces
        would never agree.
        """
        size = len(self.text) // OVERLAPS
        start = len(self.text) - size
        if self.encoding.is_fast:
            words = self.starts[self.words]
            for starts in (words, self.starts):
                before = starts[: starts.searchsorted(start, "right")]
                if len(before) and start - before[-1] < size:
                    return int(before[-1])
        return start

    def tokens_before(self, character: int) -> int:
        """Return the number of tokens before a character."""
        if self.encoding.is_fast:
            return int(self.starts.searchsorted(character))
        if character < len(self.text) / 2:
            return len(_encode(self.text[:character], self.tokenizer)["input_ids"])
        return len(self.ids) - len(_encode(self.text[character:], self.tokenizer)["input_ids"])


def _joint(before: _Tokens, after: _Tokens, start: int) -> tuple[int, int] | None:
    """Find where to join two pieces: the number of tokens to take from the first, and to skip in the second, which
    begins at character `start` of the first; None if the pieces disagree."""
    size = len(before.text) - start
    marks = [start + size * quarter // 4 for quarter in (1, 2, 3)]
    first, middle, last = (before.tokens_before(mark) for mark in marks)
    shift = first - after.tokens_before(marks[0] - start)
    ours, theirs = slice(first, last), slice(first - shift, last - shift)
    if not (
        first < middle < last  # the last token may continue beyond the piece
        and [after.tokens_before(mark - start) + shift for mark in marks[1:]] == [middle, last]
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
        with silence():
            return tokenizer(text, add_special_tokens=False, verbose=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers, written in Rust, raises nothing narrower
        raise UserError(f"the model's tokenizer cannot split the text ({error}); check its files") from error


def _sizes(encoding: BatchEncoding, text: str, tokenizer: PreTrainedTokenizerBase, part: slice) -> np.ndarray | None:
    """Return the UTF-8 bytes that each token of a text covers, int64 (tokens,); None for a tokenizer written in Python.

    A token covers the text from the end of the previous token to its own end, and the last one reaches to the end of
    the text, so that text that a tokenizer drops, such as a blank, counts too. If tokens share a character, each later
    one has as many bytes as its entry in the vocabulary says, and the first has the rest.
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
    shared = np.flatnonzero(starts[1:] < ends[:-1]) + 1  # share a character with the token before
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
