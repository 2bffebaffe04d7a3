"""Tokens that stand before every sequence as keys and values alone."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from outliers.errors import UserError
from outliers.models.anatomy import check_block, family_of
from outliers.models.decoder import inference


class States(NamedTuple):
    """Keys and values of some positions in a layer, (1, heads, positions, features) each."""

    keys: torch.Tensor
    values: torch.Tensor


class PrefixLayer(DynamicLayer):
    """The prefix in a layer, which keeps nothing of what comes behind it: one serves all sequences."""

    def __init__(self, states: States):
        super().__init__()
        self.states = states

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_arguments, **_named) -> tuple:
        """The prefix and the states (batch, heads, T, features) of a sequence behind it."""
        both = zip(self.states, (key_states, value_states), strict=True)
        return tuple(torch.cat([before.expand(len(own), -1, -1, -1), own], -2) for before, own in both)

    def get_seq_length(self) -> int:
        """Positions of the prefix."""
        return self.states.keys.shape[-2]


class Prefix:
    """The keys and values of some tokens in all layers.

    positions: how many tokens. layers: `States` of each layer.
    """

    def __init__(self, model: PreTrainedModel, tokens: Sequence[int]):
        self.positions, self.longest = len(tokens), partial(check_block, model.config)
        self.layers = _states(model, torch.tensor([tokens], device=model.device))

    def behind(self, _model: nn.Module, inputs: tuple, named: dict) -> tuple[tuple, dict]:
        """The arguments of a model, as a forward hook takes and returns them, with the prefix before the sequence."""
        sequence = inputs[0] if inputs else named.get("input_ids", named.get("inputs_embeds"))
        self.longest(self.positions + sequence.shape[1])
        past, mask, places = (named.get(one) for one in ("past_key_values", "attention_mask", "position_ids"))
        if past is None:
            named = named | {"past_key_values": Cache(layers=[PrefixLayer(states) for states in self.layers])}
        elif type(past) is not DynamicCache:
            raise UserError(f"a prefix in a cache of type {type(past).__name__}; expected a DynamicCache")
        elif not past.get_seq_length():  # a new one, in which generated positions will be kept
            for layer, states in enumerate(self.layers):
                past.update(*(one.expand(len(sequence), -1, -1, -1) for one in states), layer)
        if mask is not None:
            named = named | {"attention_mask": nn.functional.pad(mask, (self.positions, 0), value=1)}
        if places is not None:
            named = named | {"position_ids": places + self.positions}
        return inputs, named


@inference
def _states(model: PreTrainedModel, ids: torch.Tensor) -> list[States]:
    kept = model.base_model(ids, use_cache=True).past_key_values
    return [States(layer.keys, layer.values) for layer in kept.layers]


def check_prefix(model: PreTrainedModel, tokens: Sequence[int]) -> None:
    """Raise UserError if tokens cannot stand before what a model, which may be on the meta device, reads."""
    config = model.config
    if family_of(config).name != "causal":
        raise UserError(f"a prefix before what '{config.model_type}' reads; expected a causal language model")
    if any(token >= config.vocab_size for token in tokens):
        raise UserError(f"token {max(tokens)} in a prefix; expected ids below {config.vocab_size}, of the vocabulary")
    check_block(config, len(tokens) + 1)


@contextmanager
def behind_prefix(model: PreTrainedModel, tokens: Sequence[int]) -> Iterator[Prefix]:
    """Let a model read everything behind some tokens within this context: their keys and values are those that it
    computes now, and what is done to it later does not change them. Positions go on behind them."""
    decoder, prefix = model.base_model, Prefix(model, tokens)
    hook, decoder.prefix = decoder.register_forward_pre_hook(prefix.behind, with_kwargs=True), prefix
    try:
        yield prefix
    finally:
        hook.remove()
        del decoder.prefix


def prefix_positions(model: PreTrainedModel) -> int:
    """How many tokens stand before all that a model reads."""
    prefix = vars(model.base_model).get("prefix")
    return prefix.positions if prefix else 0
