"""Weights quantized by other libraries, dequantized without the library: several stored tensors make a weight.

Each method of `quantization_config` is a row of `METHODS`. Activations that a library quantizes at run time are
ignored.
"""

import re
from collections.abc import Collection

import torch

from outliers.errors import UserError
from outliers.models.skeleton import refusals
from outliers.models.stored.bitsandbytes import EIGHT_BITS, FOUR_BITS
from outliers.models.stored.compressed import CODES, PACKED
from outliers.models.stored.format import Contradiction, StoredFormat
from outliers.models.stored.fp8 import FP8
from outliers.models.stored.hqq import HQQ
from outliers.models.stored.modules import as_method, module_fields
from outliers.models.stored.tensors import Lazy, duplicate_error
from outliers.models.stored.words import AWQ, GPTQ

METHODS = {
    "bitsandbytes": (EIGHT_BITS, FOUR_BITS),
    "gptq": (GPTQ,),
    "awq": (AWQ,),
    "compressed-tensors": (PACKED, CODES),
    "fp8": (FP8,),
    "hqq": (HQQ,),
}
ALWAYS_PACKED = ("bitsandbytes", "gptq", "awq", "fp8", "hqq")  # compressed-tensors may quantize only activations
PACKED_ENDS = tuple(
    dict.fromkeys(one.codes for formats in METHODS.values() for one in formats if one.codes != "weight")
)


def unpacked(stored: dict[str, Lazy], fields: dict, name: str, transposed: Collection[str]) -> dict[str, Lazy]:
    """Return the tensors of model `name` by key, with the stored parts of a weight replaced by the weight, float32.

    fields: `quantization_config`. transposed: paths of modules whose weight is (features, outputs).

    Raises:
        UserError: a tensor does not have the size or values that the others and the fields require; codes remain that
            the fields do not describe; or there are none although the fields describe some.
    """
    for key, packed in stored.items():
        path, _, end = key.rpartition(".")
        if end in PACKED_ENDS and (plain := stored.get(f"{path}.weight")):
            raise duplicate_error(name, packed, plain)
    fields = as_method(fields)
    method, tensors = fields.get("quant_method"), dict(stored)
    for format in METHODS.get(method, ()):
        ends = re.compile(rf"(.*\.)({'|'.join(part.end for part in format.parts)})")
        by_path: dict[str, dict[str, Lazy]] = {}
        for match in filter(None, map(ends.fullmatch, tensors)):
            by_path.setdefault(match[1], {})[match[2]] = tensors[match[0]]
        for path, parts in by_path.items():
            if format.needs in parts and format.codes in parts:
                for end in parts:
                    del tensors[path + end]
                is_transposed = any(module == path[:-1] or module.endswith(f".{path[:-1]}") for module in transposed)
                tensors[f"{path}weight"] = _weight(format, parts, fields, name, path, is_transposed)
    if code := next((key for key in tensors if key.rpartition(".")[2] in PACKED_ENDS), None):
        raise UserError(
            f"the checkpoint of '{name}' holds packed codes '{code}', and 'quantization_config' of its configuration "
            f"says {f'{method!r}' if method else 'nothing'} of them; expected the method that packed them"
        )
    if method in ALWAYS_PACKED and tensors == stored:
        raise UserError(
            f"the configuration of '{name}' says that its weights are stored quantized by '{method}', and its files "
            "hold none so; download the model again, or take 'quantization_config' out of its configuration"
        )
    return tensors


def _weight(format: StoredFormat, parts: dict[str, Lazy], fields: dict, name: str, path: str, transposed: bool) -> Lazy:
    """Return the weight made of stored parts, by the ends of their names; transposed: whether features come
    first."""
    try:
        with refusals(name, part=f"'{path}{format.codes}' of "):
            if (own := module_fields(fields, path[:-1], name)) is None:
                raise Contradiction(format.codes, "", "none, as its 'quantization_config' leaves the module out")
            sizes, note = format.settled(parts, own)
    except Contradiction as wrong:
        found = f"lacks '{path}{wrong.end}'" if wrong.found is None else f"holds '{path}{wrong.end}' {wrong.found}"
        raise UserError(f"the checkpoint of '{name}' {found.strip()}; expected {wrong.expected}") from None
    key, shape = f"{path}weight", (sizes.outputs, sizes.features)

    def read() -> torch.Tensor:
        with refusals(name, part=f"'{key}' of "):
            weight = format.unpack({end: part.read() for end, part in parts.items()}, sizes)
        return weight.T.contiguous() if transposed else weight

    spans = [span for part in parts.values() for span in part.spans]
    return Lazy(key, shape[::-1] if transposed else shape, "F32", spans, read, note)
