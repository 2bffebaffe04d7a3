"""The parts of a quantized product as data: number formats, groups that share a scale, kinds of arithmetic."""

import math
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

OPERANDS = ("activations", "weights")


class Element(NamedTuple):
    """A floating-point format of a few bits, with subnormal numbers; larger values saturate at the largest.

    mantissa_bits: stored mantissa bits. least_exponent: of the normal numbers. largest: the largest finite value.
    """

    mantissa_bits: int
    least_exponent: int
    largest: float

    @property
    def largest_exponent(self) -> int:
        return math.frexp(self.largest)[1] - 1


class Format(NamedTuple):
    """A number format.

    quantizer: the function that defines it, from a matrix (rows, features) and a `Quantizer` to the reference's
    `Quantized`; or its name among the reference's functions, or its location as "module:name". The function sees a
    scale's group as a row or as the whole matrix, because the reference reshapes smaller groups to rows. symmetric: the
    supported kinds, absmax (True) or zeropoint (False). bits: per value. integers: whether codes are int8, whose
    products are summed exactly. scale_bits: per scale, if that does not depend on the group. group: how many features
    share a scale, if the format fixes it. tensor_bits, row_bits: of an additional scale of the whole matrix or of each
    row. element: the format of floating-point codes. large_bits: per value in the first groups of a row, see
    `large_groups`. in_rows: whether the function gets whole rows and forms groups itself. rounding: the function, given
    like `quantizer`, that rounds values divided by their scale to codes, given those values, the format and a zero
    point; None if no given scale can be used.
    """

    quantizer: str | Callable
    symmetric: tuple[bool, ...] = (True, False)
    bits: int = 8
    integers: bool = False
    scale_bits: int | None = None
    group: int | None = None
    tensor_bits: int = 0
    row_bits: int = 0
    element: Element | None = None
    large_bits: int | None = None
    in_rows: bool = False
    rounding: str | Callable | None = None


class Arithmetic(NamedTuple):
    """A way to compute the product of quantized operands.

    activations, weights: the required quantizers in writing, None if any will do. exact_outliers: whether outlier
    features are multiplied with unquantized weights, if available. half: whether operands are cast to float16.
    """

    activations: str | None = None
    weights: str | None = None
    exact_outliers: bool = True
    half: bool = False


E4M3, E5M2 = Element(3, -6, 448.0), Element(2, -14, 57344.0)
E2M3, E3M2, E2M1 = Element(3, 0, 7.5), Element(2, -2, 28.0), Element(1, 0, 6.0)

_INTEGERS = Format("quantize_integers", integers=True, rounding="round_integers")
_ELEMENTS = Format("quantize_scaled", (True,), rounding="round_elements")
_MX = _ELEMENTS._replace(quantizer="quantize_microscaling", scale_bits=8, group=32)
_NV = _ELEMENTS._replace(quantizer="quantize_nvfp4", scale_bits=8, group=16)
_BLOCK = _INTEGERS._replace(quantizer="quantize_mantissas", symmetric=(True,), scale_bits=8, rounding="round_mantissas")

FORMATS = {
    "int8": _INTEGERS,
    "int6": _INTEGERS._replace(bits=6),
    "int4": _INTEGERS._replace(bits=4),
    "fp8-e4m3": _ELEMENTS._replace(element=E4M3),
    "fp8-e5m2": _ELEMENTS._replace(element=E5M2),
    # OCP Microscaling Formats 1.0; the names include those of the elements.
    "mxfp8-e4m3": _MX._replace(element=E4M3),
    "mxfp8-e5m2": _MX._replace(element=E5M2),
    "mxfp6-e2m3": _MX._replace(bits=6, element=E2M3),
    "mxfp6-e3m2": _MX._replace(bits=6, element=E3M2),
    "mxfp4": _MX._replace(bits=4, element=E2M1),
    "mxint8": _BLOCK._replace(group=32),
    "nvfp4": _NV._replace(bits=4, tensor_bits=32, element=E2M1),
    # Plain block floating point: a shared exponent, and mantissas in two's complement.
    "bfp8": _BLOCK,
    "bfp6": _BLOCK._replace(bits=6),
    "bfp4": _BLOCK._replace(bits=4),
    # FireQ (Baek et al., 2025): int4 under scales in e4m3, times a power of two of the whole matrix.
    "int4-e4m3": Format(
        "quantize_int4_e4m3", (True,), 4, integers=True, scale_bits=8, tensor_bits=32, rounding="round_mantissas"
    ),
    # QServe (Lin et al., 2024): asymmetric int4 within rows of int8; a group's scale has 8 bits, its zero point 4.
    "int4-in-int8": Format(
        "quantize_int4_in_int8", (True,), 4, integers=True, scale_bits=12, row_bits=32, in_rows=True
    ),
    # COMET (Liu et al., 2025): the first groups of a row, which hold the largest features if sorted, have 8 bits.
    "int4-int8": Format("quantize_int4_int8", (True,), 4, integers=True, large_bits=8, in_rows=True),
}
# Groups that share a scale, and the operands that can have them: everything, a token, an output, any number of
# consecutive features of a row, and the groups of formats that fix their size.
GROUPS, BLOCK = "group-64", "block"
GRANULARITIES = {"tensor": OPERANDS, "row": ("activations",), "column": ("weights",), GROUPS: OPERANDS, BLOCK: OPERANDS}
LARGE_GROUPS = 5  # one group in five is large: "less than 20 %" (COMET, section 3.2)
SCALE_BITS, GROUP_SCALE_BITS = 32, 16  # bits of a scale of a tensor, row or column; of a group
ARITHMETICS = {
    "exact": Arithmetic(),
    "bitsandbytes": Arithmetic("int8 row absmax", "int8 column absmax", exact_outliers=False, half=True),
}


