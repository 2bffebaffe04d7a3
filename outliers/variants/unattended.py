"""Positions that no later position attends to."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from outliers.errors import UserError
from outliers.models.variant import Variant
from outliers.variants.term import Term

if TYPE_CHECKING:  # parsing a variant does not import torch
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Unattended(Variant):
    """Positions that are masked for all other positions in all heads and layers; masking 0 removes its sink."""

    positions: tuple[int, ...]

    @classmethod
    def read(cls, term: Term) -> "Unattended":
        """Parse `unattended(POSITION,POSITION)`; raise UserError if there are places or options."""
        term.check_options(())
        if term.places:
            raise UserError(f"'{term}' has a place; expected positions of a sequence alone, as in unattended(0)")
        return cls(term.features)

    @property
    def name(self) -> str:
        return str(Term("unattended", self.positions))

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        return {"unattended": list(self.positions)}

    @contextmanager
    def on(self, model: "PreTrainedModel", layer: int | None = None) -> "Iterator[PreTrainedModel]":
        from outliers.models.anatomy import layers_of
        from outliers.models.hooks import attached, independent

        def registered():
            for number, _, module, anatomy, _ in layers_of(model):
                if layer in (None, number) and anatomy.attention is not None:
                    masked = independent(partial(_masked, list(self.positions), anatomy.bidirectional))
                    yield module.get_submodule(anatomy.attention).register_forward_pre_hook(masked, with_kwargs=True)

        with attached(registered()):
            yield model


def _masked(
    positions: list[int], bidirectional: bool, attention: "nn.Module", inputs: tuple, keywords: dict
) -> tuple[tuple, dict]:
    """Return the arguments of an attention module with positions masked for all other queries."""
    import torch

    from outliers.models.hooks import MASKS

    name = next(name for name in MASKS if name in inspect.signature(attention.forward).parameters)
    states = keywords["hidden_states"] if "hidden_states" in keywords else inputs[0]
    length, mask = states.shape[-2], keywords.get(name)
    queries = torch.arange(length)[:, None]
    keys = torch.tensor([position for position in positions if position < length], dtype=torch.int64)
    if mask is None and bidirectional:
        mask = states.new_zeros(1, 1, length, length)
    elif mask is None:  # a fused kernel makes the causal mask itself
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=states.device).tril()
    before = mask.shape[-1] - length  # tokens of a prefix, which are not positions of the sequence
    hidden = torch.zeros(length, before + length, dtype=torch.bool)
    hidden[:, before + keys] = queries != keys
    # The first position sees itself, so that its entry shows how visibility is coded: as False in masks of MPT.
    unseen = not mask[0, ..., 0, 0].any() if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return inputs, keywords | {name: mask.masked_fill(hidden.to(mask.device), unseen)}
