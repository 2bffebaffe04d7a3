"""A family of models: what its architectures have in common."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from outliers.models.anatomy.examples import Block, read_ids
from outliers.models.anatomy.row import Anatomy


def read_alone(_model: PreTrainedModel, block: Block) -> tuple[torch.Tensor]:
    """What the only stack reads of a block."""
    return (read_ids(block),)


@dataclass(frozen=True)
class Family:
    """What models of a family have in common.

    name: to call it. subject: what makes its blocks, with a function `read` and the options that it refuses, `REFUSED`;
    by default the file of its name in `outliers.subjects`. rows: the anatomy of each
    architecture, by the type of model in a configuration. made_by: the class of transformers that makes them, with a
    head. inputs: what each stack reads of a block. predicted: of a block and the last hidden states (T, features) those
    that predict something, and what: int64 (predicted,). keywords: what the last stack is called with beside what it
    reads; of a model that generates `use_cache` is False among them.
    """

    name: str
    rows: Mapping[str, Anatomy]
    made_by: type
    predicted: Callable[[Block, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    inputs: Callable[[PreTrainedModel, Block], tuple[torch.Tensor, ...]] = read_alone
    keywords: Mapping[str, object] = field(default_factory=dict)
    subject: object = None
