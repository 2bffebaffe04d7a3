"""Documents to token blocks: one table of named texts, and the cut into blocks."""

import hashlib
import itertools
import os
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from outliers.errors import UserError, shown, unknown_name
from outliers.text.documents import SURROGATE, c4, open_documents, sample, wikitext2
from outliers.text.pieces import tokenize

MOST_TOKENS = 2**30  # of all blocks
COLUMN = "text"  # of a data set
IDS = 2**20  # of a tensor of token ids, at once
SILENT = 10_000  # documents in a row without a token, before it is the tokenizer that is at fault

Text = str | os.PathLike | Iterable[str] | torch.Tensor  # among the iterables `datasets.Dataset`


class NamedText(NamedTuple):
    """A text known by name: where its documents come from, and the protocol that cuts them.

    A document is a string, or the parts that it consists of.
    """

    documents: Callable[[], Iterable[str | Iterable[str]]]
    protocol: str


TEXTS = {
    "sample": NamedText(sample, "first-blocks"),
    "c4": NamedText(c4, "first-blocks"),
    "wikitext2": NamedText(wikitext2, "wikitext-joined"),
}


def find_text(text: Text, column: str = COLUMN) -> NamedText:
    """Where the documents of a text come from, and how they are cut; text and column as in `load_text`.

    Raises:
        UserError: there is no text of that name, or it is something else than a text.
    """
    if isinstance(text, (str, os.PathLike)):
        return _find_named(os.fspath(text))
    if isinstance(text, torch.Tensor):
        _check_ids(text)
        return NamedText(list, "first-blocks" if text.ndim == 1 else "given-blocks")
    if isinstance(text, (bytes, Mapping)) or not isinstance(text, Iterable):
        raise UserError(
            f"text is {shown(text)} of type {type(text).__name__}; expected a name, a path, strings, one "
            "datasets.Dataset, or int64 token ids"
        )
    return NamedText(partial(_strings, text, column), "first-blocks")


def _find_named(name: str) -> NamedText:
    if name in TEXTS:
        return TEXTS[name]
    if os.path.isfile(name):  # unlike that of Path false, not an error, for a name that no file can have
        return NamedText(lambda: open_documents(name), "first-blocks")
    if os.path.exists(name):
        raise UserError(f"text '{name}' is a folder, a pipe or a device; expected a regular file")
    if Path(name).suffix or "/" in name:
        raise UserError(f"text file '{name}' does not exist; expected a file or one of {', '.join(TEXTS)}")
    raise unknown_name("text", name, TEXTS, "or the path of a .txt, .txt.gz or .jsonl file")


def text_name(text: Text) -> str:
    """What a row calls a text: its name or path, or what kind of object it is, which the hash of its tokens tells."""
    if isinstance(text, (str, os.PathLike)):
        return os.fspath(text)
    if isinstance(text, torch.Tensor):
        return f"tensor of {' x '.join(map(str, text.shape))} token ids"
    count = f"{len(text)} " if isinstance(text, Sized) else ""
    return f"{type(text).__name__} of {count}{'rows' if _is_data_set(text) else 'strings'}"


def _is_data_set(text: Text) -> bool:
    """Whether it is one of the library `datasets`, which is not imported unless somebody made one."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(text, (datasets.Dataset, datasets.IterableDataset))


def _strings(text: Iterable, column: str) -> Iterator[str]:
    """The documents of a data set's column, or of an iterable of strings."""
    name, number = text_name(text), 0
    if _is_data_set(text) and text.column_names and column not in text.column_names:
        columns = ", ".join(text.column_names)
        raise UserError(f"{name} has no column '{column}' but {columns}; name one of them: load_text(…, column=…)")
    for number, document in enumerate(text, 1):
        if _is_data_set(text):
            document = document.get(column)
        if not isinstance(document, str):
            kind = type(document).__name__
            raise UserError(f"document {number} of a {name} is of type {kind}; expected strings")
        if half := SURROGATE.search(document):
            raise UserError(
                f"document {number} of a {name} has half a surrogate pair, {half[0]!a}, which is no character"
            )
        yield document
    if not number:
        raise UserError(f"text is an empty {type(text).__name__}; expected at least one document")


def _check_ids(ids: torch.Tensor) -> None:
    if ids.dtype != torch.int64 or ids.ndim not in (1, 2):
        found = f"{str(ids.dtype).removeprefix('torch.')} of shape {tuple(ids.shape)}"
        raise UserError(f"token ids are {found}; expected int64 (blocks, T), or (tokens,), which are cut into blocks")
    if ids.numel() and int(ids.min()) < 0:
        raise UserError(f"token ids go down to {int(ids.min())}; expected 0 or more")


