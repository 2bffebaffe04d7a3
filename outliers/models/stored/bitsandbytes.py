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
    scale = tensors["weight.absmax"]
    if "weight.nested_absmax" in tensors:
        blocks = tensors["weight.nested_absmax"].repeat_interleave(state["nested_blocksize"])
        table = tensors["weight.nested_quant_map"].float()
        scale = table[scale.long()] * blocks[: len(scale)] + state["nested_offset"]
    packed = tensors["weight"].flatten()
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten()
    values = tensors["weight.quant_map"].float()[codes.long()]
    count = torch.Size(state["shape"]).numel()
    return (values[:count] * scale.repeat_interleave(state["blocksize"])[:count]).view(state["shape"])
