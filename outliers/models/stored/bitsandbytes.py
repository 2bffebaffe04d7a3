"""Weights stored by bitsandbytes (bitsandbytes 0.50, `functional.int8_vectorwise_dequant` and `QuantState`)."""

import json
from collections.abc import Iterator
from math import prod

import torch

from outliers.models.stored.format import Contradiction, Sizes, StoredFormat, StoredTensor
from outliers.models.stored.tensors import Lazy

LARGEST = 127  # the int8 code of a row's largest weight
LAYOUTS = ("row", "col32", "col_turing", "col_ampere")  # by number; those after the first are of old versions' kernels
STATE = r"weight\.quant_state\.bitsandbytes__(nf4|fp4)"


# 8 bits: codes (outputs, features) times the largest |weight| of their row, divided by 127


def _sizes_of_8_bits(stored: dict[str, Lazy], fields: dict) -> Iterator[Sizes]:
    outputs, features = stored["weight"].shape
    yield Sizes(outputs, features, 8, fields, ("load_in_8bit", "load_in_4bit"))


def _note_on_8_bits(stored: dict[str, Lazy], _sizes: Sizes) -> str:
    number = int(stored["weight_format"].read()) if "weight_format" in stored else 0
    if number:
        layout = LAYOUTS[number] if number < len(LAYOUTS) else f"layout {number}"
        raise Contradiction("weight_format", f"with {layout}", f"{LAYOUTS[0]}, of the present versions,")
    return ""


def unpack_8_bits(tensors: dict[str, torch.Tensor], _sizes: Sizes) -> torch.Tensor:
    """Multiply codes by scales."""
    return tensors["weight"].float() * (tensors["SCB"].float() / LARGEST)[:, None]


EIGHT_BITS = StoredFormat(
    "weight",
    _sizes_of_8_bits,
    (
        StoredTensor("weight", lambda s: (("I8",), (s.outputs, s.features))),
        StoredTensor("SCB", lambda s: (("F32",), (s.outputs,)), lambda s: s.fields.get("load_in_8bit") is not False),
        StoredTensor("weight_format", lambda _: (("U8",), ()), lambda _: None),
    ),
    unpack_8_bits,
    needs="SCB",
    note=_note_on_8_bits,
)


# 4 bits: two codes per byte, the first in the higher half. A code is an index of a table, whose entry is multiplied
# by the largest |weight| of the block; these may be quantized to bytes themselves


def _sizes_of_4_bits(stored: dict[str, Lazy], fields: dict) -> Iterator[Sizes]:
    end = next((end for end in stored if ".quant_state." in end), None)
    if end is None:
        raise Contradiction("weight.quant_state.bitsandbytes__nf4", None, "one")
    state = json.loads(bytes(stored[end].read().tolist()))
    outputs, features = state["shape"]
    names = ("load_in_4bit", "bnb_4bit_quant_type", "blocksize", "nested_blocksize")
    yield Sizes(outputs, features, 4, fields | state, names, -(-outputs * features // state["blocksize"]))


def _nested(sizes: Sizes) -> bool:
    return "nested_blocksize" in sizes.fields


def _note_on_4_bits(stored: dict[str, Lazy], sizes: Sizes) -> str:
    for end in stored:
        kind = end.partition("bitsandbytes__")[2]
        if kind and sizes.fields.get("bnb_4bit_quant_type", kind) != kind:
            raise Contradiction(end, "", f"{sizes.fields['bnb_4bit_quant_type']}")
    return ""


def unpack_4_bits(tensors: dict[str, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """Multiply table entries by the scales of their blocks."""
    state, shape = sizes.fields, (sizes.outputs, sizes.features)
    scale, count = tensors["weight.absmax"], prod(shape)
    if _nested(sizes):
        blocks = _spread_blocks(tensors["weight.nested_absmax"], state["nested_blocksize"], len(scale))
        table = tensors["weight.nested_quant_map"].float()
        scale = table[scale.long()] * blocks + state["nested_offset"]
    packed = tensors["weight"].flatten()
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten()
    values = tensors["weight.quant_map"].float()[codes.long()]
    return (values[:count] * _spread_blocks(scale, state["blocksize"], count)).view(shape)


def _spread_blocks(values: torch.Tensor, size: int, count: int) -> torch.Tensor:
    """Repeat the values of blocks for each of their entries."""
    return values.repeat_interleave(min(size, count))[:count]


FOUR_BITS = StoredFormat(
    "weight",
    _sizes_of_4_bits,
    (
        StoredTensor("weight", lambda s: (("U8",), (-(-s.outputs * s.features // 2), 1))),
        StoredTensor(
            r"weight\.absmax",
            lambda s: (("U8",) if _nested(s) else ("F32",), (s.groups,)),
            lambda s: s.fields.get("load_in_4bit") is not False,
        ),
        StoredTensor(r"weight\.quant_map", lambda _: (("F32",), (16,))),
        StoredTensor(
            r"weight\.nested_absmax", lambda s: (("F32",), (-(-s.groups // s.fields["nested_blocksize"]),)), _nested
        ),
        StoredTensor(r"weight\.nested_quant_map", lambda _: (("F32",), (256,)), _nested),
        StoredTensor(STATE, lambda _: (("U8",), None)),
    ),
    unpack_4_bits,
    needs="weight.absmax",
    note=_note_on_4_bits,
)
