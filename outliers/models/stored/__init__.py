"""Weights that other libraries store in few bits: several tensors of a file, of which one is made, without the library.

A method, as `quantization_config` of a configuration names it, is a row of `METHODS`. Activations are no matter of a
checkpoint: what a library quantizes of them while it computes is not there.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from outliers.errors import UserError
from outliers.models.skeleton import refusals
from outliers.models.stored.bitsandbytes import EIGHT_BITS, FOUR_BITS
from outliers.models.stored.compressed import CODES, PACKED
from outliers.models.stored.format import Contradiction, Format, Sizes
from outliers.models.stored.words import AWQ, GPTQ

if TYPE_CHECKING:
    from outliers.models.checkpoint import Stored

METHODS = {
    "bitsandbytes": (EIGHT_BITS, FOUR_BITS),
    "gptq": (GPTQ,),
    "awq": (AWQ,),
    "compressed-tensors": (PACKED, CODES),
}
ALWAYS_PACKED = ("bitsandbytes", "gptq", "awq")  # compressed-tensors may have quantized activations alone
PACKED_ENDS = tuple(
    dict.fromkeys(one.codes for formats in METHODS.values() for one in formats if one.codes != "weight")
)


class Packed(NamedTuple):
    """A weight that is made of several tensors of files of model `name`; it stands for one that is stored as float32.

    key: its name, had it been stored as it is. parts: its tensors by the ends of their names. transposed: whether the
    module in whose place it goes has it as (features, outputs). note: what a row says of how it was read.
    """

    name: str
    file: Path
    key: str
    parts: "dict[str, Stored]"
    format: Format
    sizes: Sizes
    transposed: bool
    note: str
    dtype: str = "F32"

    @property
    def spans(self) -> list[tuple[Path, int, int]]:
        """The bytes of which it is made: file, from where, to where."""
        return [span for part in self.parts.values() for span in part.spans]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape that it will have."""
        shape = self.sizes.outputs, self.sizes.features
        return shape[::-1] if self.transposed else shape

    def read(self) -> torch.Tensor:
        """The weight in float32."""
        with refusals(self.name, part=f"'{self.key}' of "):
            weight = self.format.unpack({end: part.read() for end, part in self.parts.items()}, self.sizes)
        return weight.T.contiguous() if self.transposed else weight

    def without_values(self) -> torch.Tensor:
        """A tensor on the meta device like this one."""
        return torch.empty(self.shape, device="meta")

    def __getitem__(self, _everything) -> torch.Tensor:
        """The weight: so transformers asks for one that is read when its turn comes."""
        return self.read()


def unpacked(
    stored: "dict[str, Stored]", method: str | None, fields: dict, name: str, transposed: Collection[str]
) -> "dict[str, Stored | Packed]":
    """The tensors of files by their keys, those in the place of which a weight stands joined in it.

    method, fields: of `quantization_config`. transposed: paths of modules that have their weight (features, outputs).

    Raises:
        UserError: a tensor of a weight has other sizes or values than the others and the fields ask for; or codes are
            left of which the fields do not say how they are packed.
    """
    tensors: dict = dict(stored)
    for format in METHODS.get(method, ()):
        ends = re.compile(rf"(.*\.)({'|'.join(part.end for part in format.parts)})")
        by_path: dict[str, dict] = {}
        for match in filter(None, map(ends.fullmatch, tensors)):
            by_path.setdefault(match[1], {})[match[2]] = tensors[match[0]]
        for path, parts in by_path.items():
            if format.needs in parts and format.codes in parts:
                for end in parts:
                    del tensors[path + end]
                turned = any(module == path[:-1] or module.endswith(f".{path[:-1]}") for module in transposed)
                sizes, note = _settled(format, parts, fields, name, path)
                key = f"{path}weight"
                tensors[key] = Packed(name, parts[format.codes].file, key, parts, format, sizes, turned, note)
    if left := next((key for key in tensors if key.rpartition(".")[2] in PACKED_ENDS), None):
        raise UserError(
            f"the checkpoint of '{name}' holds packed codes '{left}', and 'quantization_config' of its configuration "
            f"says {f'{method!r}' if method else 'nothing'} of them; expected the method that packed them"
        )
    return tensors


def _settled(format: Format, parts: "dict[str, Stored]", fields: dict, name: str, path: str) -> tuple[Sizes, str]:
    try:
        with refusals(name, part=f"'{path}{format.codes}' of "):
            return format.settled(parts, fields)
    except Contradiction as wrong:
        found = f"lacks '{path}{wrong.end}'" if wrong.found is None else f"holds '{path}{wrong.end}' {wrong.found}"
        raise UserError(f"the checkpoint of '{name}' {found.strip()}; expected {wrong.expected}") from None
