"""Positions to which no later one attends, as if they were not there for attention."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from outliers.errors import UserError
from outliers.models.variant import Variant
from outliers.variants.term import Term

if TYPE_CHECKING:  # to read a variant takes no torch
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Unattended(Variant):
    """Attention of all heads and layers without some positions, but for their own: without 0 there is no sink there."""

    positions: tuple[int, ...]

    @classmethod
    def read(cls, term: Term) -> "Unattended":
        """`unattended(POSITION,POSITION)`; raise UserError if it has places or options."""
        term.check_options(())
        if term.places:
            raise UserError(f"'{term}' has a place; expected positions of a sequence alone, as in unattended(0)")
        return cls(term.features)

    @property
    def name(self) -> str:
        """The positions, as `read` takes them."""
        return str(Term("unattended", self.positions, (), {}))

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        """The positions."""
        return {"unattended": list(self.positions)}

    @contextmanager
    def on(self, model: "PreTrainedModel", layer: int | None = None) -> "Iterator[PreTrainedModel]":
        """The model itself, with hooks on the masks of its attention."""
        from outliers.models.anatomy import layers_of
        from outliers.models.hooks import attached, independent

        def registered():
            for number, _, module, anatomy, _ in layers_of(model):
                if layer in (None, number):
                    masked = independent(partial(_masked, list(self.positions), anatomy.bidirectional))
                    yield module.get_submodule(anatomy.attention).register_forward_pre_hook(masked, with_kwargs=True)

        with attached(registered()):
            yield model


def _masked(
    positions: list[int], bidirectional: bool, attention: "nn.Module", inputs: tuple, keywords: dict
) -> tuple[tuple, dict]:
    """The inputs of an attention, with a mask under which no other position that could see some sees them."""
    import torch

    from outliers.models.hooks import MASKS

    name = next(name for name in MASKS if name in inspect.signature(attention.forward).parameters)
    states = keywords["hidden_states"] if "hidden_states" in keywords else inputs[0]
    length, mask = states.shape[-2], keywords.get(name)
    queries = torch.arange(length)[:, None]
    keys = torch.tensor([position for position in positions if position < length], dtype=torch.int64)
    if mask is None and bidirectional:
        mask = states.new_zeros(1, 1, length, length)
    elif mask is None:  # a fused kernel makes the causal mask by itself
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=states.device).tril()
    before = mask.shape[-1] - length  # tokens of a prefix, which are no positions of the sequence
    hidden = torch.zeros(length, before + length, dtype=torch.bool)
    hidden[:, before + keys] = queries != keys
    # The first position sees itself, so that its entry tells what is visible: in masks of MPT that is False.
    unseen = not mask[0, ..., 0, 0].any() if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return inputs, keywords | {name: mask.masked_fill(hidden.to(mask.device), unseen)}
