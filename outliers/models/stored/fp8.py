"""Weights in fp8 with a scale per block, as in DeepSeek-V3 and Qwen3-FP8 (transformers' `fp8` method)."""

from collections.abc import Iterator

import torch

from outliers.models.stored.format import FLOATS, Sizes, StoredFormat, StoredTensor
from outliers.models.stored.tensors import Lazy

BLOCK = (128, 128)  # default numbers of outputs and features that share a scale
EXPONENTS = "F8_E8M0"  # powers of two, the scales of DeepSeek's later checkpoints


def _sizes(stored: dict[str, Lazy], fields: dict) -> Iterator[Sizes]:
    outputs, features = stored["weight"].shape
    names = ("weight_block_size",)
    if (block := fields.get("weight_block_size", BLOCK)) is None:
        for scales in ((), (1,), (1, 1)):
            yield Sizes(outputs, features, 8, fields, names, scales=scales)
        return
    if not (
        isinstance(block, list | tuple) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        raise ValueError(f"'weight_block_size' {block!r}; expected two whole numbers from 1 on")
    scales = (-(-outputs // block[0]), -(-features // block[1]))
    yield Sizes(outputs, features, 8, fields, names, scales=scales)


def unpack_blocks(tensors: dict[str, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """Multiply codes by the scale of their block; the last block of an axis may be smaller.

    `inv` stands for the inverse of the scale by which weights were multiplied, so that codes are multiplied by it.
    """
    scale = tensors["weight_scale_inv"].float()
    if len(sizes.scales) == 2:
        for axis, size in enumerate(sizes.fields.get("weight_block_size") or BLOCK):
            scale = scale.repeat_interleave(size, axis)
        scale = scale[: sizes.outputs, : sizes.features]
    return tensors["weight"].float() * scale


FP8 = StoredFormat(
    "weight",
    _sizes,
    (
        StoredTensor("weight", lambda s: (("F8_E4M3",), (s.outputs, s.features))),
        StoredTensor("weight_scale_inv", lambda s: ((*FLOATS, EXPONENTS), s.scales)),
        StoredTensor(
            "(activation|input)_scale", lambda _: (FLOATS, None), lambda _: None
        ),  # of inputs, with static scales
    ),
    unpack_blocks,
    needs="weight_scale_inv",
)
