"""Views of a model: the layers of a stack with the positions that they read, or a decoder's cross-attention."""

from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from outliers.criterion import CROSS
from outliers.errors import UserError
from outliers.models.anatomy import ids_of, layers_of, stacks_of
from outliers.models.anatomy.examples import Block


class StackView(NamedTuple):
    """Layers whose hidden states have the same positions.

    name: that of the stack, "" if the model has a single one; "cross" for what a decoder's layers read of the encoder.
    layers: their numbers. position_stack: the number of the stack that reads these positions. bidirectional: whether
    queries attend to all keys.
    """

    name: str
    layers: tuple[int, ...]
    position_stack: int
    bidirectional: bool

    @property
    def place(self) -> str:
        """The place of all layers, such as layers.0:6."""
        return f"layers.{self.layers[0]}:{self.layers[-1] + 1}"

    @property
    def cross(self) -> bool:
        return self.name == CROSS

    def ids(self, model: PreTrainedModel, block: Block) -> torch.Tensor:
        """Return the ids at the positions of a block, int64 (T,): for "cross" those of the encoder."""
        return ids_of(model, block)[self.position_stack]


def stack_view_names(config: PretrainedConfig) -> list[str]:
    return [
        name for stack in stacks_of(config) for name, exists in ((stack.stack, True), (CROSS, stack.cross_in)) if exists
    ]


def of_stack(name: str) -> dict[str, str]:
    """Return the fields of a row that name a view; none if the model has a single stack."""
    return {"stack": name} if name else {}


def stack_views(model: PreTrainedModel) -> dict[str, StackView]:
    layers, stacks = layers_of(model), stacks_of(model.config)
    views = {}
    for place, stack in enumerate(stacks):
        numbers = tuple(layer.number for layer in layers if layer.stack == place)
        views[stack.stack] = StackView(stack.stack, numbers, place, stack.bidirectional)
        if stack.cross_in:
            views[CROSS] = StackView(CROSS, numbers, place - 1, True)
    return views


def stack_view(model: PreTrainedModel, name: str | None) -> StackView:
    """Return a view by its name, or the only one for None.

    Raises:
        UserError: there is no such view, or there are several.
    """
    views = stack_views(model)
    if name is None and len(views) == 1:
        return next(iter(views.values()))
    if name not in views:
        kinds = ", ".join(map(repr, views)) if len(views) > 1 else "none, for this model has one stack of layers"
        raise UserError(f"stack {name!r}; expected {kinds}" if name else f"no stack is named; expected {kinds}")
    return views[name]
