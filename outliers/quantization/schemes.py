"""The 8-bit schemes of the paper's Table 1, as data."""

import json
from dataclasses import dataclass, replace
from typing import Literal

from outliers.criterion import ALPHA, check_threshold
from outliers.errors import UserError, shown, unknown_name

# What the kernels serve, field by field; and with which values of other fields a value of one goes.
SERVED = {
    "bits": (8, 32),
    "symmetric": (True, False),
    "activation_granularity": ("tensor", "row"),
    "weight_granularity": ("tensor", "column"),
    "bitsandbytes": (False, True),
}
NOTHING_QUANTIZED = {name: values[0] for name, values in SERVED.items() if name != "bits"} | {"outlier_threshold": None}
AS_BITSANDBYTES = {"symmetric": True, "activation_granularity": "row", "weight_granularity": "column"}
GOES_WITH = {("bits", 32): NOTHING_QUANTIZED, ("bitsandbytes", True): AS_BITSANDBYTES}


@dataclass(frozen=True)
class Scheme:
    """One way to quantize the linear projections of the decoder layers.

    symmetric: absmax if true, zeropoint if false. Granularity: one scale for the whole tensor, for each row of the
    activations (a token), or for each column of the weights (an output). outlier_threshold: features with an input
    of at least this magnitude are multiplied in 16 bits (section 3.2); None does without the decomposition.
    bitsandbytes: whether LLM.int8() is computed as bitsandbytes does, which differs from the paper's equation. A scheme
    of 32 bits quantizes nothing.

    Raises:
        UserError: no kernel serves a field, or the combination of two: the number would be that of another scheme.
    """

    name: str
    bits: Literal[8, 32]
    symmetric: bool
    activation_granularity: Literal["tensor", "row"]
    weight_granularity: Literal["tensor", "column"]
    outlier_threshold: float | None
    label: str  # the row of the paper's Table 1
    bitsandbytes: bool = False

    def __post_init__(self):
        for field in ("name", "label"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field):
                raise UserError(f"a scheme's {field} is {shown(getattr(self, field))}; expected text")
        for field, values in SERVED.items():
            self._check(field, values)
        for (field, value), others in GOES_WITH.items():
            if getattr(self, field) == value:
                for other, expected in others.items():
                    self._check(other, (expected,), f" with {field} {value}")
        if self.outlier_threshold is not None:
            check_threshold(f"outlier_threshold of scheme '{self.name}'", self.outlier_threshold)

    def _check(self, field: str, expected: tuple, where: str = "") -> None:
        value = getattr(self, field)
        if not any(type(value) is type(one) and value == one for one in expected):
            kernels = " or ".join(map(repr, expected))
            raise UserError(f"{field} of scheme '{self.name}' is {shown(value)}{where}; the kernels serve {kernels}")

    @property
    def kernel_arguments(self) -> dict:
        """What `outlier_kernels.dispatch.linear` has to know of the scheme."""
        return {
            "symmetric": self.symmetric,
            "per_row": self.activation_granularity == "row",
            "threshold": self.outlier_threshold,
            "bitsandbytes": self.bitsandbytes,
        }


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp32", 32, True, "tensor", "tensor", None, "32-bit Float"),
        Scheme("absmax", 8, True, "tensor", "tensor", None, "Int8 absmax"),
        Scheme("zeropoint", 8, False, "tensor", "tensor", None, "Int8 zeropoint"),
        Scheme("absmax-row", 8, True, "row", "tensor", None, "Int8 absmax row-wise"),
        Scheme("absmax-vector", 8, True, "row", "column", None, "Int8 absmax vector-wise"),
        Scheme("zeropoint-vector", 8, False, "row", "column", None, "Int8 zeropoint vector-wise"),
        Scheme("absmax-row-decomp", 8, True, "row", "tensor", ALPHA, "Int8 absmax row-wise + decomposition"),
        Scheme("llm.int8", 8, True, "row", "column", ALPHA, "Absmax LLM.int8() (vector-wise + decomp)"),
        Scheme("llm.int8-zeropoint", 8, False, "row", "column", ALPHA, "Zeropoint LLM.int8() (vector-wise + decomp)"),
        Scheme("llm.int8-bnb", 8, True, "row", "column", ALPHA, "LLM.int8() as in bitsandbytes", bitsandbytes=True),
    )
}
BASELINE = "fp32"  # the scheme that quantizes nothing, whatever the dtype
TABLE1 = [name for name, scheme in SCHEMES.items() if not scheme.bitsandbytes]  # the paper's rows


def get_scheme(name: str, alpha: float | None = None) -> Scheme:
    """Look a scheme up by name; where it decomposes, `alpha`, if it is given, takes the place of its own threshold.

    Raises:
        UserError: no scheme has this name, or `alpha` is not a positive number.
    """
    if not isinstance(name, str) or name not in SCHEMES:
        raise unknown_name("scheme", str(name), SCHEMES)
    scheme, threshold = SCHEMES[name], None if alpha is None else check_threshold("alpha", alpha)
    if threshold is None or scheme.outlier_threshold is None:
        return scheme
    return replace(scheme, outlier_threshold=threshold)


def read_scheme(written: str) -> Scheme:
    """The 8-bit scheme that a file holds as JSON.

    Raises:
        ValueError: it holds none that the kernels serve.
    """
    try:
        scheme = Scheme(**json.loads(written))
    except (TypeError, RecursionError, UserError) as error:
        raise ValueError(f"its scheme: {error}") from None
    if scheme.bits != 8:
        raise ValueError(f"its scheme '{scheme.name}' quantizes nothing")
    return scheme


def weight_order(scheme: Scheme) -> tuple:
    """Sort key that puts schemes with the same weight codes side by side, unquantized first."""
    return -scheme.bits, scheme.weight_granularity == "column", not scheme.symmetric, scheme.bitsandbytes
