"""The 8-bit schemes of the paper's Table 1, as data."""

from dataclasses import dataclass, replace
from typing import Literal

from outliers.criterion import ALPHA
from outliers.errors import UserError, unknown_name


@dataclass(frozen=True)
class Scheme:
    """One way to quantize the linear projections of the decoder layers.

    symmetric: absmax if true, zeropoint if false. Granularity: one scale for the whole tensor, for each row of the
    activations (a token), or for each column of the weights (an output). outlier_threshold: features with an input
    of at least this magnitude are multiplied in 16 bits (section 3.2); None does without the decomposition.
    bitsandbytes: whether LLM.int8() is computed as bitsandbytes does, which differs from the paper's equation.
    """

    name: str
    bits: Literal[8, 32]
    symmetric: bool
    activation_granularity: Literal["tensor", "row"]
    weight_granularity: Literal["tensor", "column"]
    outlier_threshold: float | None
    label: str  # the row of the paper's Table 1
    bitsandbytes: bool = False

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


def get_scheme(name: str, alpha: float = ALPHA) -> Scheme:
    """Look a scheme up by name, with its outlier threshold set to `alpha` if it decomposes.

    Raises:
        UserError: no scheme has this name, or `alpha` is not a positive number.
    """
    if name not in SCHEMES:
        raise unknown_name("scheme", name, SCHEMES)
    if not alpha > 0:
        raise UserError(f"alpha is {alpha}; expected a positive threshold, such as {ALPHA}")
    scheme = SCHEMES[name]
    return scheme if scheme.outlier_threshold is None else replace(scheme, outlier_threshold=float(alpha))


def weight_order(scheme: Scheme) -> tuple:
    """Sort key that puts schemes with the same weight codes side by side, unquantized first."""
    return -scheme.bits, scheme.weight_granularity == "column", not scheme.symmetric, scheme.bitsandbytes
