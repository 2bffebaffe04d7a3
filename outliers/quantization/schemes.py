"""Schemes as data: the paper's Table 1, those of other number formats, and those of a user's own."""

import json
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields, replace

from outlier_kernels.formats import ARITHMETICS, BLOCK, FORMATS, GROUPS, OPERANDS, Quantizer, granularities

from outliers.criterion import ALPHA, check_threshold
from outliers.errors import UserError, shown, unknown_name
from outliers.quantization.plugins import plugin_schemes
from outliers.quantization.transforms import TRANSFORMS


@dataclass(frozen=True)
class Scheme:
    """One way to quantize the linear projections of the decoder layers.

    activations, weights: how each operand is quantized; None for one that is not. outlier_threshold: features with an
    input of at least this magnitude are multiplied in 16 bits (section 3.2); None does without the decomposition.
    label: what tables call it; by default its name. arithmetic: "exact", or "bitsandbytes" to compute LLM.int8() as
    bitsandbytes does, which differs from the paper's equation. transform: a name in `TRANSFORMS`, of a
    function-preserving change of the features before anything is quantized.

    Raises:
        UserError: a part is unknown, or two do not go together: the number would be that of another scheme.
    """

    name: str
    activations: Quantizer | None
    weights: Quantizer | None
    outlier_threshold: float | None = None
    label: str = ""
    arithmetic: str = "exact"
    transform: str | None = None

    def __post_init__(self):
        if self.label == "":
            object.__setattr__(self, "label", self.name)
        for field in ("name", "label"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field):
                raise UserError(f"a scheme's {field} is {shown(getattr(self, field))}; expected text")
        for operand in OPERANDS:
            self._check_operand(operand, getattr(self, operand))
        self._check("arithmetic", self.arithmetic, ARITHMETICS)
        self._check("transform", self.transform, [None, *TRANSFORMS])
        if self.outlier_threshold is not None:
            threshold = check_threshold(f"outlier_threshold of scheme '{self.name}'", self.outlier_threshold)
            object.__setattr__(self, "outlier_threshold", threshold)
        for operand in OPERANDS:
            if expected := getattr(ARITHMETICS[self.arithmetic], operand):
                where = f" with arithmetic '{self.arithmetic}'"
                self._check(operand, str(getattr(self, operand)), [expected], where)
        if not self.quantizes:
            for part in ("outlier_threshold", "transform"):
                self._check(part, getattr(self, part), [None], " where no operand is quantized")

    def _check_operand(self, operand: str, quantizer: Quantizer | None) -> None:
        if quantizer is None:
            return
        if not isinstance(quantizer, Quantizer):
            raise UserError(f"{operand} of scheme '{self.name}' is {shown(quantizer)}; expected a Quantizer or None")
        self._check(f"format of the {operand}", quantizer.format, FORMATS)
        having = granularities(quantizer.format, operand)
        if quantizer.group and GROUPS in having:  # of as many features as one likes
            having.append(quantizer.granularity)
        self._check(f"granularity of the {operand}", quantizer.granularity, having)
        self._check(f"symmetric of the {operand}", quantizer.symmetric, FORMATS[quantizer.format].symmetric)

    def _check(self, part: str, value: object, expected: Iterable, where: str = "") -> None:
        if not any(type(value) is type(one) and value == one for one in expected):
            known = " or ".join(map(repr, expected))
            raise UserError(f"{part} of scheme '{self.name}' is {shown(value)}{where}; expected {known}")

    @property
    def quantizes(self) -> bool:
        """Whether it quantizes anything."""
        return self.activations is not None or self.weights is not None

    @property
    def has_exact_sums(self) -> bool:
        """Whether its products are sums of integer codes, to which scales are applied; else dequantized operands are
        multiplied."""
        return all(one is not None and FORMATS[one.format].integers for one in (self.activations, self.weights))

    @property
    def group(self) -> int | None:
        """The least number of features that every group of either operand divides; None without groups."""
        groups = [one.group for one in (self.activations, self.weights) if one and one.group]
        return math.lcm(*groups) if groups else None

    @property
    def weight_operand(self) -> tuple:
        """What the codes of a weight follow from: schemes in which it is equal share them."""
        return self.weights, self.arithmetic, self.transform

    @property
    def exact_outliers(self) -> bool:
        """Whether outlier features meet exact weights, where those are at hand."""
        return ARITHMETICS[self.arithmetic].exact_outliers

    @property
    def kernel_arguments(self) -> dict:
        """What `outlier_kernels.dispatch.linear` has to know of the scheme."""
        return {
            "activations": self.activations,
            "threshold": self.outlier_threshold,
            "arithmetic": self.arithmetic,
        }

    @property
    def parts(self) -> str:
        """All but its names and its threshold, in one line."""
        operands = f"{self.activations or 'exact'} × {self.weights or 'exact'}"
        return ", ".join([operands, self.arithmetic, *([self.transform] if self.transform else [])])


