"""Families of models: what their architectures have in common."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from transformers import Cache, PretrainedConfig, PreTrainedModel

from outliers.models.anatomy.examples import Block, Example, input_ids


def two_tokens(_config: PretrainedConfig) -> Example:
    """Return an example of two tokens, both of them predicted."""
    ids = torch.zeros(2, dtype=torch.int64)
    return Example(ids, ids)


@dataclass(frozen=True)
class Family:
    """The traits that the models of a family share.

    Attributes:
        name: the name of the family.
        kinds: the types of models, by their configurations, that may belong to it.
        made_by: the auto class of transformers that makes them, with a head.
        predicted: returns, for a block and its last hidden states (T, features), the states that predict something and
            their labels, int64 (predicted,).
        inputs: returns the input of each stack for a block.
        keywords: arguments of the last stack beside its input; `use_cache` is False for models that generate.
        cache: the cache for passes without training, if the models take one.
        subject: a module with `read`, the refused options `REFUSED`, and `READS_TEXT`; by default the file in
            `outliers.subjects` that has the family's name.
        targets: returns, for a block of text, its token ids, int64 (T,), before any masks, and the positions
            of the predicted ones in them.
        smallest: returns a block that every model of a configuration can read.
        check: raises UserError if a model of a configuration cannot read a block that is no text.
        ids: returns the ids at the positions of a stack's input, int64 (T,).
        vocabulary: returns the number of ids.
        name_of: returns the name and the kind of an id where there is no tokenizer.
    """

    name: str
    kinds: Collection[str]
    made_by: type
    predicted: Callable[[Block, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    inputs: Callable[[PreTrainedModel, Block], tuple[torch.Tensor, ...]] = lambda _model, block: (input_ids(block),)
    keywords: Mapping[str, object] = field(default_factory=dict)
    cache: Cache | None = None
    subject: object = None
    targets: Callable[[Block], tuple[torch.Tensor, torch.Tensor]] | None = None
    smallest: Callable[[PretrainedConfig], Block] = two_tokens
    check: Callable[[PretrainedConfig, Block], None] | None = None
    ids: Callable[[PretrainedConfig, torch.Tensor], torch.Tensor] = lambda _config, read: read
    vocabulary: Callable[[PretrainedConfig], int] = lambda config: config.get_text_config().vocab_size
    name_of: Callable[[PretrainedConfig, int], tuple[str, str]] | None = None
