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
                    masked = independent(partial(_masked, self.positions, model, number, anatomy.bidirectional))
                    yield module.get_submodule(anatomy.attention).register_forward_pre_hook(masked, with_kwargs=True)

        with attached(registered()):
            yield model


def _masked(
    positions: tuple[int, ...],
    model: "PreTrainedModel",
    layer: int,
    bidirectional: bool,
    attention: "nn.Module",
    inputs: tuple,
    keywords: dict,
) -> tuple[tuple, dict]:
    """Return the arguments of an attention module with positions masked for all other queries."""
    import torch
    from transformers import Cache

    from outliers.models.hooks import MASKS
    from outliers.quantization.caches import prefix_length

    name = next(name for name in MASKS if name in inspect.signature(attention.forward).parameters)
    states = keywords["hidden_states"] if "hidden_states" in keywords else inputs[0]
    length, mask = states.shape[-2], keywords.get(name)
    cache = next((value for value in (*inputs, *keywords.values()) if isinstance(value, Cache)), None)
    cached = cache.get_seq_length(getattr(attention, "layer_idx", layer)) if cache else 0  # tokens before these
    count = cached + length
    if mask is None and bidirectional:
        mask = states.new_zeros(1, 1, length, length)
    elif mask is None:  # a fused kernel makes the causal mask itself
        mask = torch.ones(1, 1, length, count, dtype=torch.bool, device=states.device).tril(cached)
    first = max(0, count - mask.shape[-1])  # the cache of a window forgets the keys before
    prefix = prefix_length(model)  # tokens that are not positions of the sequence
    queries = torch.arange(cached, count)[:, None] - prefix
    keys = torch.arange(first, first + mask.shape[-1]) - prefix
    hidden = torch.isin(keys, torch.tensor(positions)) & (queries != keys)
    # The first query sees itself, so that its entry shows how visibility is coded: as False in masks of MPT.
    own = mask[0, ..., 0, cached - first]
    unseen = not own.any() if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
    return inputs, keywords | {name: mask.masked_fill(hidden.to(mask.device), unseen)}
