"""Schemes as data: the paper's Table 1, those of other number formats, and those of a user's own."""

import json
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, fields, replace
from functools import partial, wraps
from typing import Annotated, Literal, TypeVar

from outlier_kernels.formats import ARITHMETICS, BLOCK, FORMATS, GROUPS, OPERANDS, Quantizer, granularities
from pydantic import AfterValidator, ConfigDict, Field, InstanceOf, ValidationError
from pydantic.dataclasses import dataclass

from outliers.criterion import ALPHA, THRESHOLDS, check_threshold
from outliers.errors import UserError, shown, unknown_name
from outliers.models.plugins import plugin_schemes
from outliers.quantization.transforms import (
    COSTLY,
    SEARCH,
    SETTINGS,
    TRANSFORMS,
    Applied,
    Remedy,
    Transform,
    checked_roles,
    find_transform,
    transforms_of,
)

Kind = TypeVar("Kind", bound=type)
Text = Annotated[str, Field(description="text")]
Operand = Annotated[InstanceOf[Quantizer] | None, Field(description="a Quantizer or None")]
LEAST, MOST = THRESHOLDS
Threshold = Annotated[float | None, Field(ge=LEAST, le=MOST, description=f"a positive number, such as {ALPHA}")]
Bits = Annotated[float | None, Field(description="a number of bits")]
INTEGERS = {name: format.bits for name, format in FORMATS.items() if name == f"int{format.bits}"}
Roles = Annotated[tuple[str, ...], Field(strict=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Quantile = Annotated[Share | Literal[SEARCH] | None, Field(description="a quantile above 0, at most 1, or 'search'")]
Damping = Annotated[Share | None, Field(description="a damping above 0, at most 1, such as 0.01")]
SHARE = "None, or the share of its products that stays in 16 bits, from 0 on and below 1"


def _checked(remedy: str) -> AfterValidator:
    """A validator that puts the roles where a remedy applies into the order of their table."""
    return AfterValidator(partial(checked_roles, remedy=remedy))


def _in_one_line(kind: Kind) -> Kind:
    """The same dataclass, whose fields are refused in one line."""
    build = kind.__init__

    @wraps(build)
    def __init__(self, *given, **keywords):
        try:
            build(self, *given, **keywords)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = first["loc"][0]
            field = place if isinstance(place, str) else fields(kind)[place].name
            expected = kind.__pydantic_fields__[field].description or first["msg"].removeprefix("Input should be ")
            name = shown(keywords.get("name", *given[:1]), str)
            raise UserError(f"{field} of scheme '{name}' is {shown(first['input'])}; expected {expected}") from None

    kind.__init__ = __init__
    return kind


@_in_one_line
@dataclass(frozen=True, config=ConfigDict(strict=True, allow_inf_nan=False))
class Scheme:
    """One way to quantize the linear projections of the decoder layers, and what attention multiplies.

    activations, weights: how each operand is quantized; None for one that is not. outlier_threshold: features with an
    input of at least this magnitude are multiplied in 16 bits (section 3.2); None does without the decomposition.
    label: what tables call it; by default its name. arithmetic: "exact", or "bitsandbytes" to compute LLM.int8() as
    bitsandbytes does, which differs from the paper's equation. transform: function-preserving changes of the features
    before anything is quantized, by names in `TRANSFORMS` as `outliers.quantization.transforms.transforms_of` reads
    them, or one's own. token_threshold: tokens with an input of at least this magnitude, before any transform, are
    multiplied exactly, the scales of the others are without them. clip: the quantile of their magnitudes at which the
    inputs are clamped that are quantized, behind the transforms, or `SEARCH`. gptq: error compensation of the weights,
    with this share of the mean diagonal of XᵀX for damping. token_roles, clip_roles, gptq_roles: of the inputs of the
    projections where that is done; none for all. attention: None for attention in 16 bits; in int8 the share of the
    inner dimension of its products that is multiplied in 16 bits all the same, that with the largest magnitudes
    (appendix E). attention_products: which of `PRODUCTS` are in int8; none for both.

    Raises:
        UserError: a part is unknown, or two do not go together: the number would be that of another scheme.

    Example:
        >>> row, column = outliers.Quantizer("int8", "row"), outliers.Quantizer("int8", "column")
        >>> outliers.Scheme("mine", activations=row, weights=column, outlier_threshold=6.0).quantizes_projections
        True
    """

    name: Annotated[Text, Field(min_length=1)]
    activations: Operand
    weights: Operand
    outlier_threshold: Threshold = None
    label: Text = ""
    arithmetic: Literal[*ARITHMETICS] = "exact"
    transform: Annotated[str | InstanceOf[Transform] | None, Field(description="a name or a Transform")] = None
    token_threshold: Threshold = None
    token_roles: Annotated[Roles, _checked("tokens")] = ()
    clip: Quantile = None
    clip_roles: Annotated[Roles, _checked("clip")] = ()
    activation_bits: Bits = None
    activation_roles: Annotated[Roles, _checked("activations")] = ()
    attention: Annotated[float | None, Field(ge=0, lt=1, description=SHARE)] = None
    attention_products: Annotated[Roles, _checked("attention")] = ()
    gptq: Damping = None
    gptq_roles: Annotated[Roles, _checked("gptq")] = ()

    def __post_init__(self):
        object.__setattr__(self, "label", self.label or self.name)
        transforms_of(self.transform)
        for operand in OPERANDS:
            self._check_operand(operand, getattr(self, operand))
        if not self.quantizes_projections:
            for part in ("outlier_threshold", "transform", "token_threshold"):
                self._check(part, getattr(self, part), [None], " where no operand is quantized")
        if self.activations is None:
            self._check("clip", self.clip, [None], " where no input is quantized")
        if self.activations is None or self.activations.format not in INTEGERS:
            self._check("activation_bits", self.activation_bits, [None], " where activations are no integers")
        self._check("activation_bits", self.activation_bits, [None, *map(float, INTEGERS.values())])
        self._check_gptq()

    def _check_operand(self, operand: str, quantizer: Quantizer | None) -> None:
        if quantizer is not None:
            self._check(f"format of the {operand}", quantizer.format, FORMATS)
            having = granularities(quantizer.format, operand)
            if quantizer.group and GROUPS in having:  # of as many features as one likes
                having.append(quantizer.granularity)
            self._check(f"granularity of the {operand}", quantizer.granularity, having)
            self._check(f"symmetric of the {operand}", quantizer.symmetric, FORMATS[quantizer.format].symmetric)
        if expected := getattr(ARITHMETICS[self.arithmetic], operand):
            self._check(operand, str(quantizer), [expected], f" with arithmetic '{self.arithmetic}'")

    def _check_gptq(self) -> None:
        format = self.weights and self.weights.format
        for refused, where in (
            (format is None, " where no weight is quantized"),
            (format and FORMATS[format].rounding is None, f" with weights in {format}"),
            (self.arithmetic != "exact", f" with arithmetic '{self.arithmetic}'"),
            (self.outlier_threshold is not None, " with outlier features, without which weights are rounded anew"),
        ):
            if refused:
                self._check("gptq", self.gptq, [None], where)

    def _check(self, part: str, value: object, expected: Iterable, where: str = "") -> None:
        if not any(type(value) is type(allowed) and value == allowed for allowed in expected):
            known = " or ".join(map(repr, expected))
            raise UserError(f"{part} of scheme '{self.name}' is {shown(value)}{where}; expected {known}")

    @property
    def quantizes(self) -> bool:
        """Whether it quantizes anything."""
        return self.quantizes_projections or self.attention is not None

    @property
    def quantizes_projections(self) -> bool:
        """Whether it quantizes an operand of projections."""
        return self.activations is not None or self.weights is not None

    @property
    def has_exact_sums(self) -> bool:
        """Whether its products are sums of integer codes, to which scales are applied; else dequantized operands are
        multiplied."""
        operands = self.activations, self.weights
        return all(operand is not None and FORMATS[operand.format].integers for operand in operands)

    @property
    def group(self) -> int | None:
        """The least number of features that every group of either operand divides; None without groups."""
        groups = [operand.group for operand in (self.activations, self.weights) if operand and operand.group]
        return math.lcm(*groups) if groups else None

    @property
    def transforms(self) -> tuple[Applied, ...]:
        """Its transforms, in the order in which they change the features."""
        return transforms_of(self.transform)

    @property
    def needs_calibration(self) -> bool:
        """Whether it has to know how large the inputs are, see `outliers.calibrate`."""
        return bool(self.needs) or any(applied.transform.calibrated for applied in self.transforms)

    @property
    def needs(self) -> tuple[str, ...]:
        """The `COSTLY` statistics that a calibration has to have for it."""
        needed = {"gram": self.gptq is not None, "rows": self.searches}
        return tuple(name for name in COSTLY if needed[name])

    @property
    def searches(self) -> bool:
        """Whether the number of a remedy is searched."""
        return self.clip == SEARCH or any(applied.number == SEARCH for applied in self.transforms)

    @property
    def candidates(self) -> "list[Scheme]":
        """It with each number that the first of its remedies may have whose number is searched; none where none is."""
        written = [applied.remedy for applied in self.transforms]
        for place, applied in enumerate(self.transforms):
            if applied.number == SEARCH:
                numbers = [written[place]._replace(number=number) for number in applied.transform.number.grid]
                texts = ["+".join(map(str, [*written[:place], each, *written[place + 1 :]])) for each in numbers]
                return [replace(self, transform=text) for text in texts]
        return [replace(self, clip=quantile) for quantile in SETTINGS["clip"].grid] if self.clip == SEARCH else []

    @property
    def without_searches(self) -> "Scheme":
        """It as a search measures it: without remedies whose numbers are not yet found, weights rounded to nearest."""
        fields = {"gptq": None} | ({"clip": None} if self.clip == SEARCH else {})
        if any(applied.number == SEARCH for applied in self.transforms):
            kept = [applied.remedy for applied in self.transforms if applied.number != SEARCH]
            fields["transform"] = "+".join(map(str, kept)) or None
        return replace(self, **fields)

    @property
    def learns(self) -> bool:
        """Whether a transform is learned with the whole model."""
        return any(applied.transform.learns for applied in self.transforms)

    def at(self, role: str | None) -> "Scheme":
        """The scheme as projections have it whose input has a role, without the remedies of others; None for all."""
        fields = {}
        if isinstance(self.transform, str) and "@" in self.transform:
            kept = [remedy for remedy in self.transform.split("+") if role in (Remedy.read(remedy).roles or (role,))]
            fields["transform"] = "+".join(remedy.partition("@")[0] for remedy in kept) or None
        for setting in SETTINGS.values():
            roles = getattr(self, setting.roles)
            if roles:
                fields |= {setting.roles: ()} | ({} if role in roles else {setting.field: None})
        here = replace(self, **fields) if fields and role is not None else self
        if here.activation_bits is None or here.activation_roles:
            return here
        activations = replace(here.activations, format=f"int{here.activation_bits:g}")
        return replace(here, activations=activations, activation_bits=None)

    @property
    def weight_operand(self) -> tuple:
        """The key of a weight's codes: schemes in which it is equal share them."""
        searched = (self.parts, self.outlier_threshold) if self.searches else ()
        return self.weights, self.arithmetic, self.transform, self.gptq, *searched

    @property
    def exact_outliers(self) -> bool:
        """Whether outlier features meet exact weights, where those are at hand."""
        return ARITHMETICS[self.arithmetic].exact_outliers

    @property
    def kernel_arguments(self) -> dict:
        """The scheme as arguments of `outlier_kernels.dispatch.linear`."""
        return {"activations": self.activations, "threshold": self.outlier_threshold, "arithmetic": self.arithmetic}

    @property
    def parts(self) -> str:
        """All but its names and its threshold, in one line."""
        operands = f"{self.activations or 'exact'} × {self.weights or 'exact'}"
        remedies = [applied.remedy for applied in self.transforms]
        for name, setting in SETTINGS.items():
            if (number := getattr(self, setting.field)) is not None:
                remedies.append(Remedy(name, number, getattr(self, setting.roles)))
        return ", ".join([operands, self.arithmetic, *map(str, remedies)])

    @property
    def as_fields(self) -> dict:
        """Its fields, a transform of one's own by its name."""
        is_custom = isinstance(self.transform, Transform)
        return asdict(self) | {"transform": self.transform.name if is_custom else self.transform}


_TENSOR, _ROW, _COLUMN = (Quantizer("int8", granularity) for granularity in ("tensor", "row", "column"))
_ZEROPOINT = Quantizer("int8", "tensor", False)
_ZEROPOINT_VECTOR = Quantizer("int8", "row", False), Quantizer("int8", "column", False)

_OWN = [
    Scheme("fp32", None, None, None, "32-bit Float"),
    Scheme("absmax", _TENSOR, _TENSOR, None, "Int8 absmax"),
    Scheme("zeropoint", _ZEROPOINT, _ZEROPOINT, None, "Int8 zeropoint"),
    Scheme("absmax-row", _ROW, _TENSOR, None, "Int8 absmax row-wise"),
    Scheme("absmax-vector", _ROW, _COLUMN, None, "Int8 absmax vector-wise"),
    Scheme("zeropoint-vector", *_ZEROPOINT_VECTOR, None, "Int8 zeropoint vector-wise"),
    Scheme("absmax-row-decomp", _ROW, _TENSOR, ALPHA, "Int8 absmax row-wise + decomposition"),
    Scheme("llm.int8", _ROW, _COLUMN, ALPHA, "Absmax LLM.int8() (vector-wise + decomp)"),
    Scheme("llm.int8-zeropoint", *_ZEROPOINT_VECTOR, ALPHA, "Zeropoint LLM.int8() (vector-wise + decomp)"),
    Scheme("llm.int8-bnb", _ROW, _COLUMN, ALPHA, "LLM.int8() as in bitsandbytes", "bitsandbytes"),
]


def _alike(granularity: str, *formats: str) -> list[Scheme]:
    """Both operands in one format, of whose name the scheme is."""
    both = {name: Quantizer(name, granularity) for name in formats}
    return [Scheme(name, format, format, None, name.upper().replace("-", " ")) for name, format in both.items()]


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
    *_alike("tensor", "fp8-e4m3", "fp8-e5m2"),
    _by_row("fp8-e4m3-row", "fp8-e4m3", "fp8-e4m3", "FP8 E4M3 vector-wise"),
    _by_row("fp8-e5m2-row", "fp8-e5m2", "fp8-e5m2", "FP8 E5M2 vector-wise"),
    *_alike(BLOCK, "mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "mxint8", "nvfp4"),
    *_alike("group-32", "bfp8", "bfp6", "bfp4"),
    # Of serving systems, in groups as they have them.
    Scheme("qserve", Quantizer("int8", "row"), Quantizer("int4-in-int8", "group-128"), None, "QServe"),
    Scheme("fireq", Quantizer("fp8-e4m3", "row"), Quantizer("int4-e4m3", "group-128"), None, "FireQ"),
    Scheme(
        "comet",
        Quantizer("int4-int8", "group-128"),
        Quantizer("int4", "group-128"),
        label="COMET",
        transform="reorder",
    ),
    Scheme(
        "flexq",
        Quantizer("int6", "group-128"),
        Quantizer("int6", "group-128"),
        label="FlexQ",
        activation_bits=8.0,
        activation_roles=("ffn_out",),
    ),
]
#: Every scheme by its name; a user may add to it.
SCHEMES = {scheme.name: scheme for scheme in _OWN + _OF_FORMATS}
BASELINE = "fp32"  # the scheme that quantizes nothing, whatever the dtype
TABLE1 = [  # the paper's rows
    *("fp32", "absmax", "zeropoint", "absmax-row", "absmax-vector", "zeropoint-vector", "absmax-row-decomp"),
    *("llm.int8", "llm.int8-zeropoint"),
]


def get_scheme(scheme: str | Scheme, alpha: float | None = None) -> Scheme:
    """Look a scheme up by name, in the table and then among those of installed plugins; a scheme stands for itself.

    A name may be followed by remedies, see `remedied`. Where the scheme decomposes, `alpha`, if it is given, takes the
    place of its own threshold.

    Raises:
        UserError: no scheme or remedy has this name, a plugin is broken, `alpha` is not a positive number, or as
            `remedied`.
    """
    if isinstance(scheme, str):
        _check_base(scheme)
    if isinstance(scheme, str) and scheme not in SCHEMES and "+" in scheme:
        base, _, written = scheme.partition("+")
        scheme = remedied(_scheme_named(base), written)
    elif not isinstance(scheme, Scheme):
        scheme = _scheme_named(scheme)
    threshold = None if alpha is None else check_threshold("alpha", alpha)
    if threshold is None or scheme.outlier_threshold is None:
        return scheme
    return replace(scheme, outlier_threshold=threshold)


def _check_base(written: str) -> None:
    """Raise UserError where a remedy stands in the place of the scheme, or a scheme in that of a remedy."""
    parts = written.split("+")
    others = [part for part in parts if re.split("[=@]", part)[0] not in (*TRANSFORMS, *SETTINGS)]
    if parts[0] not in (*others[:1], *SCHEMES):
        remedies = (part for part in parts if part not in others)
        ordered = "+".join([*(others or ["absmax"]), *remedies])
        raise UserError(f"'{written}': a remedy stands behind its scheme: {ordered}")
    schemes = [part for part in parts if part in SCHEMES or in_groups(part)]
    if len(schemes) > 1 and parts[0] in schemes and written not in SCHEMES:
        raise UserError(f"'{written}' has two schemes; expected one, and remedies behind it, as in absmax+hadamard")


def _scheme_named(name: str) -> Scheme:
    written = str(name)
    if scheme := SCHEMES.get(written) or in_groups(written):
        return scheme
    known = SCHEMES | plugin_schemes(Scheme, SCHEMES)
    if written not in known:
        raise unknown_name("scheme", written, known)
    return known[written]


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


def remedied(scheme: Scheme, written: str) -> Scheme:
    """A scheme with remedies; its name and label say so.

    written: `REMEDY[=NUMBER][@ROLE/ROLE]`, several joined by +, in the order in which they act: "hadamard",
    "tokens=20+smoothing=0.75", "hadamard@ffn_out". Remedies are the names in `TRANSFORMS` and `SETTINGS`.

    Raises:
        UserError: a remedy or role is unknown, a number is missing or not one that the remedy takes, or a remedy does
            not go with the scheme or with another one, or stands in front of one that acts before it.
    """
    remedies, given = [Remedy.read(part) for part in written.split("+")], {}
    if unknown := [remedy.name for remedy in remedies if remedy.name not in (*TRANSFORMS, *SETTINGS)]:
        raise unknown_name("remedy", unknown[0], [*TRANSFORMS, *SETTINGS])
    for remedy in remedies:
        if remedy.name in SETTINGS:
            setting = SETTINGS[remedy.name]
            number = setting.default if remedy.number is None else remedy.number
            if number is None:
                searched = f" or {remedy.name}={SEARCH}" if setting.grid else ""
                raise UserError(
                    f"remedy '{remedy}' has no number; expected one, as in {remedy.name}={setting.example:g}{searched}"
                )
            if setting.field in given or getattr(scheme, setting.field) is not None:
                raise UserError(f"scheme '{scheme.name}+{written}' has '{remedy.name}' twice; expected it once")
            given |= {setting.field: number, setting.roles: remedy.roles}
    if transforms := [str(remedy) for remedy in remedies if remedy.name in TRANSFORMS]:
        if isinstance(scheme.transform, Transform):
            raise UserError(f"scheme '{scheme.name}' has a custom transform, after which no other is possible")
        given["transform"] = "+".join([*([scheme.transform] if scheme.transform else []), *transforms])
    name, label = f"{scheme.name}+{written}", ", ".join([scheme.label, *map(_label, remedies)])
    _check_order(name)
    return replace(scheme, name=name, label=label, **given)


def _check_order(name: str) -> None:
    """Raise UserError unless the remedies in a scheme's name stand in the order in which they act: on the input as it
    is, as a transform of it, on what transforms give, on the weight; attention has none of these and may stand
    anywhere."""
    stages = {"tokens": 0, **dict.fromkeys(TRANSFORMS, 1), "clip": 2, "gptq": 3}
    written = {part: stages[remedy] for part in name.split("+")[1:] if (remedy := re.split("[=@]", part)[0]) in stages}
    acting = sorted(written, key=written.get)
    if acting != list(written):
        raise UserError(
            f"scheme '{name}' has '{'+'.join(written)}'; expected the order in which remedies act, tokens, transforms, "
            f"clip, gptq: write '{'+'.join(acting)}'"
        )


def _label(remedy: Remedy) -> str:
    """The label of a remedy."""
    where = f" in {', '.join(remedy.roles)}" if remedy.roles else ""
    if remedy.number == SEARCH:
        return f"searched {remedy.name}{where}"
    if remedy.name in SETTINGS:
        setting = SETTINGS[remedy.name]
        plain = remedy.number in (None, setting.default)
        return (setting.plain if plain else setting.label.format(remedy.number, percent=100 * remedy.number)) + where
    number = "" if remedy.number is None else f" {remedy.number:g}"
    return (find_transform(remedy.name).label or remedy.name) + number + where


def label_of(name: str) -> str:
    """The label of a scheme in tables; the name where nobody here knows it."""
    try:
        return get_scheme(name).label
    except UserError:  # rows may come from where other schemes are
        return name


def is_own(scheme: Scheme) -> bool:
    """Whether it is one of this project's, at whatever threshold, so that its name says what it is."""
    return _is_one_of(scheme, [*_OWN, *_OF_FORMATS, in_groups(scheme.name)])


def says_bits(scheme: Scheme) -> bool:
    """Whether rows say how many bits its values take: of all that quantize but the paper's and that of bitsandbytes,
    which are 8 bits and scales of so much that they count next to nothing."""
    return scheme.quantizes_projections and not _is_one_of(scheme, _OWN)


def _is_one_of(scheme: Scheme, schemes: Iterable[Scheme | None]) -> bool:
    """By name and parts, at whatever threshold."""
    return any(
        (scheme.name, scheme.parts) == (known.name, known.parts)
        and (scheme.outlier_threshold is None) == (known.outlier_threshold is None)
        for known in schemes
        if known
    )


def scheme_fields(scheme: Scheme, skip: Collection[str] = (), only: Collection[str] = ()) -> dict:
    """Fields of rows on a scheme beside its name; none where it quantizes nothing.

    alpha: its threshold. scheme_parts: of a scheme that is not this project's own, what it is made of. arithmetic:
    "simulated" where dequantized operands are multiplied. skip, only: as for `outliers.quantize`.
    """
    if not scheme.quantizes:
        return {}
    row = {"alpha": scheme.outlier_threshold, "scheme_parts": None if is_own(scheme) else scheme.parts}
    row["arithmetic"] = None if scheme.has_exact_sums or not scheme.quantizes_projections else "simulated"
    row |= {"skip": sorted(set(skip)) or None, "only": sorted(set(only)) or None}
    return {field: value for field, value in row.items() if value is not None}


def by_weights(schemes: Iterable[Scheme]) -> list[Scheme]:
    """Those that share weight codes side by side, unquantized first, otherwise in their order."""
    schemes = list(schemes)
    operands = list(dict.fromkeys(scheme.weight_operand for scheme in schemes))
    return sorted(schemes, key=lambda scheme: (scheme.quantizes, operands.index(scheme.weight_operand)))


def write_scheme(scheme: Scheme) -> str:
    """A scheme as JSON, for `read_scheme`.

    Raises:
        UserError: its transform is in no table.
    """
    if isinstance(scheme.transform, Transform):
        raise UserError(
            f"scheme '{scheme.name}' has a custom transform, which no file can hold; expected one of TRANSFORMS"
        )
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