@dataclass(frozen=True)
class Quantizer:
    """The quantization of one operand of a product.

    format: a name in `FORMATS`. granularity: a name in `GRANULARITIES`, or "group-" and a number of features.
    symmetric: absmax if true, otherwise zeropoint. In writing, a quantizer is these three words: "int8 row absmax".

    Example:
        >>> str(outliers.Quantizer("int8", "row"))
        'int8 row absmax'
    """

    format: str
    granularity: str
    symmetric: bool = True

    def __str__(self) -> str:
        """Return the text that `Quantizer.read` parses."""
        return f"{self.format} {self.granularity} {'absmax' if self.symmetric else 'zeropoint'}"

    @classmethod
    def read(cls, written: str | None) -> "Quantizer | None":
        """Parse the text of a quantizer; None, for an operand that is not quantized, gives None."""
        if written is None:
            return None
        format, granularity, kind = written.rsplit(" ", 2)
        return cls(format, granularity, kind == "absmax")

    @property
    def per_row(self) -> bool:
        """Whether each row of the matrix as stored (a token or an output) has its own scale or scales."""
        return self.granularity != "tensor"

    @property
    def group(self) -> int | None:
        """How many consecutive features of a row share a scale; None if all of them do."""
        if self.granularity == BLOCK:
            return FORMATS[self.format].group
        written = re.fullmatch(r"group-([1-9]\d{0,8})", str(self.granularity))
        return int(written[1]) if written else None

    def bits(self, features: int, rows: float = math.inf) -> float:
        """Return the mean bits per value in a matrix (rows, features), including scales and zero points.

        Scales of groups count 16 bits and those of a tensor, row or column 32, unless the format defines its own; a
        zero point counts as much as a value. rows: by default infinitely many, so that a scale of the whole matrix
        counts nothing.
        """
        format = FORMATS[self.format]
        share = self.group or (features if self.per_row else features * rows)
        scale = format.scale_bits or (GROUP_SCALE_BITS if self.group else SCALE_BITS)
        zero_point = 0 if self.symmetric else format.bits
        groups = features / share if self.group else 1
        large = 0 if format.large_bits is None else (format.large_bits - format.bits) * large_groups(groups) / groups
        additional = format.row_bits / features + format.tensor_bits / (features * rows)
        return format.bits + large + (scale + zero_point) / share + additional


def large_groups(groups: float) -> int:
    """Return how many groups of a row have `Format.large_bits`: at most a fifth of them, and at least one."""
    return max(1, int(groups / LARGE_GROUPS))


def is_int8(quantizer: Quantizer | None) -> bool:
    """Return whether the kernels make a quantizer's codes: int8 with a scale per row or for everything."""
    return quantizer is not None and quantizer.format == "int8" and quantizer.group is None


def granularities(format: str, operand: str) -> list[str]:
    fixed = FORMATS[format].group is not None
    return [name for name, operands in GRANULARITIES.items() if operand in operands and (name == BLOCK) == fixed]


def import_location(location: object) -> object:
    """Return the object at "module:name", imported on first use; anything but a string is returned unchanged."""
    return pkgutil.resolve_name(location) if isinstance(location, str) else location


ROWS = Quantizer("int8", "row")  # activations of vector-wise quantization (section 3.1)
