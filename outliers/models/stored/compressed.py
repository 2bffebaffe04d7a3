"""Weights as compressed-tensors stores them, which llm-compressor writes (compressed-tensors 0.20, `compressors`)."""

import torch

from outliers.models.stored.words import unpack_words

BITS = (2, 4, 8)  # of packed codes, which do not straddle words


def unpack_codes(tensors: dict[str, torch.Tensor], fields: dict) -> torch.Tensor:
    """Codes (outputs, features) in int8 or fp8, less their zero point, times the scale of their tensor, row, group or
    block."""
    codes, groups = tensors["weight"].float(), tensors.get("weight_g_idx")
    scale, zero_point = (
        _spread(tensors[name].float(), codes.shape, groups, _block(fields)) if name in tensors else None
        for name in ("weight_scale", "weight_zero_point")
    )
    return (codes if zero_point is None else codes - zero_point) * scale


def unpack_packed(tensors: dict[str, torch.Tensor], fields: dict) -> torch.Tensor:
    """Codes in words of 32 bits along the features, and zero points along the outputs, all above their lowest one."""
    outputs, features = tensors["weight_shape"].tolist()
    bits = 32 * tensors["weight_packed"].shape[1] // features
    if bits not in BITS:
        raise ValueError(f"its codes have {bits} bits; expected one of {', '.join(map(str, BITS))}")
    lowest = 1 << bits - 1
    codes = unpack_words(tensors["weight_packed"], bits)[:, :features] - lowest
    codes = {**tensors, "weight": codes}
    if "weight_zero_point" in tensors:
        codes["weight_zero_point"] = unpack_words(tensors["weight_zero_point"].T, bits).T[:outputs] - lowest
    return unpack_codes(codes, fields)


def _block(fields: dict) -> list[int] | None:
    """Outputs and features of a block that shares a scale; None where no scale is a block's."""
    of_groups = (group["weights"].get("block_structure") for group in fields["config_groups"].values())
    return next(filter(None, of_groups), None)


def _spread(
    values: torch.Tensor, shape: torch.Size, groups: torch.Tensor | None, block: list[int] | None
) -> torch.Tensor:
    """Values of a tensor (1,), of rows (outputs, 1), groups (outputs, groups) or blocks, as one for each code; groups:
    that of each feature, where they are in no order."""
    values = values.reshape(1, 1) if values.numel() == 1 else values
    if groups is not None and values.shape[1] > 1:
        return values[:, groups.long()]
    for axis, size in enumerate(shape):
        times = min(block[axis], size) if block else size // values.shape[axis]
        values = values.repeat_interleave(times, axis).narrow(axis, 0, size)
    return values
