"""Weights as bitsandbytes stores them (bitsandbytes 0.50, `functional.int8_vectorwise_dequant` and `QuantState`)."""

import json

import torch

LARGEST = 127  # code of int8, that of a row's largest weight


def unpack_8_bits(tensors: dict[str, torch.Tensor], _fields: dict) -> torch.Tensor:
    """Codes (outputs, features) times the largest |weight| of their row, over 127."""
    return tensors["weight"].float() * (tensors["SCB"].float() / LARGEST)[:, None]


def unpack_4_bits(tensors: dict[str, torch.Tensor], _fields: dict) -> torch.Tensor:
    """Two codes a byte, the first in its higher half: entries of a table, times the largest |weight| of their block;
    these may be codes of bytes themselves."""
    (state,) = (json.loads(bytes(value.tolist())) for end, value in tensors.items() if ".quant_state." in end)
    scale, count = tensors["weight.absmax"], torch.Size(state["shape"]).numel()
    if "weight.nested_absmax" in tensors:
        blocks = _of_blocks(tensors["weight.nested_absmax"], state["nested_blocksize"], len(scale))
        table = tensors["weight.nested_quant_map"].float()
        scale = table[scale.long()] * blocks + state["nested_offset"]
    packed = tensors["weight"].flatten()
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten()
    values = tensors["weight.quant_map"].float()[codes.long()]
    return (values[:count] * _of_blocks(scale, state["blocksize"], count)).view(state["shape"])


def _of_blocks(values: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """A value for each entry, of those of blocks; raise ValueError where there are not as many blocks as entries fill,
    before memory is asked for."""
    if len(values) != -(-count // size):
        raise ValueError(f"{count:,} entries in blocks of {size:,}, with {len(values):,} scales")
    return values.repeat_interleave(min(size, count))[:count]
