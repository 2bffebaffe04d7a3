"""Parts of the readers of the residual stream: queries, keys, values, gate, up, experts and norms."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy import (
    Layer,
    Projection,
    head_size,
    heads_of,
    layers_of,
    norms_are_in_the_residual_stream,
    reader_at,
    shape_of,
)
from outliers.models.anatomy.row import config_of_stack

QKV = ("q", "k", "v")
MIXER = "mixer"
GATE_UP = ("gate", "up")
NORMS = {"attn_in": "attn_norm", "ffn_in": "ffn_norm"}  # in front of the projections of a role


class StreamReader(NamedTuple):
    """A reader of the residual stream with one purpose: outputs of a projection, a norm, the router or the experts.

    outputs: the outputs of the reader with this purpose, int64 (heads, head size), or (1, units) for a feed-forward
    projection; None for a whole module. If queries have more heads than keys and values, consecutive ones share one.
    """

    name: str
    reader: Projection
    outputs: torch.Tensor | None = None


def stream_readers(model: PreTrainedModel, layer: int) -> Iterator[StreamReader]:
    """Yield the readers of the residual stream in a decoder layer: q, k, v, gate and up; router and experts; attn_norm
    and ffn_norm.

    A branch that mixes positions without queries, keys and values of the residual stream, such as a recurrence, yields
    its first projections under the name "mixer" instead. Norms are included if they precede projections and do not put
    out the residual stream itself.
    """
    owner = layers_of(model)[layer]
    anatomy, config = owner.anatomy, config_of_stack(model.config, owner.anatomy)
    attn_in = [reader_at(owner, "attn_in", name) for name in anatomy.attn_in]
    by_heads = _by_heads(attn_in, owner, config)
    for number, outputs in enumerate(by_heads):
        yield StreamReader(QKV[number], attn_in[number % len(attn_in)], outputs)
    yield from (StreamReader(MIXER, reader) for reader in attn_in if not by_heads)
    if anatomy.experts:
        yield from (StreamReader("router", reader_at(owner, "ffn_in", name)) for name in anatomy.router)
        yield StreamReader("experts", reader_at(owner, "ffn_in", anatomy.experts))
    ffn_in = [reader for name in anatomy.ffn_in if (reader := reader_at(owner, "ffn_in", name)).expert is None]
    if anatomy.fused_gate is None and ffn_in:
        raise UserError(
            f"which outputs of '{ffn_in[0].path}' are a gate is not known of this architecture; expected a projection "
            "for the gate, or the gate as the first half of one"
        )
    units = [numbers[None] for reader in ffn_in for numbers in _indices(reader).chunk(1 + bool(anatomy.fused_gate))]
    for number, outputs in enumerate(units):
        yield StreamReader(GATE_UP[number - len(units)], ffn_in[number % len(ffn_in)], outputs)
    if not norms_are_in_the_residual_stream(model.config):
        for name, roles in anatomy.norms.items():
            yield from (
                StreamReader(NORMS[role], reader_at(owner, NORMS[role], name)) for role in roles if role in NORMS
            )


def _by_heads(attn_in: list[Projection], layer: Layer, config: PretrainedConfig) -> list[torch.Tensor]:
    """Return the outputs that are queries, keys and values, each (heads, head size); empty if a layer has none."""
    outputs = [_indices(projection) for projection in attn_in]
    if layer.anatomy.attention is None or layer.anatomy.attn_mid or len(outputs) not in (1, 3):
        return []
    heads, size = heads_of(layer, config), head_size(layer, config)
    if len(outputs) == 3:
        divisible = not any(len(numbers) % size for numbers in outputs)
        return [numbers.view(-1, size) for numbers in outputs] if divisible and len(outputs[0]) == heads * size else []
    fused = outputs[0].view(-1, size)
    key_heads = (len(fused) - heads) // 2
    groups = key_heads if layer.anatomy.by_head else 1
    if layer.anatomy.by_head is None:
        raise UserError(
            f"which outputs of '{attn_in[0].path}' are queries, keys and values of a head is not known of this "
            "architecture; expected one with a projection for each, or with all queries first, or head by head"
        )
    sizes = [heads // groups, key_heads // groups, key_heads // groups]
    return [numbers.flatten(0, 1) for numbers in fused.view(groups, -1, fused.shape[1]).split(sizes, 1)]


def _indices(projection: Projection) -> torch.Tensor:
    """Return the indices of all outputs of a projection, quantized or not."""
    return torch.arange(shape_of(projection.module)[0])
