"""What a quantized product is made of, as data: number formats, groups that share a scale, kinds of arithmetic."""

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

OPERANDS = ("activations", "weights")


class Format(NamedTuple):
    """A number format.

    quantizer: the function that states it, from a matrix (rows, features) and a `Quantizer` to
    `outlier_kernels.reference.Quantized`, or where it is, "module:name". symmetric: what it takes, absmax (True) or
    zeropoint (False).
    """

    quantizer: str | Callable
    symmetric: tuple[bool, ...] = (True, False)


class Arithmetic(NamedTuple):
    """A way to compute the product of quantized operands.

    activations, weights: how they are quantized for it, as it is written; None where it takes any. exact_outliers:
    whether outlier features meet exact weights, where those are at hand.
    """

    activations: str | None = None
    weights: str | None = None
    exact_outliers: bool = True


FORMATS = {"int8": Format("outlier_kernels.reference:quantize_int8")}
# Groups that share a scale, and the operands that have them: everything, a token, an output.
GRANULARITIES = {"tensor": OPERANDS, "row": ("activations",), "column": ("weights",)}
ARITHMETICS = {
    "exact": Arithmetic(),
    "bitsandbytes": Arithmetic("int8 row absmax", "int8 column absmax", exact_outliers=False),
}


@dataclass(frozen=True)
class Quantizer:
    """How one operand of a product is quantized.

    format: a name in `FORMATS`. granularity: a name in `GRANULARITIES`. symmetric: absmax if true, else zeropoint.
    Written, it is those three: "int8 row absmax".
    """

    format: str
    granularity: str
    symmetric: bool = True

    def __str__(self) -> str:
        return f"{self.format} {self.granularity} {'absmax' if self.symmetric else 'zeropoint'}"

    @classmethod
    def read(cls, written: str | None) -> "Quantizer | None":
        """What was written; None of None, an operand that is not quantized."""
        if written is None:
            return None
        format, granularity, kind = written.rsplit(" ", 2)
        return cls(format, granularity, kind == "absmax")

    @property
    def per_row(self) -> bool:
        """Whether each row of the matrix as it is stored has a scale: a token, or an output."""
        return self.granularity != "tensor"


def find(thing: object) -> object:
    """What stands at "module:name", imported when it is first used; what is no text stands for itself."""
    return pkgutil.resolve_name(thing) if isinstance(thing, str) else thing


ROWS = Quantizer("int8", "row")  # activations of vector-wise quantization (section 3.1)
