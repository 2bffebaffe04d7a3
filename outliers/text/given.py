"""Documents given as Python objects: strings, token ids, conversations, or rows of a data set."""

import itertools
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Integral
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from outliers.errors import UserError
from outliers.text.documents import SURROGATE
from outliers.text.templates import write_conversation

EXPECTED = "strings, lists of token ids, or conversations (lists of messages)"
LONGEST_REASON = 300  # characters of a template's error
MESSAGE = ("role", "content")

Text = str | os.PathLike | Iterable | torch.Tensor  # iterables include `datasets.Dataset`


class Conversation(NamedTuple):
    """A document that is a list of messages, which a tokenizer's chat template turns into text."""

    messages: Sequence[Mapping]


def text_name(text: Text) -> str:
    """Return the name of a text in messages: its name or path, or a description of the object. Rows use `text_label`,
    the file name without its folder."""
    if isinstance(text, (str, os.PathLike)):
        return os.fspath(text)
    if isinstance(text, torch.Tensor):
        return f"tensor of {' x '.join(map(str, text.shape))} token ids"
    count = f"{len(text)} " if isinstance(text, Sized) else ""
    return f"{type(text).__name__} of {count}{'rows' if _is_data_set(text) else 'documents'}"


def _is_data_set(text: Text) -> bool:
    """Return whether the text is of the library `datasets`, without importing that library."""
    datasets = sys.modules.get("datasets")
    return datasets is not None and isinstance(text, (datasets.Dataset, datasets.IterableDataset))


def given_documents(text: Iterable, column: str) -> Iterator[str | torch.Tensor | Conversation]:
    """Yield the checked documents of an iterable, or of a data set's column; token ids as int64 (tokens,)."""
    name, number = text_name(text), 0
    if _is_data_set(text) and text.column_names and column not in text.column_names:
        columns = ", ".join(text.column_names)
        raise UserError(f"{name} has no column '{column}' but {columns}; name one of them: load_text(…, column=…)")
    for number, document in enumerate(text, 1):
        yield _parse_entry(document.get(column) if _is_data_set(text) else document, f"document {number} of a {name}")
    if not number:
        raise UserError(f"text is an empty {type(text).__name__}; expected at least one document")


def _parse_entry(value: object, which: str) -> str | torch.Tensor | Conversation:
    """Return a document as its text, token ids or messages; raise UserError, which calls it `which`, if it is none."""
    if isinstance(value, str):
        if half := SURROGATE.search(value):
            raise UserError(f"{which} has half a surrogate pair, {half[0]!a}, which is no character")
        return value
    if isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim == 1:
        return checked_ids(torch.as_tensor(value), f"token ids of {which}")
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        if not value:
            raise UserError(f"{which} is an empty {type(value).__name__}; leave it out")
        if all(isinstance(entry, Integral) for entry in value):
            return checked_ids(torch.tensor(value), f"token ids of {which}")
        if all(isinstance(entry, Mapping) for entry in value):
            for number, field in itertools.product(range(len(value)), MESSAGE):
                if not isinstance(value[number].get(field), str):
                    where = f"message {number + 1} of {which}"
                    raise UserError(f"{where} has no text in its '{field}'; expected role and content")
            return Conversation(value)
    raise UserError(f"{which} is of type {type(value).__name__}; expected {EXPECTED}")


def checked_ids(ids: torch.Tensor, which: str) -> torch.Tensor:
    """Check token ids, int64 of one or two dimensions and not negative, and return them in host memory."""
    if ids.dtype != torch.int64 or ids.ndim not in (1, 2):
        kind = f"{str(ids.dtype).removeprefix('torch.')} of shape {tuple(ids.shape)}"
        raise UserError(f"{which} are {kind}; expected int64 (blocks, T), or (tokens,), which are cut into blocks")
    if ids.numel() and int(ids.min()) < 0:
        raise UserError(f"{which} go down to {int(ids.min())}; expected 0 or more")
    return ids.cpu()


def conversation_text(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the whole conversation as the model's chat template writes it, without a prompt for a further answer.

    Templates are programs, which `outliers.text.templates` runs within limits.
    """
    if tokenizer.chat_template is None:
        raise UserError(
            "the model's tokenizer has no chat template; give the conversations as strings, set "
            "tokenizer.chat_template, or take the tokenizer of a model that was trained to chat"
        )
    try:
        text, reason = write_conversation(
            tokenizer.get_chat_template(), conversation.messages, tokenizer.special_tokens_map
        )
    except ValueError as error:  # from transformers, of several templates without a default
        text, reason = None, str(error)
    if text is None:
        raise UserError(
            f"the tokenizer's chat template cannot write a conversation ({' '.join(reason.split())[:LONGEST_REASON]}); "
            "check its roles, or give the conversations as strings"
        )
    return text