def load_text(
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    block: int,
    blocks: int,
    bos: bool = False,
    column: str = COLUMN,
) -> torch.Tensor:
    """Tokenise the start of a text and cut it into blocks.

    Each document is tokenised without special tokens and followed by the tokenizer's end-of-sequence id where it has
    one; the ids are joined and cut without padding or overlap. Only as much is read as the blocks need, of a long
    document too (`outliers.text.pieces`).

    Args:
        text: "sample" (embedded), "c4" (validation, streamed from the hub), "wikitext2" (test, from the hub), or a
            local file; or documents: any iterable of strings, or a `datasets.Dataset`; or token ids, int64: (tokens,),
            which are cut, or (blocks, T), which are blocks already.
        tokenizer: of the model that will read the blocks.
        block: tokens a block, at least 2.
        blocks: how many blocks, at least 1.
        bos: whether each block begins with the model's own first token, which counts among its tokens.
        column: of a data set, in which the documents are.

    Returns:
        int64 (blocks, block).

    Raises:
        UserError: the text is unknown, unreachable, damaged where it is read, empty or too short, or something else
            than a text; a size is out of range; or the tokenizer has no first token, or gives no tokens.
    """
    if block < 2 or blocks < 1:
        raise UserError(f"{blocks} blocks of {block} tokens; expected at least 1 block of at least 2 tokens")
    if blocks * block > MOST_TOKENS:
        raise UserError(f"{blocks} blocks of {block} tokens; expected at most {MOST_TOKENS:,} tokens in all")
    if isinstance(text, torch.Tensor) and text.ndim == 2:
        return _given_blocks(text, block, blocks, bos)
    if bos and tokenizer.bos_token_id is None:
        raise UserError("the model's tokenizer has no first token (bos_token_id); run without --bos")
    of_text = block - int(bos)
    wanted, ids = of_text * blocks, array("q")
    for some in _tokens(text, tokenizer, column):
        ids.extend(some)
        if len(ids) >= wanted:
            first = torch.full((blocks, int(bos)), tokenizer.bos_token_id if bos else 0)
            return torch.cat([first, torch.tensor(ids[:wanted]).view(blocks, of_text)], 1)
    raise UserError(
        f"text '{text_name(text)}' is too short: {len(ids)} tokens make {len(ids) // of_text} blocks of {block}, not "
        f"{blocks}; ask for fewer or shorter blocks, or give a longer text"
    )


def _given_blocks(ids: torch.Tensor, block: int, blocks: int, bos: bool) -> torch.Tensor:
    """The first of blocks that somebody has cut."""
    _check_ids(ids)
    count, tokens = ids.shape
    if tokens != block or count < blocks:
        raise UserError(
            f"token ids are {count} blocks of {tokens} tokens; expected at least {blocks} of {block}: ask for as many "
            "as there are, or give the ids in one dimension, which is cut into blocks"
        )
    if bos:
        raise UserError("token ids that are blocks already get no first token; run without --bos")
    return ids[:blocks].cpu()


def _tokens(text: Text, tokenizer: PreTrainedTokenizerBase, column: str) -> Iterator[list[int]]:
    """The token ids of a text as they are asked for, with the end of each document."""
    found, name = find_text(text, column), text_name(text)
    if isinstance(text, torch.Tensor):
        yield from (ids.tolist() for ids in text.split(IDS))
        return
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    silent = 0
    for document in found.documents():
        silent += 1
        parts = [document] if isinstance(document, str) else document
        for ids in itertools.chain(tokenize(parts, tokenizer, name), [end]):
            silent = 0 if ids else silent
            yield ids
        if silent >= SILENT:
            raise UserError(f"{silent} documents of text '{name}' in a row give no tokens; check it and the tokenizer")


def sequences(blocks: Iterable[torch.Tensor], attention_mask: Iterable[torch.Tensor] | None) -> Iterable[torch.Tensor]:
    """Blocks without their padding: each then goes through a model alone, as if it had never had any.

    Args:
        blocks: token ids, int64 (blocks, T), or any iterable of (T,).
        attention_mask: of the same shapes, 1 or True where there is a token and 0 or False where there is padding, as
            tokenizers return it; None where there is no padding.

    Raises:
        UserError: there are not as many masks as blocks, one is of another shape than its block, holds something else
            than 0 and 1, masks all of a block, or masks tokens between others.
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


def tokens_hash(blocks: torch.Tensor) -> str:
    """SHA-256 over shape and int64 ids of a tensor of blocks: 16 hexadecimal digits."""
    digest = hashlib.sha256(str(tuple(blocks.shape)).encode())
    digest.update(blocks.contiguous().numpy())
    return digest.hexdigest()[:16]
