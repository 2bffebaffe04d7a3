"""The training text of the pocket family, in the order of reading."""

import hashlib
import random
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import ByteLevelBPETokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from outliers.errors import UserError
from outliers.models.pocket.ladder import CONTEXT, VOCABULARY
from outliers.text.documents import read_file

C4_TRAINING_ROWS = 900  # rows 900 to 999 and the other splits of WikiText-2 are held out


def wikitext_articles(text: str) -> list[str]:
    """Split WikiText's tokenized text into articles and undo its tokenization (spaces around marks, ` @-@ `)."""
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


class SpecialTokens(NamedTuple):
    """The special tokens of a tokenizer, which come first in its vocabulary: those by role, then the others.

    template: the formats of one text $A and of two, for `TemplateProcessing`; None adds no tokens.
    """

    roles: dict[str, str]
    others: tuple[str, ...] = ()
    template: tuple[str, str | None] | None = None

    @property
    def tokens(self) -> list[str]:
        return list(dict.fromkeys([*self.roles.values(), *self.others]))


END_OF_TEXT = "<|endoftext|>"
CAUSAL = SpecialTokens({"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "unk_token": END_OF_TEXT})


class Corpus(NamedTuple):
    """The training text of the pocket family.

    ids: token ids, uint16 (tokens,), of the documents in a seeded order. folder: that of the
    tokenizer, or of the image processor.
    """

    ids: np.ndarray
    folder: Path


def prepare_corpus(c4: Path, wikitext: Path, work: Path, special_tokens: SpecialTokens = CAUSAL) -> Corpus:
    """Train the tokenizer and tokenize the text, once for the same files and special tokens; both are cached in a
    folder of `work`."""
    read = c4.read_bytes() + wikitext.read_bytes() + " ".join(special_tokens.tokens).encode()
    digest = hashlib.sha256(read).hexdigest()[:12]
    folder = work / f"corpus-{digest}"
    ids_file, tokenizer_folder = folder / "tokens.npy", folder / "tokenizer"
    if ids_file.exists():
        return Corpus(np.load(ids_file), tokenizer_folder)
    folder.mkdir(parents=True, exist_ok=True)
    documents = read_file(c4)[:C4_TRAINING_ROWS] + wikitext_articles("\n".join(read_file(wikitext)))
    random.Random(0).shuffle(documents)
    tokenizer = ByteLevelBPETokenizer()
    first, end = special_tokens.tokens, special_tokens.tokens.index(special_tokens.roles["eos_token"])
    tokenizer.train_from_iterator(documents, vocab_size=VOCABULARY, special_tokens=first, show_progress=False)
    ids = np.concatenate([np.array([*row.ids, end], dtype=np.uint16) for row in tokenizer.encode_batch(documents)])
    if special_tokens.template:
        numbered = list(zip(first, range(len(first)), strict=True))
        tokenizer.post_processor = TemplateProcessing(*special_tokens.template, special_tokens=numbered)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        additional_special_tokens=list(special_tokens.others),
        model_max_length=CONTEXT,
        **special_tokens.roles,
    )
    fast.save_pretrained(tokenizer_folder)
    part = folder / "part.npy"
    np.save(part, ids)
    part.replace(ids_file)  # atomic: the file exists only once it is complete
    return Corpus(ids, tokenizer_folder)


def blocks_in_order(ids: np.ndarray, steps: int, batch: int, seed: int = 0, block: int = CONTEXT) -> np.ndarray:
    """Return blocks (steps · batch, block) of ids (tokens,), repeating the text for as many epochs as necessary.

    Each epoch cuts the text at another offset and shuffles the blocks; those beyond whole batches are dropped.

    Raises:
        UserError: the text has fewer blocks than a batch.
    """
    if (there := (len(ids) - block + 1) // block) < batch:  # at the last offset
        raise UserError(
            f"the text of training has {there} blocks of {block} tokens, and a step takes {batch}; give more text, or "
            "a smaller batch"
        )
    generator = np.random.default_rng(seed)
    epochs, missing = [], steps
    while missing > 0:
        offset = generator.integers(block)
        blocks = ids[offset:][: (len(ids) - offset) // block * block].reshape(-1, block)
        order = generator.permutation(len(blocks))
        whole = order[: min(missing, len(order) // batch) * batch]
        epochs.append(blocks[whole])
        missing -= len(whole) // batch
    return np.concatenate(epochs)