def _int8(granularity: str) -> tuple[Quantizer, Quantizer]:
    """Absmax and zeropoint with the same granularity."""
    return Quantizer("int8", granularity, True), Quantizer("int8", granularity, False)


_TENSOR, _ZEROPOINT_TENSOR = _int8("tensor")
_ROW, _ZEROPOINT_ROW = _int8("row")
_COLUMN, _ZEROPOINT_COLUMN = _int8("column")

_OWN = [
    Scheme("fp32", None, None, None, "32-bit Float"),
    Scheme("absmax", _TENSOR, _TENSOR, None, "Int8 absmax"),
    Scheme("zeropoint", _ZEROPOINT_TENSOR, _ZEROPOINT_TENSOR, None, "Int8 zeropoint"),
    Scheme("absmax-row", _ROW, _TENSOR, None, "Int8 absmax row-wise"),
    Scheme("absmax-vector", _ROW, _COLUMN, None, "Int8 absmax vector-wise"),
    Scheme("zeropoint-vector", _ZEROPOINT_ROW, _ZEROPOINT_COLUMN, None, "Int8 zeropoint vector-wise"),
    Scheme("absmax-row-decomp", _ROW, _TENSOR, ALPHA, "Int8 absmax row-wise + decomposition"),
    Scheme("llm.int8", _ROW, _COLUMN, ALPHA, "Absmax LLM.int8() (vector-wise + decomp)"),
    Scheme(
        "llm.int8-zeropoint",
        _ZEROPOINT_ROW,
        _ZEROPOINT_COLUMN,
        ALPHA,
        "Zeropoint LLM.int8() (vector-wise + decomp)",
    ),
    Scheme("llm.int8-bnb", _ROW, _COLUMN, ALPHA, "LLM.int8() as in bitsandbytes", "bitsandbytes"),
]


def _alike(format: str, granularity: str, label: str) -> Scheme:
    """Both operands in one format, of whose name it is, with one granularity."""
    both = Quantizer(format, granularity)
    return Scheme(format, both, both, None, label)


def _by_row(name: str, activations: str | None, weights: str, label: str) -> Scheme:
    """Symmetric formats with scales by row, of activations, and by column, of weights."""
    return Scheme(name, activations and Quantizer(activations, "row"), Quantizer(weights, "column"), None, label)


_OF_FORMATS = [
    _by_row("w8a8", "int8", "int8", "W8A8"),
    _by_row("w6a6", "int6", "int6", "W6A6"),
    _by_row("w4a8", "int8", "int4", "W4A8"),
    _by_row("w4a4", "int4", "int4", "W4A4"),
    _by_row("w8", None, "int8", "W8, weights alone"),
    _by_row("w6", None, "int6", "W6, weights alone"),
    _by_row("w4", None, "int4", "W4, weights alone"),
    _alike("fp8-e4m3", "tensor", "FP8 E4M3"),
    _alike("fp8-e5m2", "tensor", "FP8 E5M2"),
    _by_row("fp8-e4m3-row", "fp8-e4m3", "fp8-e4m3", "FP8 E4M3 vector-wise"),
    _by_row("fp8-e5m2-row", "fp8-e5m2", "fp8-e5m2", "FP8 E5M2 vector-wise"),
    _alike("mxfp8-e4m3", BLOCK, "MXFP8 E4M3"),
    _alike("mxfp8-e5m2", BLOCK, "MXFP8 E5M2"),
    _alike("mxfp6-e2m3", BLOCK, "MXFP6 E2M3"),
    _alike("mxfp6-e3m2", BLOCK, "MXFP6 E3M2"),
    _alike("mxfp4", BLOCK, "MXFP4"),
    _alike("mxint8", BLOCK, "MXINT8"),
    _alike("nvfp4", BLOCK, "NVFP4"),
    _alike("bfp8", "group-32", "BFP8"),
    _alike("bfp6", "group-32", "BFP6"),
    _alike("bfp4", "group-32", "BFP4"),
]
SCHEMES = {scheme.name: scheme for scheme in _OWN + _OF_FORMATS}  # a user may add to it
BASELINE = "fp32"  # the scheme that quantizes nothing, whatever the dtype
TABLE1 = [  # the paper's rows
    "fp32",
    "absmax",
    "zeropoint",
    "absmax-row",
    "absmax-vector",
    "zeropoint-vector",
    "absmax-row-decomp",
    "llm.int8",
    "llm.int8-zeropoint",
]


