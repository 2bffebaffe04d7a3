"""Tokens of a long document, piece by piece, and exactly those of the whole document.

What a tokenizer makes of a text depends on what stands around it: the start of a text may get a space, a word ends
where the text does, and merges can ripple from a cut into the text. But it depends on little of it. So a document is
read in pieces that overlap, and two of them are joined inside their overlap, where tokens depend neither on where the
second piece begins nor on where the first one ends. That is found by tokenizing, not by knowing the tokenizer: the
overlap is tokenized once more alone. It ends where the first piece ends and begins where the second one begins:

    first piece   --------------------
    overlap                   ========
    second piece              --------------------

As far as its last tokens are those of the first piece, they do not depend on what comes before the overlap; as far as
its first tokens are those of the second, they do not depend on what comes after it. Where both is so for at least half
of the overlap, the pieces are joined in the middle of that half, between two words. Where it is not, longer pieces are
tried.

Some tokenizers have special tokens that swallow all blanks beside them, however many: theirs are joined only where the
overlap has something else on both sides.

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
WHOLE = 4 * PIECE  # a document that is not longer is tokenized at once
LONGEST = 16 * PIECE  # of two pieces; a million characters take about 150 MB while they are tokenized
OVERLAPS = 8  # in a piece
AGREE = 1000  # tokens, at least
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token that is one byte, in a vocabulary of characters
BLANKS = 16  # a part of these: fewer blanks at an end of an overlap are too few tokens to reach where pieces are joined


class Tokens(NamedTuple):
    """Token ids of a text, int64 (tokens,); at which of them a word begins, bool (tokens,); and where its overlap does.

    overlap: characters from the start. sizes: of so many tokens from one on, as of a `Piece`.
    """

    ids: np.ndarray
    words: np.ndarray
    overlap: int = 0
    sizes: Callable[[slice], np.ndarray | None] | None = None


class Piece(NamedTuple):
    """Tokens that follow each other. sizes: called, the UTF-8 bytes that each stands for; None where nobody knows."""

    ids: Sequence[int]
    sizes: Callable[[], Sequence[int] | np.ndarray | None] = lambda: None


def tokenize(parts: Iterable[str], tokenizer: PreTrainedTokenizerBase, name: str) -> Iterator[Piece]:
    """The tokens of one document without special tokens, as many at a time as are known.

    parts: of the document; no more are read than the tokens that are asked for need. name: of the text, for errors.
    """
    pieces = _pieces(parts)
    start = list(itertools.islice(pieces, WHOLE // PIECE + 1))
    if len(start) <= WHOLE // PIECE:
        text = "".join(start)
        encoding = _encode(text, tokenizer)
        yield Piece(encoding["input_ids"], partial(_sizes, encoding, text, tokenizer))
        return
    pieces = itertools.chain(start, pieces)
    text, done, count = next(pieces), 0, 1
    tokens = _tokens(text, tokenizer)
    while following := "".join(itertools.islice(pieces, count)):
        overlap = text[tokens.overlap :]
        alone, after = _tokens(overlap, tokenizer), _tokens(overlap + following, tokenizer)
        joint = _joint(tokens, alone, after, _between_blanks(overlap, alone, tokenizer), _may_cut_words(tokenizer))
        if joint is not None:
            yield _part(tokens, slice(done, len(tokens.ids) - len(alone.ids) + joint))
            text, tokens, done, count = overlap + following, after, joint, 1
        elif len(text) + len(following) < LONGEST:
            text, count = text + following, 2 * count
            tokens = _tokens(text, tokenizer)
        else:
            raise UserError(
                f"a document of text '{name}' is too long: its tokens depend on more than {LONGEST >> 20} million "
                f"characters around them, or it has none; split it into documents of at most {WHOLE >> 20} million "
                "characters, as the rows of a .jsonl file"
            )
    yield _part(tokens, slice(done, None))


def _part(tokens: Tokens, part: slice) -> Piece:
    return Piece(tokens.ids[part].tolist(), partial(tokens.sizes, part))


def _pieces(parts: Iterable[str]) -> Iterator[str]:
    """Parts joined and cut into pieces of `PIECE` characters, of which the last may be shorter."""
    kept, length = [], 0
    for part in parts:
        kept.append(part)
        length += len(part)
        if length >= PIECE:
            text = "".join(kept)
            whole = length - length % PIECE
            yield from (text[at : at + PIECE] for at in range(0, whole, PIECE))
            kept, length = [text[whole:]], length - whole
    if length:
        yield "".join(kept)


def _encode(text: str, tokenizer: PreTrainedTokenizerBase) -> BatchEncoding:
    try:
        return tokenizer(text, add_special_tokens=False, verbose=False)
    except Exception as error:  # the library of tokenizers raises nothing narrower
        raise UserError(f"the model's tokenizer cannot split the text ({error}); check its files") from error


def _tokens(text: str, tokenizer: PreTrainedTokenizerBase) -> Tokens:
    encoding = _encode(text, tokenizer)
    ids = np.array(encoding["input_ids"], dtype=np.int64)
    if encoding.is_fast:
        words = np.diff(np.array(encoding.word_ids(), dtype=np.int64), prepend=-1) != 0
    else:  # one in Python does not say, but has a rule for each word; SentencePiece has a model for all of a text
        words = np.full(len(ids), not hasattr(tokenizer, "sp_model"))
    return Tokens(ids, words, _overlap(encoding, len(text)), partial(_sizes, encoding, text, tokenizer))


def _sizes(
    encoding: BatchEncoding, text: str, tokenizer: PreTrainedTokenizerBase, part: slice = slice(None)
) -> np.ndarray | None:
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


def _overlap(encoding: BatchEncoding, length: int) -> int:
    """The beginning of the overlap, at the start of a word or of a token in a long word.

    In a long run of one character, or of digits that are taken three at a time, tokens would not agree otherwise.
    """
    size = length // OVERLAPS
    place = length - size
    if encoding.is_fast:
        for index, span in (
            (encoding.char_to_word(place), encoding.word_to_chars),
            (encoding.char_to_token(place), encoding.token_to_chars),
        ):
            if index is not None and place - span(index).start < size:
                return span(index).start
    return place


def _may_cut_words(tokenizer: PreTrainedTokenizerBase) -> bool:
    return tokenizer.is_fast and isinstance(tokenizer.backend_tokenizer.model, BPE)


def _between_blanks(overlap: str, alone: Tokens, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The tokens `alone` of an overlap, from one to another, that no special token outside it can swallow as blanks."""
    first, last = 0, len(alone.ids)
    if not any(token.lstrip or token.rstrip for token in tokenizer.added_tokens_decoder.values()):
        return first, last
    if len(overlap) - len(inner := overlap.lstrip()) > AGREE // BLANKS:
        first = last - len(_encode(inner, tokenizer)["input_ids"])
    if len(overlap) - len(inner := overlap.rstrip()) > AGREE // BLANKS:
        last = len(_encode(inner, tokenizer)["input_ids"])
    return first, last


def _joint(before: Tokens, alone: Tokens, after: Tokens, inside: tuple[int, int], cut_words: bool) -> int | None:
    """The place to join: so many tokens of the overlap `alone` come from the piece `before` it; None if they disagree.

    inside: the tokens among which they may be joined.
    """
    last_first = (Tokens(tokens.ids[::-1], tokens.words[::-1]) for tokens in (before, alone))
    first, last = max(inside[0], len(alone.ids) - _agreeing(*last_first)), min(inside[1], _agreeing(alone, after))
    agreeing = last - first
    if agreeing < max(AGREE, len(alone.ids) // 2):
        return None
    middle = np.arange(first + agreeing // 4, last - agreeing // 4)
    between_words = middle[alone.words[middle]]
    choice = between_words if len(between_words) or not cut_words else middle
    return int(choice[len(choice) // 2]) if len(choice) else None


def _agreeing(first: Tokens, second: Tokens) -> int:
    """The number of tokens from the start that are the same, and so are the words."""
    count = min(len(first.ids), len(second.ids))
    same = (first.ids[:count] == second.ids[:count]) & (first.words[:count] == second.words[:count])
    return count if same.all() else int(same.argmin())
