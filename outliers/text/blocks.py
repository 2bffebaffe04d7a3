"""Documents to token blocks: one table of named texts, and the cut into blocks."""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from outliers.errors import UserError, unknown_name
from outliers.text.documents import c4, read_file, sample, wikitext2


class NamedText(NamedTuple):
    """A text known by name: where its documents come from, and the protocol that cuts them."""

    documents: Callable[[], Iterable[str]]
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
    if Path(name).is_file():
        return NamedText(lambda: read_file(name), "first-blocks")
    if Path(name).suffix or "/" in name:
        raise UserError(f"text file '{name}' does not exist; expected a file or one of {', '.join(TEXTS)}")
    raise unknown_name("text", name, TEXTS, "or the path of a .txt, .txt.gz or .jsonl file")


def load_text(
    name: str, tokenizer: PreTrainedTokenizerBase, block: int, blocks: int, bos: bool = False
) -> torch.Tensor:
    """Tokenise the start of a text and cut it into blocks.

    Each document is tokenised without special tokens and followed by the tokenizer's end-of-sequence id where it has
    one; the ids are joined and cut without padding or overlap. Only as many documents are read as the blocks need.

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
        UserError: the text is unknown, unreachable or too short, a size is out of range, or the tokenizer has no first
            token.
    """
    if block < 2 or blocks < 1:
        raise UserError(f"{blocks} blocks of {block} tokens; expected at least 1 block of at least 2 tokens")
    if bos and tokenizer.bos_token_id is None:
        raise UserError("the model's tokenizer has no first token (bos_token_id); run without --bos")
    first = torch.full((blocks, int(bos)), tokenizer.bos_token_id if bos else 0)
    of_text = block - int(bos)
    wanted, ids = of_text * blocks, []
    for document_ids in _tokenise(find_text(name).documents(), tokenizer):
        ids += document_ids
        if len(ids) >= wanted:
            return torch.cat([first, torch.tensor(ids[:wanted]).view(blocks, of_text)], 1)
    raise UserError(
        f"text '{name}' is too short: {len(ids)} tokens make {len(ids) // of_text} blocks of {block}, not {blocks}; "
        "ask for fewer or shorter blocks, or give a longer text"
    )


def _tokenise(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for document in documents:
        yield tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"] + end


def tokens_hash(blocks: torch.Tensor) -> str:
    """SHA-256 over shape and int64 ids of a tensor of blocks: 16 hexadecimal digits."""
    digest = hashlib.sha256(str(tuple(blocks.shape)).encode())
    digest.update(blocks.contiguous().numpy())
    return digest.hexdigest()[:16]
