"""Weights that other libraries store in few bits: several tensors of a file, of which one is made, without the library.

A method, as `quantization_config` of a configuration names it, is a row of `METHODS`. Activations are no matter of a
checkpoint: what a library quantizes of them while it computes is not there.
"""

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from outliers.models.skeleton import refusals
from outliers.models.stored.bitsandbytes import unpack_4_bits, unpack_8_bits
from outliers.models.stored.compressed import unpack_codes, unpack_packed
from outliers.models.stored.words import unpack_awq, unpack_gptq

if TYPE_CHECKING:
    from outliers.models.checkpoint import Stored

DTYPES = {
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
}


class Format(NamedTuple):
    """The form in which a library stores a weight.

    codes: what the name of the tensor with the codes ends with, after that of the module. beside: the others of which
    the weight is made, as a pattern. unpack: makes the weight (outputs, features), float32, of the tensors by these
    ends and of the fields of `quantization_config`. holds_shape: those of them that hold a shape, and are read to
    know it. needs: an end without which the weight is no such code.
    """

    codes: str
    beside: str
    unpack: Callable[[dict[str, torch.Tensor], dict], torch.Tensor]
    holds_shape: str = r"$^"
    needs: str = ""


_COMPRESSED = r"weight_(scale|zero_point|shape|g_idx)"
METHODS = {
    "bitsandbytes": (
        Format("weight", r"SCB|weight_format", unpack_8_bits, needs="SCB"),
        Format(
            "weight",
            r"weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+)",
            unpack_4_bits,
            holds_shape=r"weight\.quant_state\..*",
            needs="weight.absmax",
        ),
    ),
    "gptq": (Format("qweight", r"qzeros|scales|g_idx", unpack_gptq, needs="scales"),),
    "awq": (Format("qweight", r"qzeros|scales", unpack_awq, needs="scales"),),
    "compressed-tensors": (
        Format("weight_packed", _COMPRESSED, unpack_packed, holds_shape="weight_shape", needs="weight_scale"),
        Format("weight", _COMPRESSED, unpack_codes, needs="weight_scale"),
    ),
}
ALWAYS_PACKED = ("bitsandbytes", "gptq", "awq")  # compressed-tensors may have quantized activations alone


class Packed(NamedTuple):
    """A weight that is made of several tensors of files of model `name`; it stands for one that is stored as float32.

    key: its name, had it been stored as it is. parts: its tensors by the ends of their names. transposed: whether the
    module in whose place it goes has it as (features, outputs).
    """

    name: str
    file: Path
    key: str
    parts: "dict[str, Stored]"
    format: Format
    fields: dict
    transposed: bool
    dtype: str = "F32"

    @property
    def spans(self) -> list[tuple[Path, int, int]]:
        """The bytes of which it is made: file, from where, to where."""
        return [span for part in self.parts.values() for span in part.spans]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that it will have; of its tensors nothing is read but what holds a shape."""
        return tuple(self.without_values().shape)

    def read(self) -> torch.Tensor:
        """The weight in float32."""
        return self._made({end: part.read() for end, part in self.parts.items()})

    def without_values(self) -> torch.Tensor:
        """A tensor on the meta device like this one."""
        return self._made(
            {
                end: part.read()
                if re.fullmatch(self.format.holds_shape, end)
                else torch.empty(part.shape, dtype=DTYPES[part.dtype], device="meta")
                for end, part in self.parts.items()
            }
        )

    def _made(self, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        with refusals(self.name, part=f"'{self.key}' of "):
            weight = self.format.unpack(tensors, self.fields)
        return weight.T.contiguous() if self.transposed else weight

    def __getitem__(self, _everything) -> torch.Tensor:
        """The weight: so transformers asks for one that is read when its turn comes."""
        return self.read()


def unpacked(
    stored: "dict[str, Stored]", method: str | None, fields: dict, name: str, transposed: Collection[str]
) -> "dict[str, Stored | Packed]":
    """The tensors of files by their keys, those in the place of which a weight stands joined in it.

    method, fields: of `quantization_config`. transposed: paths of modules that have their weight (features, outputs).
    """
    tensors: dict = dict(stored)
    for format in METHODS.get(method, ()):
        for key in [key for key in stored if key.endswith(f".{format.codes}")]:
            path = key.removesuffix(format.codes)
            if f"{path}{format.needs}" not in tensors or key not in tensors:
                continue
            ends = [entry.removeprefix(path) for entry in tensors if entry.startswith(path)]
            parts = {
                end: tensors.pop(path + end) for end in ends if end == format.codes or re.fullmatch(format.beside, end)
            }
            turned = any(module == path[:-1] or module.endswith(f".{path[:-1]}") for module in transposed)
            tensors[f"{path}weight"] = Packed(name, stored[key].file, f"{path}weight", parts, format, fields, turned)
    return tensors
