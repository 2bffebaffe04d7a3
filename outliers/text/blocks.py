"""Documents to token blocks: finding a text's documents, joining their tokens, and cutting them into blocks."""

import hashlib
import itertools
import logging
import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, overload

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from outliers.errors import UserError, shown
from outliers.models.anatomy.examples import IGNORED, Examples
from outliers.text.documents import NamedText, find_named
from outliers.text.given import Conversation, Text, checked_ids, conversation_text, given_documents, text_name
from outliers.text.pieces import Piece, tokenize

MOST_TOKENS = 2**30  # in all blocks
COLUMN = "text"  # default column of a data set
IDS_AT_ONCE = 2**20  # token ids of a tensor that are converted together
MOST_WITHOUT_TOKENS = 10_000  # documents in a row without a token before the tokenizer is considered faulty

logger = logging.getLogger(__name__)

Document = str | Iterable[str] | torch.Tensor | Conversation


@dataclass(frozen=True, eq=False)
class Cut:
    """A text cut into blocks, each of which begins with the ids `first`.

    ids: int64 (blocks, T). sizes: UTF-8 bytes of the text that each token covers, int64 (blocks, T), or None if
    unknown. begins: whether a token is the first of a document, bool (blocks, T).
    """

    ids: torch.Tensor
    sizes: torch.Tensor | None
    begins: torch.Tensor
    first: list[int]

    def __getitem__(self, part: slice) -> "Cut":
        sizes = None if self.sizes is None else self.sizes[part]
        return Cut(self.ids[part], sizes, self.begins[part], self.first)

    @property
    def packed_blocks(self) -> int:
        """The number of blocks that hold several documents."""
        return int(self.begins[:, len(self.first) + 1 :].any(1).sum())

    def check_packed(self) -> None:
        """Raise UserError if no block holds several documents, so that separating documents would change nothing."""
        if not self.packed_blocks:
            raise UserError(
                f"none of {len(self.ids)} blocks of {self.ids.shape[1]} tokens holds two documents (they are longer, "
                "or token ids without the tokenizer's first token); run without --documents"
            )

    @property
    def predicted_bytes(self) -> torch.Tensor | None:
        """UTF-8 bytes that the predicted tokens of each block cover, int64 (blocks,), or None if unknown."""
        return None if self.sizes is None else self.sizes[:, 1:].sum(1)

    def windows(self, stride: int | None, scored: int | None) -> Examples:
        """Return the text as windows of a block's length that advance by `stride` tokens, each scored on its last
        tokens.

        stride: None if windows do not overlap. scored: number of scored tokens per window; by default the stride, and
        in the first window all.

        Raises:
            UserError: stride or scored is larger than a block allows.
        """
        before, block = len(self.first), self.ids.shape[1]
        length = block - before
        for name, tokens, most in (("stride", stride, length), ("scored", scored, block - 1)):
            if tokens is not None and tokens > most:
                raise UserError(f"{name} is {tokens}; expected at most {most} of blocks of {block} tokens")

        def overlapping(numbers: torch.Tensor) -> torch.Tensor:
            windows = numbers[:, before:].flatten().unfold(0, length, stride or length)
            return torch.cat([numbers[:1, :before].expand(len(windows), -1), windows], 1)

        ids = overlapping(self.ids)
        labels = torch.full_like(ids, IGNORED)
        last = scored or min(stride, block - 1)
        labels[:, -1 - last : -1] = ids[:, -last:]
        if scored is None:
            labels[0, :-1] = ids[0, 1:]
        sizes = None
        if self.sizes is not None:
            sizes = (overlapping(self.sizes)[:, 1:] * (labels[:, :-1] != IGNORED)).sum(1)
        named = {"stride": stride, "scored": scored}
        protocol = "".join(f"+{name}={tokens}" for name, tokens in named.items() if tokens is not None)
        return Examples(ids, labels, protocol, sizes=sizes)

    @property
    def documents(self) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """The documents in the blocks as sequences of their own, int64 (T,), and the bytes of each, int64 (documents,),
        or None if unknown.

        The part of a document in one block is one sequence, with the ids `first` before it. Sequences of a single token
        are left out, because nothing in them is predicted.

        Raises:
            UserError: no document has two tokens.
        """
        before, parts = len(self.first), []
        sizes = torch.zeros_like(self.ids) if self.sizes is None else self.sizes
        for block, begins in zip(torch.stack([self.ids, sizes], 1), self.begins, strict=True):
            first, text = block.tensor_split([before], 1)
            starts = 1 + begins[before + 1 :].nonzero()[:, 0]
            head, *others = text.tensor_split(starts, 1)
            # without a first token of its own
            others = [part[:, 1:] if part[0, :1].tolist() == self.first else part for part in others]
            parts += [torch.cat([first, part], 1) for part in (head, *others)]
        parts = [part for part in parts if part.shape[1] > 1]
        if not parts:
            raise UserError(f"no document in {len(self.ids)} blocks has two tokens; run without --documents")
        sizes = None if self.sizes is None else torch.stack([bytes_of_tokens[1:].sum() for _, bytes_of_tokens in parts])
        return [ids for ids, _ in parts], sizes


