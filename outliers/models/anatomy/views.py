"""Views of a model: the layers of a stack with the positions that they read, or what a decoder reads of an encoder."""

from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy import ids_of, layers_of, stacks_of
from outliers.models.anatomy.examples import Block

CROSS = "cross"


class View(NamedTuple):
    """Layers whose hidden states have positions in common.

    name: of the stack; "" of a model that has one; "cross" of what the layers of a decoder read of the encoder. layers:
    their numbers. inputs: which of the stacks reads these positions. bidirectional: whether queries attend to all keys.
    """

    name: str
    layers: tuple[int, ...]
    inputs: int
    bidirectional: bool

    @property
    def written(self) -> str:
        """Its layers as a place: layers.0:6."""
        return f"layers.{self.layers[0]}:{self.layers[-1] + 1}"

    @property
    def cross(self) -> bool:
        """Whether it is of cross-attention."""
        return self.name == CROSS

    def positions(self, model: PreTrainedModel, block: Block) -> torch.Tensor:
        """The ids of what stands at the positions of a block, int64 (T,)."""
        return ids_of(model, block)[self.inputs]


def view_names(config: PretrainedConfig) -> list[str]:
    """The names of the views of a model by its configuration."""
    return [
        name for stack in stacks_of(config) for name, there in ((stack.stack, True), (CROSS, stack.cross_in)) if there
    ]


def of_stack(name: str) -> dict[str, str]:
    """The fields of a row that name a view: none where a model has one stack."""
    return {"stack": name} if name else {}


def views_of(model: PreTrainedModel) -> dict[str, View]:
    """The views of a model by their names."""
    layers, stacks = layers_of(model), stacks_of(model.config)
    views = {}
    for place, stack in enumerate(stacks):
        numbers = tuple(layer.number for layer in layers if layer.stack == place)
        views[stack.stack] = View(stack.stack, numbers, place, stack.bidirectional)
        if stack.cross_in:
            views[CROSS] = View(CROSS, numbers, place - 1, True)
    return views


def view_of(model: PreTrainedModel, name: str | None) -> View:
    """A view by its name; None for the only one.

    Raises:
        UserError: there is no such view, or there are several.
    """
    views = views_of(model)
    if name is None and len(views) == 1:
        return next(iter(views.values()))
    if name not in views:
        kinds = ", ".join(map(repr, views)) if len(views) > 1 else "none, for this model has one stack of layers"
        raise UserError(f"stack {name!r}; expected {kinds}" if name else f"no stack is named; expected {kinds}")
    return views[name]
