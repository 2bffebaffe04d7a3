"""Storage formats of quantized weights: the tensors that make a weight, and the size of each."""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from outliers.errors import UserError
from outliers.models.stored.tensors import Lazy

FLOATS = ("F16", "BF16", "F32")
INT32 = ("I32",)
WORD = 32  # bits


class Contradiction(UserError):
    """A tensor that contradicts `quantization_config` or the other tensors of its weight.

    end: the end of its name. found: what the checkpoint has instead, None for no such tensor.
    """

    def __init__(self, end: str, found: str | None, expected: str):
        self.end, self.found, self.expected = end, found, expected
        super().__init__(f"'{end}' {found}; expected {expected}")


class Sizes(NamedTuple):
    """The sizes that follow from the configuration and from the code tensor of a weight (outputs, features).

    groups: number of groups of features, or of blocks of entries, that share a scale. scales: the shape of the scales
    in formats where `groups` does not determine it. fields: the part of `quantization_config` for this weight. shown:
    names of the fields to show in messages.
    """

    outputs: int
    features: int
    bits: int
    fields: dict
    shown: tuple[str, ...]
    groups: int = 1
    scales: tuple[int, ...] = ()

    def words(self, codes: int) -> int:
        """Return the number of 32-bit words that hold a number of codes."""
        return -(-codes * self.bits // WORD)

    def written(self) -> str:
        """Return the fields that require these sizes, for a message."""
        return ", ".join(f"{name} {self.fields[name]}" for name in self.shown if name in self.fields)


class StoredTensor(NamedTuple):
    """A tensor of a weight.

    end: pattern of the end of its name. form: its dtypes, in the names of safetensors, and its shape, from the sizes of
    the weight; a shape of None for any. required: whether the sizes require it; None if it is optional.
    """

    end: str
    form: Callable[[Sizes], tuple[tuple[str, ...], tuple[int, ...] | None]]
    required: Callable[[Sizes], bool | None] = lambda _sizes: True


class StoredFormat(NamedTuple):
    """A library's way of storing a weight.

    codes: the end of the name of the code tensor. sizes: yields all readings of the configuration, from the tensors by
    the ends of their names and the fields of `quantization_config`. parts: the tensors. unpack: makes the weight
    (outputs, features), float32. needs: an end of a name without which the weight is not in this format. note: checks
    the values of small tensors, raises `Contradiction`, and returns a note for rows on how they were read.
    """

    codes: str
    sizes: Callable[[dict[str, Lazy], dict], Iterator[Sizes]]
    parts: tuple[StoredTensor, ...]
    unpack: Callable[[dict[str, torch.Tensor], Sizes], torch.Tensor]
    needs: str
    note: Callable[[dict[str, Lazy], Sizes], str] = lambda _parts, _sizes: ""

    def settled(self, stored: dict[str, Lazy], fields: dict) -> tuple[Sizes, str]:
        """Return the sizes that fit all tensors of a weight, and the note on how they were read.

        Raises:
            Contradiction: no reading of the configuration fits; the contradiction to the first one is raised.
        """
        first = None
        for sizes in self.sizes(stored, fields):
            try:
                for part in self.parts:
                    _check_part(part, sizes, stored)
                return sizes, self.note(stored, sizes)
            except Contradiction as contradiction:
                contradiction.expected += f", as its 'quantization_config' has it ({sizes.written()})"
                first = first or contradiction
        raise first or Contradiction(self.codes, "", "a 'quantization_config' that says how its weights are stored")


def _check_part(part: StoredTensor, sizes: Sizes, stored: dict[str, Lazy]) -> None:
    """Raise Contradiction if a tensor of a weight is missing, superfluous, or of another dtype or shape than the sizes
    require."""
    end, required = next((end for end in stored if re.fullmatch(part.end, end)), None), part.required(sizes)
    if end is None and not required:
        return
    if required is False:
        raise Contradiction(end, "", "none")
    dtypes, shape = part.form(sizes)
    expected = " or ".join(dtypes) + ("" if shape is None else f" of the shape {shape}")
    if end is None:
        raise Contradiction(part.end.replace("\\", ""), None, expected)
    if stored[end].dtype not in dtypes or shape not in (None, stored[end].shape):
        raise Contradiction(end, f"as {stored[end].dtype} of the shape {stored[end].shape}", expected)