def find_text(text: Text, column: str = COLUMN) -> NamedText:
    """Return the source of a text's documents and the name of the way in which they are cut, such as "first-blocks";
    text and column as in `load_text`."""
    if isinstance(text, (str, os.PathLike)):
        return find_named(os.fspath(text))
    if isinstance(text, torch.Tensor):
        ids = checked_ids(text, "token ids")
        return NamedText(lambda: [ids], "first-blocks") if ids.ndim == 1 else NamedText(lambda: ids, "given-blocks")
    if isinstance(text, (bytes, Mapping)) or not isinstance(text, Iterable):
        raise UserError(
            f"text is {shown(text)} of type {type(text).__name__}; expected a name, a path, an iterable of "
            "documents, one datasets.Dataset, or int64 token ids"
        )
    return NamedText(partial(given_documents, text, column), "first-blocks")


@overload
def load_text(
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    block: int,
    blocks: int | None = None,
    bos: bool = False,
    column: str = COLUMN,
    documents: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def load_text(
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    block: int | None,
    blocks: int | None = None,
    bos: bool = False,
    column: str = COLUMN,
    documents: bool = False,
) -> list[torch.Tensor]: ...


def load_text(
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    block: int | None,
    blocks: int | None = None,
    bos: bool = False,
    column: str = COLUMN,
    documents: bool = False,
) -> torch.Tensor | list[torch.Tensor]:
    """Return the token ids of the start of a text, int64 (blocks, block), or a list with those of each document, int64
    (T,).

    Each document is tokenized without special tokens and followed by the tokenizer's end-of-sequence id, if it has one;
    the ids are joined and cut without padding or overlap. Only as much is read as the blocks need, even of a long
    document (`outliers.text.pieces`). Token ids and conversations have ends of their own, so nothing is appended to
    them. With `block=None` nothing is joined, cut, padded or appended.

    Args:
        text: "sample" (embedded), "c4" (validation, streamed from the hub), "wikitext2" (test, from the hub), or a
            local file; or documents: any iterable of them, or a `datasets.Dataset`; or token ids, int64: (tokens,) as
            one document, or (blocks, T) as finished blocks. A document is a string; a sequence of token ids; or
            a conversation, a list of messages with "role" and "content", which the tokenizer's chat template writes.
        tokenizer: of the model that will read the blocks.
        block: tokens per block, at least 2; None: each document is a sequence of its own length.
        blocks: how many blocks or sequences, at least 1; None: all that the text has.
        bos: whether each block begins with the model's own first token, which counts among its tokens. It is not
            doubled where a text, token ids or a chat template already have it.
        column: the column of a data set that holds the documents.
        documents: whether the part of each document in a block becomes a sequence of its own, so that positions and
            attention restart with it; in token ids a document begins with each of the tokenizer's first tokens.
            Sequences of a single token are left out.

    Returns:
        int64 (blocks, block); with `block=None` or `documents` a list of int64 (T,).

    Raises:
        UserError: the text is unknown, unreachable, damaged in the part that is read, empty, too short, or no text at
            all; a size is out of range; the tokenizer has no first token, or gives no tokens; or it has no chat
            template for a conversation, or one that refuses it.

    Example:
        >>> outliers.load_text("sample", tokenizer, block=64, blocks=2).shape
        torch.Size([2, 64])
    """
    if block is not None:
        cut = cut_text(text, tokenizer, block, blocks, bos, column, sized=False)
        if documents:
            cut.check_packed()
        return cut.documents[0] if documents else cut.ids
    return _read_sequences(text, tokenizer, blocks, _first_ids(tokenizer, bos), column)


def cut_text(
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    block: int,
    blocks: int | None = None,
    bos: bool = False,
    column: str = COLUMN,
    sized: bool = True,
) -> Cut:
    """Return a text in blocks as `load_text` cuts it, with the beginnings of its documents and the bytes of its tokens.

    Special tokens between documents and the first token of a block cover no bytes. Bytes are unknown (None) if the text
    is token ids, or if the tokenizer does not map tokens to characters. In token ids a document also begins with each
    of the tokenizer's first tokens.

    sized: whether to compute the bytes.
    """
    _check_sizes(block, blocks)
    if isinstance(text, torch.Tensor) and text.ndim == 2:
        ids = _checked_blocks(text, block, blocks, bos)
        return Cut(ids, None, _first_tokens(ids, tokenizer), [])
    first = _first_ids(tokenizer, bos)
    text_tokens = block - len(first)
    needed = MOST_TOKENS if blocks is None else text_tokens * blocks
    ids, starts, sizes, repeated = array("q"), [], array("q") if sized else None, 0
    for piece, begins in _tokens_of_documents(text, tokenizer, column):
        starts += [len(ids)] * begins
        kept = _without_repeated_first(piece, len(ids), text_tokens, first)
        repeated += len(piece.ids) - len(kept.ids)
        ids.extend(kept.ids)
        if sizes is not None and (piece_sizes := kept.sizes()) is not None:
            sizes.extend(piece_sizes)
        else:
            sizes = None
        if len(ids) >= needed:
            break
    _report_repeated_first(text, tokenizer, repeated)
    whole = len(ids) // text_tokens
    if blocks is None and len(ids) >= needed:
        raise _too_long(text)
    if whole < (blocks or 1):
        raise UserError(
            f"text '{text_name(text)}' is too short: {len(ids)} tokens make {whole} blocks of {block}, not "
            f"{blocks or 1}; ask for fewer or shorter blocks, or give a longer text"
        )
    shape, none = (blocks or whole, text_tokens), [0] * len(first)
    begins = torch.zeros(len(ids) + 1, dtype=torch.int64)  # one more, for a last document without tokens
    begins[starts] = 1
    sizes = None if sizes is None else _in_blocks(sizes, shape, none)
    return Cut(_in_blocks(ids, shape, first), sizes, _in_blocks(begins, shape, none).bool(), first)


def _in_blocks(numbers: array | torch.Tensor, shape: tuple[int, int], first: list[int]) -> torch.Tensor:
    """Return the first numbers as rows of this shape, each after the ids `first`."""
    rows = torch.as_tensor(numbers[: math.prod(shape)]).view(shape)
    return torch.cat([torch.tensor(first).long().expand(len(rows), -1), rows], 1)


def _first_ids(tokenizer: PreTrainedTokenizerBase, bos: bool) -> list[int]:
    """Return the ids that begin each block: the tokenizer's first token if `bos`, otherwise none."""
    if bos and tokenizer.bos_token_id is None:
        raise UserError("the model's tokenizer has no first token (bos_token_id); run without --bos")
    return [tokenizer.bos_token_id] if bos else []


def _without_repeated_first(piece: Piece, offset: int, tokens: int, first: list[int]) -> Piece:
    """Drop the tokenizer's first token from a piece wherever a block would begin with it twice.

    offset: number of the text's tokens before the piece. tokens: number of a text's tokens in a block. first: the ids
    that stand before them in each block.
    """
    if not first or piece.is_end or first[0] not in piece.ids:
        return piece
    dropped = []
    for at in np.flatnonzero(np.asarray(piece.ids) == first[0]).tolist():
        if (offset + at - len(dropped)) % tokens == 0:
            dropped.append(at)

    def sizes() -> np.ndarray | None:
        whole = piece.sizes()
        return None if whole is None else np.delete(np.asarray(whole), dropped)

    return Piece(np.delete(np.asarray(piece.ids), dropped).tolist(), sizes)


def _report_repeated_first(text: Text, tokenizer: PreTrainedTokenizerBase, times: int) -> None:
    if times:
        logger.warning(
            f"warning: text '{text_name(text)}' has the model's first token, {tokenizer.bos_token}, by itself where "
            f"{times} of its blocks or sequences begin; it stands there once"
        )


def _check_sizes(block: int | None, blocks: int | None) -> None:
    if (block is not None and block < 2) or (blocks is not None and blocks < 1):
        raise UserError(f"{blocks} blocks of {block} tokens; expected at least 1 block of at least 2 tokens")
    if (block or 1) * (blocks or 1) > MOST_TOKENS:
        raise UserError(f"{blocks} blocks of {block} tokens; expected at most {MOST_TOKENS:,} tokens in all")


def _too_long(text: Text) -> UserError:
    return UserError(f"text '{text_name(text)}' has more than {MOST_TOKENS:,} tokens; say how many blocks to take")


def _checked_blocks(ids: torch.Tensor, block: int, blocks: int | None, bos: bool) -> torch.Tensor:
    """Return the first rows of token ids that are blocks already; raise UserError if they have another length, are too
    few, or would need a first token."""
    ids = checked_ids(ids, "token ids")
    count, tokens = ids.shape
    if tokens != block or count < (blocks or 1):
        raise UserError(
            f"token ids are {count} blocks of {tokens} tokens; expected at least {blocks or 1} of {block}: ask for as "
            "many as there are, or give the ids in one dimension, which is cut into blocks"
        )
    if bos:
        raise UserError("token ids that are blocks already get no first token; run without --bos")
    return ids[:blocks]


def _read_sequences(
    text: Text, tokenizer: PreTrainedTokenizerBase, count: int | None, first: list[int], column: str
) -> list[torch.Tensor]:
    """Return the first documents of a text, or all, as token ids (T,), each with the ids `first` before it."""
    _check_sizes(None, count)
    tensors, total, repeated = [], 0, 0
    for number, document in enumerate(itertools.islice(find_text(text, column).documents(), count), 1):
        ids = array("q", first)
        for piece in _pieces_of(document, tokenizer, text_name(text)):
            kept = _without_repeated_first(piece, len(ids) - len(first), MOST_TOKENS, first)
            repeated += len(piece.ids) - len(kept.ids)
            ids.extend(kept.ids)
            if total + len(ids) > MOST_TOKENS:
                raise _too_long(text)
        if len(ids) == len(first):
            raise UserError(
                f"document {number} of text '{text_name(text)}' gives no tokens, and so no sequence; leave it out, or "
                "ask for blocks, for which documents are joined"
            )
        total += len(ids)
        tensors.append(torch.tensor(ids))
    if len(tensors) < (count or 1):
        raise UserError(
            f"text '{text_name(text)}' is too short: {len(tensors)} documents make as many sequences, not "
            f"{count or 1}; ask for fewer, or give a longer text"
        )
    _report_repeated_first(text, tokenizer, repeated)
    return tensors


def _tokens_of_documents(text: Text, tokenizer: PreTrainedTokenizerBase, column: str) -> Iterator[tuple[Piece, bool]]:
    """Yield the tokens of a text lazily, and whether a document begins with them; each document is followed by an end
    unless it has its own."""
    name, empty = text_name(text), 0
    end = [] if tokenizer.eos_token_id is None else [Piece([tokenizer.eos_token_id], lambda: [0], is_end=True)]
    for document in _documents(text, tokenizer, column):
        empty += 1
        after = [] if isinstance(document, (torch.Tensor, Conversation)) else end
        for number, piece in enumerate(itertools.chain(_pieces_of(document, tokenizer, name), after)):
            empty = 0 if piece.ids else empty
            yield piece, number == 0
        if empty >= MOST_WITHOUT_TOKENS:
            raise UserError(f"{empty} documents of text '{name}' in a row give no tokens; check it and the tokenizer")


def _documents(text: Text, tokenizer: PreTrainedTokenizerBase, column: str) -> Iterator[Document]:
    """Yield the documents of a text; token ids are split before each of the tokenizer's first tokens."""
    for document in find_text(text, column).documents():
        if isinstance(document, torch.Tensor):
            yield from document.tensor_split(_first_tokens(document, tokenizer).nonzero()[:, 0])
        else:
            yield document


def _first_tokens(ids: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    """Return where ids are the tokenizer's first token (bos), bool of the same shape."""
    return ids == (-1 if tokenizer.bos_token_id is None else tokenizer.bos_token_id)


def _pieces_of(document: Document, tokenizer: PreTrainedTokenizerBase, name: str) -> Iterator[Piece]:
    """Yield the tokens of a document lazily. name: of the text, for errors."""
    if isinstance(document, torch.Tensor):
        return (Piece(ids.tolist()) for ids in document.split(IDS_AT_ONCE))
    if isinstance(document, Conversation):
        document = conversation_text(document, tokenizer)
    return tokenize([document] if isinstance(document, str) else document, tokenizer, name)


def unpad(blocks: Iterable[torch.Tensor], attention_mask: Iterable[torch.Tensor] | None) -> Iterable[torch.Tensor]:
    """Return blocks without their padding, so that each goes through a model alone, as if it had never been padded.

    Args:
        blocks: token ids, int64 (blocks, T), or any iterable of (T,).
        attention_mask: of the same shapes, 1 or True for a token and 0 or False for padding, as tokenizers return it;
            None if there is no padding.

    Raises:
        UserError: the number of masks differs from that of blocks; a mask differs in shape from its block, holds values
            other than 0 and 1, masks all of a block, or masks tokens between others.
    """
    if attention_mask is None:
        return blocks
    blocks, masks = list(blocks), list(attention_mask)
    if len(blocks) != len(masks):
        raise UserError(f"an attention mask of {len(masks)} sequences for {len(blocks)}; expected one for each")
    return [_unmasked(number, *pair) for number, pair in enumerate(zip(blocks, masks, strict=True))]


def _unmasked(number: int, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if ids.shape != mask.shape:
        raise UserError(f"the mask of sequence {number} is {tuple(mask.shape)}; expected {tuple(ids.shape)} as its ids")
    if not ((mask == 0) | (mask == 1)).all():
        raise UserError(f"the mask of sequence {number} holds something else than 0 and 1")
    places = mask.to(ids.device).nonzero()[:, 0]
    if not len(places):
        raise UserError(f"the mask of sequence {number} masks all of its tokens; expected at least one that counts")
    if places[-1] - places[0] + 1 != len(places):
        raise UserError(f"the mask of sequence {number} masks tokens between others; expected padding at its ends")
    return ids[places[0] : places[-1] + 1]


def tokens_hash(blocks: torch.Tensor | Examples | list[torch.Tensor]) -> str:
    """Return 16 hexadecimal digits of the SHA-256 over the shape and int64 ids of blocks; of examples also over their
    labels; of a list of sequences over their lengths and ids."""
    listed = isinstance(blocks, list)
    digest = hashlib.sha256(str(tuple(map(len, blocks) if listed else blocks.shape)).encode())
    for tensor in blocks if listed else (blocks.ids, blocks.labels) if isinstance(blocks, Examples) else (blocks,):
        digest.update(tensor.contiguous().numpy())
    return digest.hexdigest()[:16]
