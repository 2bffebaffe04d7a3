"""Weights stored by HQQ (hqq 0.2, `core/quantize.py` and `core/bitpack.py`).

They are codes with a scale and a zero point for each group, and small tensors that describe the packing.
"""

from collections.abc import Iterator

import torch

from outliers.models.stored.format import FLOATS, INT32, Contradiction, Sizes, StoredFormat, StoredTensor
from outliers.models.stored.tensors import READ, Lazy

# Packings: bits of a code, type of a word, and number of codes in a word, the first in the highest bits.
PACKINGS = {
    "8bit_u8": (8, "U8", 1),
    "4bit_u8": (4, "U8", 2),
    "3bit_32": (3, "I32", 10),
    "2bit_u8": (2, "U8", 4),
    "1bit_u8": (1, "U8", 8),
}
NUMBERS = ("nbits", "group_size", "axis", "view_as_float", "quant_scale", "quant_zero")
UNREAD = (  # settings of the quantization and of the library's computation
    *("unpack_view_dtype", "compute_dtype", "offload_meta", "encoded_state_dict", "stores_quant_config"),
    *("channel_wise", "optimize", "round_zero"),
)


def _sizes(stored: dict[str, Lazy], fields: dict) -> Iterator[Sizes]:
    for end in ("shape", "packing", *NUMBERS[:3]):
        if end not in stored:
            raise Contradiction(end, None, "what the library writes beside W_q")
    outputs, features = stored["shape"].read().tolist()
    own = {end: stored[end].read().item() for end in NUMBERS if end in stored}
    own["packing"] = "".join(map(chr, stored["packing"].read().tolist()))
    if own["packing"] not in PACKINGS:
        raise Contradiction("packing", repr(own["packing"])[:50], f"one of {', '.join(PACKINGS)}")
    if own["axis"] not in (0, 1) or own["group_size"] < 1 or outputs * features % own["group_size"]:
        raise Contradiction("group_size", f"{own['group_size']} along axis {own['axis']}", "groups of whole weights")
    declared = fields.get("quant_config") or {}
    declared = {key: value for key, value in (declared.get("weight_quant_params") or {}).items() if key in NUMBERS[:3]}
    for key, value in declared.items():
        if value not in (None, own[key]):
            raise Contradiction(key, f"{own[key]}", f"{value}, as its 'quantization_config' has it")
    groups = outputs * features // own["group_size"]
    scales = (groups, 1) if own["axis"] else (1, groups)
    yield Sizes(outputs, features, PACKINGS[own["packing"]][0], own, ("packing", *NUMBERS[:3]), groups, scales)


def _grid(sizes: Sizes) -> tuple[int, int]:
    """Return the rows and columns of codes, with one group along the axis."""
    size = sizes.fields["group_size"]
    return (sizes.groups, size) if sizes.fields["axis"] else (size, sizes.groups)


def _code_form(sizes: Sizes) -> tuple[tuple[str, ...], tuple[int, int] | None]:
    """Return the dtypes of the code tensor, and its shape, or None for any; see `StoredTensor`."""
    rows, columns = _grid(sizes)
    _, word, count = PACKINGS[sizes.fields["packing"]]
    return (FLOATS, None) if sizes.fields.get("view_as_float") else ((word,), (-(-rows // count), columns))


def _note(stored: dict[str, Lazy], sizes: Sizes) -> str:
    for end in ("quant_scale", "quant_zero"):
        if sizes.fields.get(end):
            raise Contradiction(end, "of scales or zero points that are codes themselves", "plain ones")
    return ""


def unpack_hqq(tensors: dict[str, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """Return codes minus the zero point of their group, times its scale, in the shape of the weight."""
    bits, word, count = PACKINGS[sizes.fields["packing"]]
    words, (rows, columns) = tensors["W_q"].view(READ[word]), _grid(sizes)
    codes = torch.cat([words >> bits * place & (1 << bits) - 1 for place in reversed(range(count))])
    if codes.shape[1] != columns or len(codes) < rows:
        raise ValueError(f"it has codes of the shape {tuple(codes.shape)}, expected {(rows, columns)}")
    weight = (codes[:rows].float() - tensors["zero"].float()) * tensors["scale"].float()
    return weight.reshape(sizes.outputs, sizes.features)


HQQ = StoredFormat(
    "W_q",
    _sizes,
    (
        StoredTensor("W_q", _code_form),
        StoredTensor("scale", lambda s: (FLOATS, s.scales)),
        StoredTensor("zero", lambda s: (FLOATS, s.scales)),
        StoredTensor("shape", lambda _: (("I64", *INT32), (2,))),
        StoredTensor("packing", lambda _: (("U8",), None)),
        *(StoredTensor(end, lambda _: (("U8", *INT32, "F32"), ()), lambda _: None) for end in NUMBERS),
        *(StoredTensor(end, lambda _: (("U8", *INT32, "F32"), None), lambda _: None) for end in UNREAD),
    ),
    unpack_hqq,
    needs="W_q",
    note=_note,
)
