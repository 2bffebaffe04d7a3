"""Tokens as people read them."""

from transformers import PreTrainedTokenizerBase

LONGEST = 24  # characters


def visible_token(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    """The text of a token in quotes, with spaces as ␣ and other blank characters escaped: '␣the', '\\n'.

    Without quotes, a piece of a character as the vocabulary writes it, such as <0xE6>; or the number of a token that
    the vocabulary lacks.
    """
    piece = tokenizer.convert_ids_to_tokens(token)
    if piece is None:
        return f"#{token}"
    once, twice = (_decoded(tokenizer, [token] * count) for count in (1, 2))
    text = twice[len(once) :]  # some tokenizers leave out the space before the first token of a text
    if not text or "\N{REPLACEMENT CHARACTER}" in text:
        return piece
    if len(text) > LONGEST:
        text = f"{text[: LONGEST - 1]}…"
    return repr(text).replace(" ", "␣")


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
