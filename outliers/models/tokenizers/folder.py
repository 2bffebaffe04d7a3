"""The tokenizer of a folder or repository, as its tokenizer.json defines it, whatever class the configuration names.

transformers rebuilds some classes from the vocabulary of the file, with rules of their own. So the result is compared
with the file, and the file is used if they differ.
"""

import json
import logging
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outliers.errors import UserError, reason_of, shown
from outliers.models.config_file import FILE, read_config_file
from outliers.models.source import Source, file_of
from outliers.terminal.printing import silence

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
NULL = type(None)
JSON_NAMES = {str: "text", dict: "an object", list: "a list", NULL: "null", bool: "true or false"} | dict.fromkeys(
    (int, float), "a number"
)
KINDS: dict[str, dict[str, tuple]] = {  # types of fields, which transformers reads unchecked
    WHOLE: {"model": (dict,), "added_tokens": (list,)},
    CONFIG: {
        "tokenizer_class": (str, NULL),
        "model_max_length": (int, float, NULL),
        "added_tokens_decoder": (dict,),
        "model_input_names": (list,),
        "split_special_tokens": (bool,),
        "chat_template": (str, list, dict, NULL),
        **dict.fromkeys(("additional_special_tokens", "extra_special_tokens"), (list, dict, NULL)),
        **dict.fromkeys(("padding_side", "truncation_side"), (str,)),
        **dict.fromkeys(ROLES, (str, dict, NULL)),
    },
}
logger = logging.getLogger(__name__)


def read_folder_tokenizer(
    source: Source, name: str, config: PretrainedConfig | None, **keywords
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a folder or repository.

    config: of its model; None if there is none that transformers can parse. keywords: for transformers.

    Raises:
        UserError: it has no tokenizer, or a file larger than any tokenizer's.
    """
    _check_files(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, config=config, **keywords)
        names = set(type(tokenizer).vocab_files_names.values())  # empty for a tokenizer of bytes
        _encode_probe(tokenizer)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of any class; a missing vocabulary may explain it
        _check_present(source, name, VOCABULARIES)
        try:
            tokenizer, names = PreTrainedTokenizerFast.from_pretrained(source.path, **keywords), set()
            _encode_probe(tokenizer)
        except Exception:  # the file cannot be read without its class either
            raise error from None
        logger.warning(
            f"warning: the class of the tokenizer of '{name}' cannot read it ({reason_of(error, 100)}); its {WHOLE} is "
            "read"
        )
    if names:
        _check_present(source, name, {*names, *VOCABULARIES})
    file = file_of(source, WHOLE)
    if file is not None and type(tokenizer) is not PreTrainedTokenizerFast:
        tokenizer = _checked_against_file(tokenizer, file, source, name, keywords)
    if not set(_encode_probe(tokenizer, " ".join(tokenizer.get_vocab())[: len(PROBE)])) - {tokenizer.unk_token_id}:
        raise _error(name, f"what transformers makes of its files, of {len(tokenizer):,} tokens, encodes no text")
    if vocabulary := _vocabulary(source):
        check_size(tokenizer, vocabulary, name)
    return tokenizer


def _encode_probe(tokenizer: PreTrainedTokenizerBase, more: str = "") -> list[int]:
    """Return the ids of a text of many kinds of characters, `PROBE`, and more text."""
    with silence():
        return tokenizer(PROBE + more, add_special_tokens=False).input_ids


def _vocabulary(source: Source) -> int | None:
    file = file_of(source, FILE)
    fields = {} if file is None else read_config_file(file)
    sizes = [part.get("vocab_size") for part in (fields, fields.get("text_config")) if isinstance(part, dict)]
    return next((size for size in sizes if type(size) is int), None)


def check_size(tokenizer: PreTrainedTokenizerBase, vocabulary: int, name: str) -> None:
    """Raise UserError if a tokenizer cannot belong to a model with a vocabulary of this size."""
    if abs(len(tokenizer) - vocabulary) > max(ROOM, vocabulary / 2):
        raise _error(name, f"what is there has {len(tokenizer):,} tokens, and the model's vocabulary {vocabulary:,}")


def _error(name: str, reason: str) -> UserError:
    return UserError(f"no tokenizer in '{name}': {reason}; expected the files of the model's own, such as {WHOLE}")


def _check_present(source: Source, name: str, names) -> None:
    """Raise UserError if none of some files exists, because transformers would invent a tokenizer."""
    if not any(file_of(source, file, download=False) for file in names):
        raise _error(name, "it holds no vocabulary")


def _check_files(source: Source) -> None:
    """Raise UserError for files that cannot be a tokenizer's, before a library parses them."""
    for name in (WHOLE, CONFIG, *VOCABULARIES[1:]):
        file = file_of(source, name, download=name in KINDS)
        if file is None:
            continue
        if (size := file.stat().st_size) > LARGEST_FILE:
            raise UserError(
                f"'{file}' has {size / 1e6:,.0f} MB; expected at most {LARGEST_FILE >> 20} MB, as every tokenizer has: "
                "download it again"
            )
        if name in KINDS:
            added = _read_fields(file).get(ADDED[name]) or ()
            if len(added) > MOST_ADDED:
                raise UserError(
                    f"'{file}' adds {len(added):,} tokens to its vocabulary; expected at most {MOST_ADDED:,}: make "
                    "them a part of the vocabulary"
                )


def _read_fields(file: Path) -> dict:
    """Return the fields of a JSON file; raise UserError if it holds no object, or a field of an unexpected type."""
    try:
        fields = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"'{file}' is not valid JSON ({reason_of(error, 150)}); download it again") from None
    if not isinstance(fields, dict):
        raise UserError(f"'{file}' holds {shown(fields, json.dumps)}; expected a JSON object: download it again")
    for field, kinds in KINDS[file.name].items():
        value = fields.get(field)
        if (field in fields or file.name == WHOLE) and type(value) not in kinds:
            expected = " or ".join(dict.fromkeys(JSON_NAMES[kind] for kind in kinds))
            raise UserError(f"'{file}' has {field} {shown(value, json.dumps)}; expected {expected}")
        if isinstance(value, list) and not all(isinstance(entry, str | dict) for entry in value):
            raise UserError(f"'{file}' has {field} {shown(value, json.dumps)}; expected a list of text or objects")
    return fields


def _checked_against_file(
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
    if _encode_probe(by_class) != _encode_probe(tokenizer):
        logger.warning(
            f"warning: {type(by_class).__name__}, the class of the tokenizer of '{name}', makes other tokens than its "
            f"{WHOLE}; the file is read"
        )
    return tokenizer


def _parts(tokenizer: Tokenizer) -> tuple:
    """Return the parts of a tokenizer that determine the tokens of a text, apart from added tokens."""
    parts = json.loads(tokenizer.to_str())
    return parts["normalizer"], parts["pre_tokenizer"], {name: value for name, value in parts["model"].items() if value}
