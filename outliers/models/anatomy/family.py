"""A family of models: what its architectures have in common."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

import torch
from transformers import Cache, PretrainedConfig, PreTrainedModel

from outliers.models.anatomy.examples import Block, Example, read_ids


def two_tokens(_config: PretrainedConfig) -> Example:
    """Two tokens, of which each is predicted."""
    ids = torch.zeros(2, dtype=torch.int64)
    return Example(ids, ids)


@dataclass(frozen=True)
class Family:
    """The traits that the models of a family share.

    name: to call it. subject: what makes its blocks, with a function `read`, the options that it refuses, `REFUSED`,
    and whether it reads text, `READS_TEXT`; by default the file of its name in `outliers.subjects`. kinds: the
    types of model in configurations that may be of it. made_by: the class of transformers that makes them,
    with a head. inputs: what each stack reads of a block. predicted: of a block and the last hidden states (T,
    features) those that predict something, and what: int64 (predicted,). keywords: what the last stack is called with
    beside what it reads; of a model that generates `use_cache` is False among them. cache: that of a pass which nothing
    is trained by, if it takes one.
    places: of a block of text, the tokens among which the predicted ones stand, int64 (T,), and their positions.
    smallest: a block that a model of a configuration can read.

    Of what is no text: check: raises UserError where a model of a configuration cannot read a block. ids: what stands
    at the positions of what a stack reads, int64 (T,). vocabulary: how many ids there are. name_of: what an id is
    called, and what kind of thing it is, where no tokenizer says so.
    """

    name: str
    kinds: Collection[str]
    made_by: type
    predicted: Callable[[Block, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    inputs: Callable[[PreTrainedModel, Block], tuple[torch.Tensor, ...]] = lambda _model, block: (read_ids(block),)
    keywords: Mapping[str, object] = field(default_factory=dict)
    cache: Cache | None = None
    subject: object = None
    places: Callable[[Block], tuple[torch.Tensor, torch.Tensor]] | None = None
    smallest: Callable[[PretrainedConfig], Block] = two_tokens
    check: Callable[[PretrainedConfig, Block], None] | None = None
    ids: Callable[[PretrainedConfig, torch.Tensor], torch.Tensor] = lambda _config, read: read
    vocabulary: Callable[[PretrainedConfig], int] = lambda config: config.get_text_config().vocab_size
    name_of: Callable[[PretrainedConfig, int], tuple[str, str]] | None = None
