"""Tokens as people read them."""

from collections.abc import Callable, Collection, Iterable
from functools import partial

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from outliers.models.anatomy import family_of
from outliers.models.load import load_config, load_tokenizer
from outliers.terminal.printing import is_line

LONGEST = 24  # characters
LONGEST_NAME = 10 * LONGEST + 2  # of a name, all of whose characters are escaped
DELIMITER, WORD_START, INSIDE_WORD = "delimiter", "word start", "inside a word"  # what a token is by its text


def visible_token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The text of a token in quotes, with spaces as ␣ and other blank characters escaped: '␣the', '\\n'.

    Without quotes, a piece of a character as the vocabulary writes it, such as <0xE6>; or the number of a token that
    the vocabulary lacks.
    """
    return _name_and_kind(tokenizer, token, ())[0]


def named_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int]) -> dict[int, tuple[str, str]]:
    """Of each token id its name, see `visible_token`, and what it is by its text.

    A delimiter has no letter or digit, or is special, such as the end of a text; a word start begins with a blank; all
    others are inside a word, also a word's first token where no blank belongs to it, as after a line break or a
    bracket, and pieces of a character.
    """
    special = set(tokenizer.all_special_ids)
    return {token: _name_and_kind(tokenizer, token, special) for token in tokens}


def named_ids(config: PretrainedConfig, tokenizer: object, ids: Iterable[int]) -> dict[int, tuple[str, str]]:
    """The same of what stands at positions: tokens; of a vision model, for which any object does, places of a picture,
    such as "[CLS]", "register 0" and "patch 3,5" (row, column)."""
    name_of = family_of(config).name_of
    return named_tokens(tokenizer, ids) if name_of is None else {place: name_of(config, place) for place in ids}


def namer_of(model: str, revision: str | None = None) -> Callable[[int], str]:
    """A function that names the ids of a model's positions."""
    config = load_config(model, revision)
    name_of = family_of(config).name_of
    if name_of is None:
        return partial(visible_token, load_tokenizer(model, revision))
    return lambda place: name_of(config, place)[0]


def _name_and_kind(tokenizer: PreTrainedTokenizerBase, token: int, special: Collection[int]) -> tuple[str, str]:
    piece = tokenizer.convert_ids_to_tokens(token)
    text = "" if piece is None else _text_of(tokenizer, token)
    return f"#{token}" if piece is None else _visible(piece, text), DELIMITER if token in special else _kind_of(text)


def _text_of(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The text of a token; empty where it has none of its own, such as a piece of a character."""
    once, twice = (tokenizer.decode([token] * count, clean_up_tokenization_spaces=False) for count in (1, 2))
    text = twice[len(once) :]  # some tokenizers leave out the space before the first token of a text
    return "" if "\N{REPLACEMENT CHARACTER}" in text else text


def _visible(piece: str, text: str) -> str:
    if not text:
        return piece if is_line(piece) and len(piece) <= LONGEST_NAME else repr(piece[:LONGEST])
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 1]}…"
    return repr(text).replace(" ", "␣")


def _kind_of(text: str) -> str:
    if text and not any(map(str.isalnum, text)):
        return DELIMITER
    return WORD_START if text[:1].isspace() else INSIDE_WORD
