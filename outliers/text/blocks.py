"""Documents to token blocks: one table of named texts, and the cut into blocks."""

import hashlib
import itertools
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from outliers.errors import UserError, unknown_name
from outliers.text.documents import c4, open_documents, sample, wikitext2
from outliers.text.pieces import tokenize

MOST_TOKENS = 2**30  # of all blocks
SILENT = 10_000  # documents in a row without a token, before it is the tokenizer that is at fault


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


def find_text(name: str) -> NamedText:
    """Look a text up: one of `TEXTS`, or the path of a local `.txt`, `.txt.gz`, `.jsonl` or `.jsonl.gz` file.

    Raises:
        UserError: it is neither.
    """
    if name in TEXTS:
        return TEXTS[name]
    if os.path.isfile(name):  # unlike that of Path false, not an error, for a name that no file can have
        return NamedText(lambda: open_documents(name), "first-blocks")
    if os.path.exists(name):
        raise UserError(f"text '{name}' is a folder, a pipe or a device; expected a regular file")
    if Path(name).suffix or "/" in name:
        raise UserError(f"text file '{name}' does not exist; expected a file or one of {', '.join(TEXTS)}")
    raise unknown_name("text", name, TEXTS, "or the path of a .txt, .txt.gz or .jsonl file")


def load_text(
    name: str, tokenizer: PreTrainedTokenizerBase, block: int, blocks: int, bos: bool = False
) -> torch.Tensor:
    """Tokenise the start of a text and cut it into blocks.

    Each document is tokenised without special tokens and followed by the tokenizer's end-of-sequence id where it has
    one; the ids are joined and cut without padding or overlap. Only as much is read as the blocks need, of a long
    document too (`outliers.text.pieces`).

    Args:
        name: "sample" (embedded), "c4" (validation, streamed from the hub), "wikitext2" (test, from the hub), or a
            local file.
        tokenizer: of the model that will read the blocks.
        block: tokens a block, at least 2.
        blocks: how many blocks, at least 1.
        bos: whether each block begins with the model's own first token, which counts among its tokens.

    Returns:
        int64 (blocks, block).

    Raises:
        UserError: the text is unknown, unreachable, damaged where it is read, or too short; a size is out of range; or
            the tokenizer has no first token, or gives no tokens.
    """
    if block < 2 or blocks < 1:
        raise UserError(f"{blocks} blocks of {block} tokens; expected at least 1 block of at least 2 tokens")
    if blocks * block > MOST_TOKENS:
        raise UserError(f"{blocks} blocks of {block} tokens; expected at most {MOST_TOKENS:,} tokens in all")
    if bos and tokenizer.bos_token_id is None:
        raise UserError("the model's tokenizer has no first token (bos_token_id); run without --bos")
    of_text = block - int(bos)
    wanted, ids = of_text * blocks, array("q")
    for some in _tokens(name, tokenizer):
        ids.extend(some)
        if len(ids) >= wanted:
            first = torch.full((blocks, int(bos)), tokenizer.bos_token_id if bos else 0)
            return torch.cat([first, torch.tensor(ids[:wanted]).view(blocks, of_text)], 1)
    raise UserError(
        f"text '{name}' is too short: {len(ids)} tokens make {len(ids) // of_text} blocks of {block}, not {blocks}; "
        "ask for fewer or shorter blocks, or give a longer text"
    )


def _tokens(name: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """The token ids of a text as they are asked for, with the end of each document."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    silent = 0
    for document in find_text(name).documents():
        silent += 1
        parts = [document] if isinstance(document, str) else document
        for ids in itertools.chain(tokenize(parts, tokenizer, name), [end]):
            silent = 0 if ids else silent
            yield ids
        if silent >= SILENT:
            raise UserError(f"{silent} documents of text '{name}' in a row give no tokens; check it and the tokenizer")


def tokens_hash(blocks: torch.Tensor) -> str:
    """SHA-256 over shape and int64 ids of a tensor of blocks: 16 hexadecimal digits."""
    digest = hashlib.sha256(str(tuple(blocks.shape)).encode())
    digest.update(blocks.contiguous().numpy())
    return digest.hexdigest()[:16]
