"""The text of a training, in the order in which it is seen."""

import hashlib
import random
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

from outliers.models.pocket.ladder import CONTEXT, VOCABULARY
from outliers.text.documents import read_file

END_OF_TEXT = "<|endoftext|>"
C4_TRAINING_ROWS = 900  # rows 900-999 are held out, and so is everything from WikiText-2 but its train split


def wikitext_articles(text: str) -> list[str]:
    """Split WikiText's tokenised form into articles and undo its tokenisation (spaces around marks, ` @-@ `)."""
    articles = re.split(r"(?m)^ (?== [^=])", text)
    rules = [
        (r" @([-,.])@ ", r"\1"),
        (r" ([,.;:!?%)\]])", r"\1"),
        (r"([(\[$]) ", r"\1"),
        (r' " ([^"]*?) " ', r' "\1" '),
        (r" '(s|t|re|ve|ll|d|m)\b", r"'\1"),
        (r"(?m)^ | $", ""),
        (r"\n{2,}", "\n"),
    ]
    for pattern, replacement in rules:
        articles = [re.sub(pattern, replacement, article) for article in articles]
    return [article.strip() for article in articles if len(article) > 200]


class Corpus(NamedTuple):
    """The pocket family's text as ids, uint16 (tokens,), documents in a seeded order; and its tokenizer's folder."""

    ids: np.ndarray
    tokenizer: Path


def prepare(c4: Path, wikitext: Path, work: Path) -> Corpus:
    """Train the tokenizer and tokenise the text, once for the same two files: both are kept in a folder of `work`."""
    digest = hashlib.sha256(c4.read_bytes() + wikitext.read_bytes()).hexdigest()[:12]
    folder = work / f"corpus-{digest}"
    ids_file, tokenizer_folder = folder / "tokens.npy", folder / "tokenizer"
    if ids_file.exists():
        return Corpus(np.load(ids_file), tokenizer_folder)
    folder.mkdir(parents=True, exist_ok=True)
    documents = read_file(c4)[:C4_TRAINING_ROWS] + wikitext_articles("\n".join(read_file(wikitext)))
    random.Random(0).shuffle(documents)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(documents, vocab_size=VOCABULARY, special_tokens=[END_OF_TEXT], show_progress=False)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        model_max_length=CONTEXT,
    )
    fast.save_pretrained(tokenizer_folder)
    ids = np.concatenate([np.array([*row.ids, 0], dtype=np.uint16) for row in tokenizer.encode_batch(documents)])
    part = folder / "part.npy"
    np.save(part, ids)
    part.replace(ids_file)  # which is there once all of it is
    return Corpus(ids, tokenizer_folder)


def blocks_in_order(ids: np.ndarray, steps: int, batch: int, seed: int = 0) -> np.ndarray:
    """Blocks (steps · batch, CONTEXT) of ids (tokens,), as often over them as it takes.

    Each epoch cuts the text at another offset and shuffles the blocks; what is left of an epoch beyond whole batches is
    not seen.
    """
    generator = np.random.default_rng(seed)
    epochs, missing = [], steps
    while missing > 0:
        offset = generator.integers(CONTEXT)
        blocks = ids[offset:][: (len(ids) - offset) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
        order = generator.permutation(len(blocks))
        whole = order[: min(missing, len(order) // batch) * batch]
        epochs.append(blocks[whole])
        missing -= len(whole) // batch
    return np.concatenate(epochs)
