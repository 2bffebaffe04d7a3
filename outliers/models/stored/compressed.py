"""Weights stored by compressed-tensors, as from llm-compressor (compressed-tensors 0.20, `compressors`)."""

from collections.abc import Iterator

import torch

from outliers.models.stored.format import FLOATS, INT32, Contradiction, Sizes, StoredFormat, StoredTensor
from outliers.models.stored.tensors import Lazy
from outliers.models.stored.words import check_group_sizes, unpack_words

SHOWN = ("num_bits", "type", "strategy", "group_size", "block_structure", "symmetric", "actorder")


def _sizes(shape: tuple[int, ...], fields: dict) -> Iterator[Sizes]:
    """Yield the sizes under each module group of the configuration; targets are ignored, because sizes do not depend on
    them."""
    outputs, features = shape
    for group in fields.get("config_groups", {}).values():
        if not (weights := group.get("weights")):
            continue
        size = weights.get("group_size") or features
        rows, columns = weights.get("block_structure") or (1, 1)
        groups = -(-features // size) if size > 0 else 1
        scales = {
            "tensor": (1,),
            "channel": (outputs, 1),
            "group": (outputs, groups),
            "block": (-(-outputs // rows), -(-features // columns)),
        }
        strategy = weights.get("strategy") or ("group" if size < features else "channel")
        yield Sizes(outputs, features, weights.get("num_bits", 8), weights, SHOWN, groups, scales[strategy])


def _sizes_of_packed(stored: dict[str, Lazy], fields: dict) -> Iterator[Sizes]:
    if "weight_shape" not in stored:
        raise Contradiction("weight_shape", None, "the outputs and features of the weight")
    return _sizes(tuple(stored["weight_shape"].read().tolist()), fields)


def _is_symmetric(sizes: Sizes) -> bool:
    return sizes.fields.get("symmetric", True)


def _note(stored: dict[str, Lazy], sizes: Sizes) -> str:
    zero_points = stored.get("weight_zero_point")
    if _is_symmetric(sizes) and zero_points and zero_points.dtype != "I32" and zero_points.read().float().any():
        raise Contradiction("weight_zero_point", "with zero points that are not 0", "0 everywhere")
    if "weight_g_idx" in stored:
        check_group_sizes("weight_g_idx", stored["weight_g_idx"].read(), sizes)
    return ""


def unpack_codes(tensors: dict[str, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """Return codes (outputs, features) in int8 or fp8, minus the zero point, times the scale of tensor, row, group
    or block."""
    codes, groups = tensors["weight"].float(), tensors.get("weight_g_idx")
    scale, zero_point = (
        _spread(tensors[name].float(), codes.shape, groups, sizes) if name in tensors else None
        for name in ("weight_scale", "weight_zero_point")
    )
    return (codes if zero_point is None else codes - zero_point) * scale


def unpack_packed(tensors: dict[str, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """Unpack codes from words of 32 bits along the features, and zero points along the outputs, and dequantize them.

    Both are stored as offsets from the lowest code.
    """
    lowest = 1 << sizes.bits - 1
    codes = {
        **tensors,
        "weight": unpack_words(tensors["weight_packed"], sizes.bits)[:, : sizes.features].int() - lowest,
    }
    if "weight_zero_point" in tensors:
        zero_points = unpack_words(tensors["weight_zero_point"].T, sizes.bits).T[: sizes.outputs]
        codes["weight_zero_point"] = zero_points.int() - lowest
    return unpack_codes(codes, sizes)


def _spread(values: torch.Tensor, shape: torch.Size, groups: torch.Tensor | None, sizes: Sizes) -> torch.Tensor:
    """Repeat scales or zero points for each code: of a tensor (1,), rows (outputs, 1), groups (outputs, groups) or
    blocks.

    groups: the group of each feature, if groups are not contiguous.
    """
    values = values.reshape(1, 1) if values.numel() == 1 else values
    if groups is not None and values.shape[1] > 1:
        return values[:, groups.long()]
    block = sizes.fields.get("block_structure")
    for axis, size in enumerate(shape):
        times = min(block[axis], size) if block else -(-size // values.shape[axis])
        values = values.repeat_interleave(times, axis).narrow(axis, 0, size)
    return values


def _dtypes(sizes: Sizes) -> tuple[str]:
    return ("F8_E4M3",) if sizes.fields.get("type") == "float" else ("I8",)


_SCALE = StoredTensor("weight_scale", lambda s: (FLOATS, s.scales))
_ORDER = StoredTensor(
    "weight_g_idx",
    lambda s: (INT32, (s.features,)),
    lambda s: s.fields.get("actorder") in ("group", "dynamic"),
)
PACKED = StoredFormat(
    "weight_packed",
    _sizes_of_packed,
    (
        StoredTensor("weight_packed", lambda s: (INT32, (s.outputs, s.words(s.features)))),
        _SCALE,
        StoredTensor("weight_shape", lambda _: (("I64", "I32"), (2,))),
        StoredTensor(
            "weight_zero_point", lambda s: (INT32, (s.words(s.outputs), s.scales[-1])), lambda s: not _is_symmetric(s)
        ),
        _ORDER,
    ),
    unpack_packed,
    needs="weight_packed",
    note=_note,
)
CODES = StoredFormat(
    "weight",
    lambda stored, fields: _sizes(stored["weight"].shape, fields),
    (
        StoredTensor("weight", lambda s: (_dtypes(s), (s.outputs, s.features))),
        _SCALE,
        # Older versions also store zero points of symmetric codes.
        StoredTensor(
            "weight_zero_point",
            lambda s: ((*_dtypes(s), *FLOATS), s.scales),
            lambda s: not _is_symmetric(s) or None,
        ),
        _ORDER,
    ),
    unpack_codes,
    needs="weight_scale",
    note=_note,
)
