"""Names of tokens and picture positions for people to read."""

from collections.abc import Callable, Collection, Iterable
from functools import partial

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from outliers.models.anatomy import family_of
from outliers.models.load import load_config, load_tokenizer
from outliers.terminal.printing import is_line

LONGEST = 24  # characters
LONGEST_NAME = 10 * LONGEST + 2  # length of a name if every character is escaped
DELIMITER, WORD_START, INSIDE_WORD = "delimiter", "word start", "inside a word"  # kinds of tokens, by their text


def visible_token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    r"""Return the text of a token in quotes, with spaces as ␣ and other blank characters escaped: '␣the', '\n'.

    A token that is part of a character has no quotes and is written as in the vocabulary, such as <0xE6>; an id that
    the vocabulary lacks is written as its number.
    """
    return _name_and_kind(tokenizer, token, ())[0]


def named_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int]) -> dict[int, tuple[str, str]]:
    """Return the name (see `visible_token`) and the kind of each token id.

    The kinds: a delimiter has no letter or digit, or is a special token, such as the end of a text; a word start begins
    with a blank; all other tokens are inside a word. These include the first token of a word without a blank, as after
    a line break or a bracket, and parts of a character.
    """
    special = set(tokenizer.all_special_ids)
    return {token: _name_and_kind(tokenizer, token, special) for token in tokens}


def named_ids(config: PretrainedConfig, tokenizer: object, ids: Iterable[int]) -> dict[int, tuple[str, str]]:
    """Return the name and the kind of each id at a model's positions.

    Tokens are named as in `named_tokens`. A vision model needs no tokenizer: its ids are places of a picture, such as
    "[CLS]", "register 0" and "patch 3,5" (row, column).
    """
    name_of = family_of(config).name_of
    return named_tokens(tokenizer, ids) if name_of is None else {place: name_of(config, place) for place in ids}


def namer_of(model: str, revision: str | None = None) -> Callable[[int], str]:
    """Return a function that names the ids at a model's positions."""
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
    """Return the text of a token; "" if it has none of its own, such as a part of a character."""
    once, twice = (tokenizer.decode([token] * count, clean_up_tokenization_spaces=False) for count in (1, 2))
    text = twice[len(once) :]  # some tokenizers drop the space before the first token of a text
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
