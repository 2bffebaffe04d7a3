"""The tokenizer of a folder or repository, as its tokenizer.json defines it, whatever class the configuration names.

transformers rebuilds some classes from the vocabulary of the file, with rules of their own. So the result is compared
with the file, and if they differ the file alone is used.
"""

import json
import logging
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outliers.errors import UserError, reason_of
from outliers.models.config_file import FILE, read_config_file
from outliers.models.source import Source, file_of

WHOLE, CONFIG = "tokenizer.json", "tokenizer_config.json"
ADDED = {WHOLE: "added_tokens", CONFIG: "added_tokens_decoder"}  # fields that list single tokens
VOCABULARIES = (  # files that may contain a vocabulary
    *(WHOLE, "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tekken.json"),
    *("spm.model", "source.spm", "bpe.codes"),
)
LARGEST_FILE = 64 << 20  # bytes; the largest files of 2026 have 35 million
MOST_ADDED = 1 << 17  # added tokens; speech models have 66,000
ROOM = 256  # tokens by which a small vocabulary and its tokenizer may differ
PROBE = "It's 1969:\n\n  The 2nd  naïve café — WON'T  12345 你好!!\n\n1. x = y_2;\t(a)\r\n <s>ab</s> "
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
logger = logging.getLogger(__name__)


def read_tokenizer(source: Source, name: str, **keywords) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or repository.

    keywords: for transformers.

    Raises:
        UserError: it has no tokenizer, or a file larger than any tokenizer's.
    """
    _check_files(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, **keywords)
    except Exception as error:  # any error: a missing vocabulary explains it, or the class that the folder names
        _check_present(source, name, VOCABULARIES)
        try:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(source.path, **keywords)
        except Exception:  # the file cannot be read without its class either
            raise error from None
        logger.warning(
            f"warning: the class of the tokenizer of '{name}' cannot read it ({reason_of(error, 100)}); its {WHOLE} is "
            "read"
        )
    if names := set(type(tokenizer).vocab_files_names.values()):  # empty for a tokenizer of bytes
        _check_present(source, name, {*names, *VOCABULARIES})
    file = file_of(source, WHOLE)
    if file is not None and type(tokenizer) is not PreTrainedTokenizerFast:
        tokenizer = _as_the_file_says(tokenizer, file, source, name, keywords)
    ids = set(tokenizer(PROBE + " ".join(tokenizer.get_vocab())[: len(PROBE)], add_special_tokens=False).input_ids)
    if not ids - {tokenizer.unk_token_id}:
        raise _none(name, f"what transformers makes of its files, of {len(tokenizer):,} tokens, encodes no text")
    if vocabulary := _vocabulary(source):
        check_size(tokenizer, vocabulary, name)
    return tokenizer


def _vocabulary(source: Source) -> int | None:
    file = file_of(source, FILE)
    fields = {} if file is None else read_config_file(file)
    sizes = [part.get("vocab_size") for part in (fields, fields.get("text_config")) if isinstance(part, dict)]
    return next((size for size in sizes if type(size) is int), None)


def check_size(tokenizer: PreTrainedTokenizerBase, vocabulary: int, name: str) -> None:
    """Raise UserError if a tokenizer cannot belong to a model with a vocabulary of this size."""
    if abs(len(tokenizer) - vocabulary) > max(ROOM, vocabulary / 2):
        raise _none(name, f"what is there has {len(tokenizer):,} tokens, and the model's vocabulary {vocabulary:,}")


def _none(name: str, reason: str) -> UserError:
    return UserError(f"no tokenizer in '{name}': {reason}; expected the files of the model's own, such as {WHOLE}")


def _check_present(source: Source, name: str, names) -> None:
    """Raise UserError if none of some files exists: transformers would invent a tokenizer."""
    if not any(file_of(source, file, download=False) for file in names):
        raise _none(name, "it holds no vocabulary")


def _check_files(source: Source) -> None:
    """Raise UserError for files that no tokenizer has, before a library parses them."""
    for name in (WHOLE, CONFIG, *VOCABULARIES[1:]):
        file = file_of(source, name, download=name in ADDED)
        if file is None:
            continue
        if (size := file.stat().st_size) > LARGEST_FILE:
            raise UserError(
                f"'{file}' has {size / 1e6:,.0f} MB; expected at most {LARGEST_FILE >> 20} MB, as every tokenizer has: "
                "download it again"
            )
        if name in ADDED:
            fields = json.loads(file.read_bytes())
            added = fields.get(ADDED[name]) or () if isinstance(fields, dict) else ()
            if len(added) > MOST_ADDED:
                raise UserError(
                    f"'{file}' adds {len(added):,} tokens to its vocabulary; expected at most {MOST_ADDED:,}: make "
                    "them a part of the vocabulary"
                )


def _as_the_file_says(
    by_class: PreTrainedTokenizerBase, file: Path, source: Source, name: str, keywords: dict
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a class if it equals that of the file; else the file's, with the roles of special
    tokens."""
    own = Tokenizer.from_file(str(file))
    if by_class.is_fast and _parts(by_class.backend_tokenizer) == _parts(own):
        return by_class
    tokenizer = PreTrainedTokenizerFast.from_pretrained(source.path, **keywords)
    for role in ROLES:  # some files leave roles to the class
        token = getattr(by_class, role)
        if getattr(tokenizer, role) is None and token in own.get_vocab():
            setattr(tokenizer, role, token)
    if by_class(PROBE, add_special_tokens=False).input_ids != tokenizer(PROBE, add_special_tokens=False).input_ids:
        logger.warning(
            f"warning: {type(by_class).__name__}, the class of the tokenizer of '{name}', makes other tokens than its "
            f"{WHOLE}; the file is read"
        )
    return tokenizer


def _parts(tokenizer: Tokenizer) -> tuple:
    """Return the parts of a tokenizer that determine the tokens of a text, apart from added tokens."""
    parts = json.loads(tokenizer.to_str())
    return parts["normalizer"], parts["pre_tokenizer"], {name: said for name, said in parts["model"].items() if said}