def get_scheme(scheme: str | Scheme, alpha: float | None = None) -> Scheme:
    """Look a scheme up by name, in the table and then among those of installed plugins; a scheme stands for itself.

    Where it decomposes, `alpha`, if it is given, takes the place of its own threshold.

    Raises:
        UserError: no scheme has this name, a plugin is broken, or `alpha` is not a positive number.
    """
    if not isinstance(scheme, Scheme):
        scheme = _named(scheme)
    threshold = None if alpha is None else check_threshold("alpha", alpha)
    if threshold is None or scheme.outlier_threshold is None:
        return scheme
    return replace(scheme, outlier_threshold=threshold)


def _named(name: str) -> Scheme:
    if isinstance(name, str) and (found := SCHEMES.get(name) or in_groups(name)):
        return found
    known = SCHEMES | plugin_schemes(Scheme, SCHEMES)
    if not isinstance(name, str) or name not in known:
        raise unknown_name("scheme", str(name), known)
    return known[name]


def in_groups(name: str) -> Scheme | None:
    """A scheme of other formats with so many features in a group, by its name, such as "w4a8-g64"; None of any other.

    Groups take the place of columns of weights, and of the groups of either operand that has some.
    """
    written = re.fullmatch(r"(?P<base>.+)-g(?P<group>[1-9]\d{0,5})", name)
    base = written and {scheme.name: scheme for scheme in _OF_FORMATS}.get(written["base"])
    if not base or GROUPS not in granularities(base.weights.format, "weights") or not base.weights.per_row:
        return None
    granularity = f"group-{written['group']}"
    operands = {
        operand: replace(quantizer, granularity=granularity) if operand == "weights" or quantizer.group else quantizer
        for operand in OPERANDS
        if (quantizer := getattr(base, operand))
    }
    return replace(base, name=name, label=f"{base.label}, groups of {written['group']}", **operands)


def is_own(scheme: Scheme) -> bool:
    """Whether it is one of this project's, at whatever threshold, so that its name says what it is."""
    return any(
        (scheme.name, scheme.parts) == (own.name, own.parts)
        and (scheme.outlier_threshold is None) == (own.outlier_threshold is None)
        for own in (*_OWN, *_OF_FORMATS, in_groups(scheme.name))
        if own
    )


def said_of(scheme: Scheme, skip: Collection[str] = ()) -> dict:
    """What rows say of a scheme beside its name; nothing where it quantizes nothing.

    alpha: its threshold. scheme_parts: of a scheme that is not this project's own, what it is made of. arithmetic:
    "simulated" where dequantized operands are multiplied. skip: as for `outliers.quantize`.
    """
    if not scheme.quantizes:
        return {}
    found = {"alpha": scheme.outlier_threshold, "scheme_parts": None if is_own(scheme) else scheme.parts}
    found["arithmetic"] = None if scheme.has_exact_sums else "simulated"
    found["skip"] = sorted(set(skip)) or None
    return {field: value for field, value in found.items() if value is not None}


def by_weights(schemes: Iterable[Scheme]) -> list[Scheme]:
    """Those that share weight codes side by side, unquantized first, otherwise in their order."""
    schemes = list(schemes)
    operands = list(dict.fromkeys(scheme.weight_operand for scheme in schemes))
    return sorted(schemes, key=lambda scheme: (scheme.quantizes, operands.index(scheme.weight_operand)))


def write_scheme(scheme: Scheme) -> str:
    """A scheme as JSON, for `read_scheme`."""
    return json.dumps(asdict(scheme))


def read_scheme(written: str) -> Scheme:
    """The scheme with quantized weights that a file holds as JSON.

    Raises:
        ValueError: it holds none.
    """
    try:
        parts = json.loads(written)
        if unknown := sorted(set(parts) - {field.name for field in fields(Scheme)}):
            raise ValueError(f"its scheme: unknown part '{unknown[0]}'; quantize the exact model again")
        operands = {name: None if parts[name] is None else Quantizer(**parts[name]) for name in OPERANDS}
        scheme = Scheme(**parts | operands)
    except (TypeError, KeyError, RecursionError, UserError) as error:
        raise ValueError(f"its scheme: {error}") from None
    if scheme.weights is None:
        raise ValueError(f"its scheme '{scheme.name}' quantizes no weights")
    return scheme
