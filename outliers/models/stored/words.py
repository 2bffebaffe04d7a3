"""Weights stored by GPTQ and AWQ: codes (features, outputs) in 32-bit words, with scales and zero points of groups."""

import math
from collections.abc import Iterator

import torch

from outliers.models.stored.format import FLOATS, INT32, WORD, Contradiction, Sizes, StoredFormat, StoredTensor
from outliers.models.stored.tensors import Lazy

BITS, GROUP_SIZE = 4, 128  # the libraries' defaults
# AutoAWQ stores the columns of a word in this order (Lin et al., 2023; `awq/utils/packing_utils.py`).
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
FIRST, SECOND = "gptq", "gptq_v2"  # versions of GPTQ checkpoints: the first stores zero points less one
# For the first version, GPTQModel subtracts these from successive words of zero points: a zero point of 0 borrows from
# the next one, and for 3 bits they are not a one in each code (`gptqmodel/utils/model.py`).
SUBTRACTED = {2: [0x55555555], 3: [0x24924924, 0x92492492, 0x49249249], 4: [0x11111111], 8: [0x01010101]}
BITS_AND_GROUPS = ("bits", "group_size")


def unpack_words(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes from the last axis of words, the lowest bits first: (…, words) to (…, 32 / bits · words).

    If `bits` does not divide 32, codes straddle words.
    """
    count = bits // math.gcd(bits, 8)  # bytes that hold whole codes
    parts = words.contiguous().view(torch.uint8).unflatten(-1, (-1, count))
    whole = sum((parts[..., place].int() << 8 * place for place in range(1, count)), parts[..., 0])
    shifts = torch.arange(0, 8 * count, bits, dtype=torch.uint8)
    return (whole[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def _sizes(features: int, outputs: int, bits: int, fields: dict, names: tuple[str, ...]) -> Iterator[Sizes]:
    size = fields.get("group_size", GROUP_SIZE)
    if not isinstance(size, int) or (size < 1 and size != -1):
        raise ValueError(f"'group_size' {size!r}; expected a whole number from 1 on, or -1 for one group")
    yield Sizes(outputs, features, bits, fields, names, 1 if size == -1 else -(-features // size))


def _natural_groups(sizes: Sizes) -> torch.Tensor:
    """Return the group of each feature if features are in their own order."""
    size = sizes.fields.get("group_size", GROUP_SIZE)
    return torch.arange(sizes.features) // (size if size > 0 else sizes.features)


def _dequantized(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the weight (outputs, features) from codes (features, outputs), and zero points and scales (groups,
    outputs)."""
    return ((codes.float() - zeros.float()[groups]) * scales.float()[groups]).T.contiguous()


# GPTQ: words are packed along the features


def _gptq_sizes(stored: dict[str, Lazy], fields: dict) -> Iterator[Sizes]:
    rows, outputs = stored["qweight"].shape
    bits = int(fields.get("bits", BITS))
    return _sizes(rows * WORD // bits, outputs, bits, fields, (*BITS_AND_GROUPS, "sym", "desc_act", "static_groups"))


def _needs_g_idx(sizes: Sizes) -> bool | None:
    """Return whether the checkpoint must have g_idx, because groups are those of features sorted by activations; None
    if it may."""
    ordered = sizes.fields.get("desc_act") and not sizes.fields.get("static_groups")
    return True if ordered and sizes.groups > 1 else None


def _gptq_note(stored: dict[str, Lazy], sizes: Sizes) -> str:
    if "g_idx" in stored:
        check_group_sizes("g_idx", stored["g_idx"].read(), sizes, sizes.fields.get("desc_act") is False)
    return _zero_points(stored["qzeros"].read(), sizes)[1]


def check_group_sizes(end: str, groups: torch.Tensor, sizes: Sizes, in_order: bool = False) -> None:
    """Raise `Contradiction` unless each group has its number of features."""
    natural, groups = _natural_groups(sizes), groups.long()
    if in_order and not groups.equal(natural):
        raise Contradiction(end, "with features in another order", "their own order")
    if not groups.sort().values.equal(natural):
        raise Contradiction(
            end,
            f"with groups from {groups.min()} to {groups.max()}",
            f"groups from 0 to {sizes.groups - 1}, each whole,",
        )


def _zero_points(words: torch.Tensor, sizes: Sizes) -> tuple[torch.Tensor, str]:
    """Return the zero points (groups, outputs), and a note for rows on their version.

    A symmetric quantizer has a single zero point, which reveals the version, whatever the configuration says.
    """
    fields, middle = sizes.fields, 1 << sizes.bits - 1
    stored = unpack_words(words, sizes.bits)[:, : sizes.outputs]
    constants = torch.tensor(SUBTRACTED[sizes.bits]).repeat(words.shape[1])[: words.shape[1]].int()
    added = unpack_words(words + constants, sizes.bits)[:, : sizes.outputs]
    increased = stored + 1 & (1 << sizes.bits) - 1
    by_gptqmodel = "gptqmodel" in str(fields.get("meta"))
    versions = {SECOND: [stored], FIRST: [added, increased] if by_gptqmodel else [increased, added]}
    label = next((fields[name].lower() for name in ("checkpoint_format", "format") if fields.get(name)), None)
    label_text = f"checkpoint_format says {label}" if label else "no checkpoint_format"
    for version, candidates in versions.items():
        for zeros in candidates:
            if (zeros == middle).all():
                return zeros, "" if version == (label or FIRST) else f"{version} by their values, where {label_text}"
    if fields.get("sym") is True:
        raise Contradiction(
            "qzeros",
            f"with zero points from {stored.min()} to {stored.max()}",
            f"{middle} everywhere, or {middle - 1} in version {FIRST},",
        )
    return versions[label or FIRST][0], f"{label or FIRST} by assumption, where {label_text} and sym is not true"


def unpack_gptq(tensors: dict[str, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """Dequantize a weight; `g_idx` holds the group of each feature, which has a scale and a zero point."""
    codes = unpack_words(tensors["qweight"].T, sizes.bits).T[: sizes.features]
    groups = tensors["g_idx"].long() if "g_idx" in tensors else _natural_groups(sizes)
    return _dequantized(codes, _zero_points(tensors["qzeros"], sizes)[0], tensors["scales"], groups)


GPTQ = StoredFormat(
    "qweight",
    _gptq_sizes,
    (
        StoredTensor("qweight", lambda s: (INT32, (s.words(s.features), s.outputs))),
        StoredTensor("qzeros", lambda s: (INT32, (s.groups, s.words(s.outputs)))),
        StoredTensor("scales", lambda s: (FLOATS, (s.groups, s.outputs))),
        StoredTensor("g_idx", lambda s: (("I32", "I64"), (s.features,)), _needs_g_idx),
    ),
    unpack_gptq,
    needs="qweight",
    note=_gptq_note,
)


# AWQ: words are packed along the outputs


def _awq_sizes(stored: dict[str, Lazy], fields: dict) -> Iterator[Sizes]:
    features, words = stored["qweight"].shape
    return _sizes(features, words * WORD // BITS, BITS, fields, (*BITS_AND_GROUPS, "zero_point"))


def _awq_codes(words: torch.Tensor) -> torch.Tensor:
    return unpack_words(words, BITS).unflatten(-1, (-1, len(AWQ_ORDER)))[..., AWQ_ORDER].flatten(-2)


def _awq_note(stored: dict[str, Lazy], sizes: Sizes) -> str:
    zeros, middle = _awq_codes(stored["qzeros"].read()), 1 << BITS - 1
    if sizes.fields.get("zero_point") is False and (zeros != middle).any():
        raise Contradiction("qzeros", f"with zero points from {zeros.min()} to {zeros.max()}", f"{middle} everywhere")
    return ""


def unpack_awq(tensors: dict[str, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """Dequantize a weight from words of four-bit codes."""
    codes, zeros = (_awq_codes(tensors[name]) for name in ("qweight", "qzeros"))
    return _dequantized(codes, zeros, tensors["scales"], _natural_groups(sizes))


AWQ = StoredFormat(
    "qweight",
    _awq_sizes,
    (
        StoredTensor("qweight", lambda s: (INT32, (s.features, s.words(s.outputs)))),
        StoredTensor("qzeros", lambda s: (INT32, (s.groups, s.words(s.outputs)))),
        StoredTensor("scales", lambda s: (FLOATS, (s.groups, s.outputs))),
    ),
    unpack_awq,
    needs="qweight",
    note=_awq_note,
)
