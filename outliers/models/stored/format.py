"""The form in which a library stores a weight: the tensors of which it is made, and what size each of them has."""

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
    """A tensor is not what `quantization_config` and the other tensors of its weight ask for.

    end: of its name. found: what the checkpoint says of it, None where it has no such tensor.
    """

    def __init__(self, end: str, found: str | None, expected: str):
        self.end, self.found, self.expected = end, found, expected
        super().__init__(f"'{end}' {found}; expected {expected}")


class Sizes(NamedTuple):
    """The sizes that follow from the configuration and from the tensor with the codes of a weight (outputs, features).

    groups: those of features, or of blocks of entries, that share a scale. scales: the shape of the scales where that
    differs. fields: of `quantization_config`, or of the part of it that says how this weight is stored. said: names of
    the fields that a message shows.
    """

    outputs: int
    features: int
    bits: int
    fields: dict
    said: tuple[str, ...]
    groups: int = 1
    scales: tuple[int, ...] = ()

    def words(self, codes: int) -> int:
        """The number of words of 32 bits that hold so many codes."""
        return -(-codes * self.bits // WORD)

    def written(self) -> str:
        """The fields that ask for these sizes, for a message."""
        return ", ".join(f"{name} {self.fields[name]}" for name in self.said if name in self.fields)


class Part(NamedTuple):
    """A tensor of a weight.

    end: what its name ends with, a pattern. form: its dtypes, as safetensors calls them, and its shape, by the sizes
    of the weight; a shape of None for any. there: whether the sizes ask for it; None where it may be there or not.
    """

    end: str
    form: Callable[[Sizes], tuple[tuple[str, ...], tuple[int, ...] | None]]
    there: Callable[[Sizes], bool | None] = lambda _sizes: True


class Format(NamedTuple):
    """The way in which a library stores a weight.

    codes: what the name of the tensor with the codes ends with. sizes: all that the configuration may mean, of the
    tensors by their ends and of the fields of `quantization_config`. parts: the tensors. unpack: makes the weight
    (outputs, features), float32. needs: an end without which the weight is no such code. note: looks at the values of
    small tensors, raises `Contradiction`, and returns what a row says of how they were taken.
    """

    codes: str
    sizes: Callable[[dict[str, Lazy], dict], Iterator[Sizes]]
    parts: tuple[Part, ...]
    unpack: Callable[[dict[str, torch.Tensor], Sizes], torch.Tensor]
    needs: str
    note: Callable[[dict[str, Lazy], Sizes], str] = lambda _parts, _sizes: ""

    def settled(self, stored: dict[str, Lazy], fields: dict) -> tuple[Sizes, str]:
        """The sizes of a weight whose tensors all have them, and the note on it.

        Raises:
            Contradiction: they have none that the configuration may mean; that to the first one is said.
        """
        first = None
        for sizes in self.sizes(stored, fields):
            try:
                for part in self.parts:
                    _compare(part, sizes, stored)
                return sizes, self.note(stored, sizes)
            except Contradiction as contradiction:
                contradiction.expected += f", as its 'quantization_config' has it ({sizes.written()})"
                first = first or contradiction
        raise first or Contradiction(self.codes, "", "a 'quantization_config' that says how its weights are stored")


def _compare(part: Part, sizes: Sizes, stored: dict[str, Lazy]) -> None:
    end, there = next((end for end in stored if re.fullmatch(part.end, end)), None), part.there(sizes)
    if end is None and not there:
        return
    if there is False:
        raise Contradiction(end, "", "none")
    dtypes, shape = part.form(sizes)
    expected = " or ".join(dtypes) + ("" if shape is None else f" of the shape {shape}")
    if end is None:
        raise Contradiction(part.end.replace("\\", ""), None, expected)
    if stored[end].dtype not in dtypes or shape not in (None, stored[end].shape):
        raise Contradiction(end, f"as {stored[end].dtype} of the shape {stored[end].shape}", expected)
