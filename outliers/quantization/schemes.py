"""Quantization schemes as data: the paper's Table 1, schemes in other number formats, and custom ones."""

import json
import math
import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields, replace

from outlier_kernels.formats import ARITHMETICS, BLOCK, FORMATS, GROUPS, OPERANDS, Quantizer, granularities

from outliers.criterion import ALPHA, ROUTER, check_threshold
from outliers.errors import UserError, shown, unknown_name
from outliers.models.plugins import plugin_schemes
from outliers.quantization.remedies import COSTLY, PRODUCTS, REMEDIES, SEARCH, STAGES, Remedy, RemedyKind, Transform

MOST_TRANSFORMS = 3  # transforms in a layer
FIELD_CHECKS = {  # field: the types of its values, and how an error message names them
    "name": (str, "text"),
    "activations": (Quantizer | None, "a Quantizer or None"),
    "weights": (Quantizer | None, "a Quantizer or None"),
    "remedies": (list | tuple, "a list of remedies, such as ['hadamard', 'clip=0.999']"),
}
# By remedy: the fields of its number and of its roles in models that were saved by earlier versions.
EARLIER = {
    "tokens": ("token_threshold", "token_roles"),
    "clip": ("clip", "clip_roles"),
    "activations": ("activation_bits", "activation_roles"),
    "gptq": ("gptq", "gptq_roles"),
    "attention": ("attention", "attention_products"),
}


@dataclass(frozen=True)
class Scheme:
    """A way to quantize the linear projections of the decoder layers and the operands of attention.

    activations, weights: the quantizer of each operand; None leaves it exact. outlier_threshold: features with an input
    of at least this magnitude are multiplied in 16 bits (section 3.2); None multiplies all features alike. arithmetic:
    "exact", or "bitsandbytes" to compute LLM.int8() as bitsandbytes does, which differs from the paper's equation.
    remedies: names such as "hadamard@ffn_out" or "clip=0.999", or `Transform` objects; they are stored in the order in
    which rows list them.

    Raises:
        UserError: a field has an unknown value, or two fields contradict each other, so that the result would be that
            of another scheme.

    Example:
        >>> row, column = outliers.Quantizer("int8", "row"), outliers.Quantizer("int8", "column")
        >>> outliers.Scheme("mine", activations=row, weights=column, remedies=["hadamard"]).quantizes_projections
        True
    """

    name: str
    activations: Quantizer | None
    weights: Quantizer | None
    outlier_threshold: float | None = None
    arithmetic: str = "exact"
    remedies: tuple[Remedy | RemedyKind | str, ...] | list[Remedy | RemedyKind | str] = ()

    def __post_init__(self):
        for field, (types, expected) in FIELD_CHECKS.items():
            value = getattr(self, field)
            if not isinstance(value, types) or (field == "name" and not value):
                raise UserError(f"{field} of scheme '{shown(self.name, str)}' is {shown(value)}; expected {expected}")
        if self.outlier_threshold is not None:
            check_threshold(f"outlier_threshold of scheme '{self.name}'", self.outlier_threshold)
        self._check("arithmetic", self.arithmetic, ARITHMETICS)
        for operand in OPERANDS:
            self._check_operand(operand, getattr(self, operand))
        if not self.quantizes_projections:
            self._check("outlier_threshold", self.outlier_threshold, [None], " where no operand is quantized")
        remedies = map(Remedy.of, self.remedies)
        object.__setattr__(self, "remedies", tuple(sorted(remedies, key=_place)))
        self._check_remedies()

    def _check_operand(self, operand: str, quantizer: Quantizer | None) -> None:
        if quantizer is not None:
            self._check(f"format of the {operand}", quantizer.format, FORMATS)
            known = granularities(quantizer.format, operand)
            if quantizer.group and GROUPS in known:  # groups of any number of features
                known.append(quantizer.granularity)
            self._check(f"granularity of the {operand}", quantizer.granularity, known)
            self._check(f"symmetric of the {operand}", quantizer.symmetric, FORMATS[quantizer.format].symmetric)
        if expected := getattr(ARITHMETICS[self.arithmetic], operand):
            self._check(operand, str(quantizer), [expected], f" with arithmetic '{self.arithmetic}'")

    def _check_remedies(self) -> None:
        if (count := len(self.transforms)) > MOST_TRANSFORMS:
            raise UserError(f"{count} transforms in scheme '{self.name}'; expected at most {MOST_TRANSFORMS}")
        for number, remedy in enumerate(self.remedies):
            name, kind = remedy.name, remedy.kind
            for reason, applies in kind.refuses:
                if applies(self):
                    raise UserError(f"scheme '{self.name}' has '{name}' {reason.format(**vars(self))}; leave it out")
            before = [other for other in self.transforms[:number] if other.applies_at(remedy.roles)]
            earlier = before if isinstance(kind, Transform) else self.remedies[:number]
            if name in (other.name for other in earlier):
                where = " at a role" if isinstance(kind, Transform) else ""
                raise UserError(f"scheme '{self.name}' has '{name}' twice; expected it once{where}")
            mixing = [other.name for other in before if not other.kind.by_feature]
            if kind.calibrated and mixing:
                raise UserError(
                    f"'{name}' comes after '{mixing[0]}', whose outputs no calibration has seen; expected it before"
                )

    def _check(self, part: str, value: object, expected: Iterable, where: str = "") -> None:
        if not any(type(value) is type(allowed) and value == allowed for allowed in expected):
            known = " or ".join(map(repr, expected))
            raise UserError(f"{part} of scheme '{self.name}' is {shown(value)}{where}; expected {known}")

    @property
    def base(self) -> str:
        """The name without remedies."""
        return self.name.partition("+")[0]

    def remedies_with(self, action: str) -> list[Remedy]:
        """Return the remedies whose `RemedyKind` defines an action, such as "clips" or "around"."""
        return [remedy for remedy in self.remedies if getattr(remedy.kind, action)]

    @property
    def transforms(self) -> tuple[Remedy, ...]:
        """The transforms, in the order in which they change the features."""
        return tuple(remedy for remedy in self.remedies if isinstance(remedy.kind, Transform))

    @property
    def attention(self) -> Remedy | None:
        """The remedy that puts attention into int8; None leaves attention in 16 bits."""
        return next((remedy for remedy in self.remedies if remedy.kind.places == PRODUCTS), None)

    @property
    def routers(self) -> bool:
        """Whether the scheme quantizes routers too."""
        return any(remedy.name == ROUTER for remedy in self.remedies)

    @property
    def quantizes(self) -> bool:
        """Whether the scheme quantizes projections or attention; routers come with projections."""
        return self.quantizes_projections or self.attention is not None

    @property
    def quantizes_projections(self) -> bool:
        """Whether an operand of projections is quantized."""
        return self.activations is not None or self.weights is not None

    @property
    def has_exact_sums(self) -> bool:
        """Whether products are scaled sums of integer codes; otherwise dequantized operands are multiplied."""
        operands = self.activations, self.weights
        return all(operand is not None and FORMATS[operand.format].integers for operand in operands)

    @property
    def group(self) -> int | None:
        """The least common multiple of both operands' group sizes, in features; None without groups."""
        groups = [operand.group for operand in (self.activations, self.weights) if operand and operand.group]
        return math.lcm(*groups) if groups else None

    @property
    def needs_calibration(self) -> bool:
        """Whether the scheme requires statistics of the inputs, see `outliers.calibrate`."""
        return bool(self.needs or self.remedies_with("calibrated"))

    @property
    def needs(self) -> tuple[str, ...]:
        """The `COSTLY` statistics that the scheme requires of a calibration."""
        needed = {"rows"} if self.searches else set()
        needed = needed.union(*(remedy.kind.needs for remedy in self.remedies))
        return tuple(name for name in COSTLY if name in needed)

    @property
    def searches(self) -> bool:
        """Whether the number of any remedy is searched."""
        return any(remedy.number == SEARCH for remedy in self.remedies)

    @property
    def learns(self) -> bool:
        """Whether any transform is learned with the whole model."""
        return bool(self.remedies_with("learns"))

    @property
    def learning(self) -> "Scheme":
        """The scheme under which a transform is learned.

        It lacks GPTQ and attention in int8. If the scheme has GPTQ and quantizes activations too, weights stay exact
        while learning, as in SpinQuant.
        """
        others = self.attention, *(remedy for remedy in self.remedies if remedy.kind.codes or remedy.name == ROUTER)
        remaining = [remedy for remedy in self.remedies if remedy not in others]
        weights = None if self.remedies_with("codes") and self.activations else self.weights
        return replace(self, name="rotation", weights=weights, remedies=remaining)

    def at(self, role: str | None) -> "Scheme":
        """Return the scheme for projections whose inputs have a role, without the remedies of other roles; None keeps
        all."""
        scheme = self
        if role is not None and any(remedy.roles for remedy in self.remedies):
            remaining = [remedy._replace(roles=()) for remedy in self.remedies if role in (remedy.roles or (role,))]
            scheme = replace(self, remedies=remaining)
        for remedy in scheme.remedies_with("scheme"):
            if not remedy.roles:
                remaining = [other for other in scheme.remedies if other != remedy]
                scheme = remedy.call("scheme", replace(scheme, remedies=remaining), remedy.number)
        return scheme

    @property
    def weight_operand(self) -> tuple:
        """Key of a weight's codes: schemes with equal keys share them."""
        compensated = tuple(remedy.number for remedy in self.remedies_with("codes"))
        searched = (self.description, self.outlier_threshold) if self.searches else ()
        return self.weights, self.arithmetic, self.transforms, compensated, *searched

    @property
    def exact_outliers(self) -> bool:
        """Whether outlier features are multiplied with exact weights where those are in memory."""
        return ARITHMETICS[self.arithmetic].exact_outliers

    @property
    def kernel_arguments(self) -> dict:
        """Keyword arguments of `outlier_kernels.dispatch.linear`."""
        return {"activations": self.activations, "threshold": self.outlier_threshold, "arithmetic": self.arithmetic}

    @property
    def description(self) -> str:
        """Operands, arithmetic and remedies in one line; without names and threshold."""
        operands = f"{self.activations or 'exact'} × {self.weights or 'exact'}"
        return ", ".join([operands, self.arithmetic, *map(str, self.remedies)])


def _place(remedy: Remedy) -> int:
    """Return a remedy's sort key, which puts transforms first, in their own order, then others in the order of
    `REMEDIES`."""
    return -1 if isinstance(remedy.kind, Transform) else [*REMEDIES, remedy.name].index(remedy.name)


_TENSOR, _ROW, _COLUMN = (Quantizer("int8", granularity) for granularity in ("tensor", "row", "column"))
_ZEROPOINT, _LARGE = Quantizer("int8", "tensor", False), "group-128"
_ZEROPOINT_VECTOR = Quantizer("int8", "row", False), Quantizer("int8", "column", False)

_OWN = [
    Scheme("fp32", None, None),
    Scheme("absmax", _TENSOR, _TENSOR),
    Scheme("zeropoint", _ZEROPOINT, _ZEROPOINT),
    Scheme("absmax-row", _ROW, _TENSOR),
    Scheme("absmax-vector", _ROW, _COLUMN),
    Scheme("zeropoint-vector", *_ZEROPOINT_VECTOR),
    Scheme("absmax-row-decomp", _ROW, _TENSOR, ALPHA),
    Scheme("llm.int8", _ROW, _COLUMN, ALPHA),
    Scheme("llm.int8-zeropoint", *_ZEROPOINT_VECTOR, ALPHA),
    Scheme("llm.int8-bnb", _ROW, _COLUMN, ALPHA, "bitsandbytes"),
]


def _in_one_format(granularity: str, *formats: str) -> list[Scheme]:
    return [Scheme(name, *2 * [Quantizer(name, granularity)]) for name in formats]


def _by_row(name: str, activations: str | None, weights: str) -> Scheme:
    """Return a scheme with a scale for each token, and for each output of a weight."""
    return Scheme(name, activations and Quantizer(activations, "row"), Quantizer(weights, "column"))


_OF_FORMATS = [
    _by_row("w8a8", "int8", "int8"),
    _by_row("w6a6", "int6", "int6"),
    _by_row("w4a8", "int8", "int4"),
    _by_row("w4a4", "int4", "int4"),
    _by_row("w8", None, "int8"),
    _by_row("w6", None, "int6"),
    _by_row("w4", None, "int4"),
    *_in_one_format("tensor", "fp8-e4m3", "fp8-e5m2"),
    _by_row("fp8-e4m3-row", "fp8-e4m3", "fp8-e4m3"),
    _by_row("fp8-e5m2-row", "fp8-e5m2", "fp8-e5m2"),
    *_in_one_format(BLOCK, "mxfp8-e4m3", "mxfp8-e5m2", "mxfp6-e2m3", "mxfp6-e3m2", "mxfp4", "mxint8", "nvfp4"),
    *_in_one_format("group-32", "bfp8", "bfp6", "bfp4"),
    # Serving systems, with their group sizes.
    Scheme("qserve", Quantizer("int8", "row"), Quantizer("int4-in-int8", _LARGE)),
    Scheme("fireq", Quantizer("fp8-e4m3", "row"), Quantizer("int4-e4m3", _LARGE)),
    Scheme("comet", Quantizer("int4-int8", _LARGE), Quantizer("int4", _LARGE), remedies=["reorder"]),
    Scheme("flexq", *2 * [Quantizer("int6", _LARGE)], remedies=["activations=8@ffn_out"]),
]
#: Every scheme by its name; users may add their own.
SCHEMES = {scheme.name: scheme for scheme in _OWN + _OF_FORMATS}
BASELINE = "fp32"  # the scheme that quantizes nothing, whatever the dtype
TABLE1 = [  # the paper's rows
    *("fp32", "absmax", "zeropoint", "absmax-row", "absmax-vector", "zeropoint-vector", "absmax-row-decomp"),
    *("llm.int8", "llm.int8-zeropoint"),
]


# Names in other libraries and papers: SAME lists equal schemes, NEAREST the closest one where there is no equal (in
# llama.cpp, blocks have minima of their own).
SAME = {
    "int8": "llm.int8",
    "llm_int8": "llm.int8",
    "load_in_8bit": "llm.int8",
    "smoothquant": "w8a8+smoothing=0.5",
    "gptq": "w4-g128+gptq",
    "awq": "w4-g128+awq",
    "quarot": "w4a4+hadamard",
    "spinquant": "w4a4+rotation",
    "int8wo": "w8",
    "int8dq": "w8a8",
    "int8_weight_only": "w8",
    "int8_dynamic_activation_int8_weight": "w8a8",
    "int4_weight_only": "w4-g128",
    "w8a16": "w8",
    "w4a16": "w4-g128",
    "fp8": "fp8-e4m3",
    "float8": "fp8-e4m3",
    "fp8_dynamic": "fp8-e4m3-row",
}
NEAREST = {"nf4": "w4-g64", "fp4": "w4-g64", "load_in_4bit": "w4-g64"}
NEAREST |= {f"q4_{kind}": "w4-g32" for kind in ("0", "1", "k", "k_s", "k_m")}
NEAREST |= {f"q5_{kind}": "w6-g32" for kind in ("0", "1", "k", "k_s", "k_m")}
NEAREST |= {"q6_k": "w6-g16", "q8_0": "w8-g32"}
DTYPES = {"fp16": "float16", "bf16": "bfloat16", "float16": "float16", "bfloat16": "bfloat16"}


def get_scheme(scheme: str | Scheme, alpha: float | None = None) -> Scheme:
    """Return the scheme of a name, from the table or an installed plugin; a `Scheme` is returned as it is.

    The name is case-insensitive and may be followed by remedies, see `remedied`. If the scheme decomposes, `alpha`
    replaces its threshold.

    Raises:
        UserError: no scheme or remedy has this name, a plugin is broken, `alpha` is not a positive number, or a remedy
            is invalid, see `remedied`.
    """
    if not isinstance(scheme, Scheme):
        written = _in_lower_case(str(scheme))
        _check_base(written)
        base, plus, remedies = (written, "", "") if written in SCHEMES else written.partition("+")
        scheme = remedied(_scheme_named(base), remedies) if plus else _scheme_named(base)
    if alpha is None:
        return scheme
    threshold = check_threshold("alpha", alpha)
    return scheme if scheme.outlier_threshold is None else replace(scheme, outlier_threshold=threshold)


def is_known(scheme: Scheme) -> bool:
    """Return whether `get_scheme` returns the scheme for its name."""
    try:
        return get_scheme(scheme.name) == scheme
    except UserError:
        return False


def _in_lower_case(written: str) -> str:
    """Write the schemes and remedies of a name in lower case; other parts are unchanged."""
    parts = []
    for part in written.split("+"):
        name = re.split("[=@]", part)[0]
        known = name.lower() in SCHEMES | REMEDIES or parse_grouped(name.lower())
        parts.append(name.lower() + part.removeprefix(name) if known and name not in SCHEMES | REMEDIES else part)
    return "+".join(parts)


def _check_base(written: str) -> None:
    """Raise UserError if a remedy is written where the scheme belongs, or the reverse."""
    parts = written.split("+")
    others = [part for part in parts if re.split("[=@]", part)[0] not in REMEDIES]
    if parts[0] not in (*others[:1], *SCHEMES):
        remedies = (part for part in parts if part not in others)
        ordered = "+".join([*(others or ["absmax"]), *remedies])
        raise UserError(f"'{written}': a remedy stands behind its scheme: {ordered}")
    schemes = [part for part in parts if part in SCHEMES or parse_grouped(part)]
    if len(schemes) > 1 and parts[0] in schemes and written not in SCHEMES:
        raise UserError(f"'{written}' has two schemes; expected one, and remedies behind it, as in absmax+hadamard")


def _scheme_named(name: str) -> Scheme:
    if scheme := SCHEMES.get(name) or parse_grouped(name):
        return scheme
    known = SCHEMES | plugin_schemes(Scheme, SCHEMES)
    if name not in known:
        raise _unknown(name, known)
    return known[name]


def _unknown(name: str, known: Iterable[str]) -> UserError:
    """Return the error for an unknown scheme, with the equivalent of a name from another library."""
    plain = name.lower()
    if plain in SAME:
        return UserError(f"unknown scheme '{name}'; here it is {SAME[plain]}")
    if plain in NEAREST:
        return UserError(f"unknown scheme '{name}', which is not implemented; the nearest is {NEAREST[plain]}")
    if plain in DTYPES:
        return UserError(f"unknown scheme '{name}', which is a dtype; expected fp32, with --dtype {DTYPES[plain]}")
    return unknown_name("scheme", name, known, "(docs/schemes.md lists all)")


def parse_grouped(name: str) -> Scheme | None:
    """Return the scheme of a name such as "w4a8-g64", whose number is the features in a group; None for other names.

    Weights with a scale for each output get one for each group instead; operands that have groups get groups of this
    size.
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
    return replace(base, name=name, **operands)


def remedied(scheme: Scheme, written: str) -> Scheme:
    """Return a scheme with remedies added, and named in its name.

    written: `REMEDY[=NUMBER][@ROLE/ROLE]`, several joined by +, in the order in which they act: "hadamard",
    "tokens=20+smoothing=0.75", "hadamard@ffn_out". Remedies are the names in `REMEDIES`.

    Raises:
        UserError: a remedy or role is unknown, a number is missing or invalid for the remedy, a remedy is incompatible
            with the scheme or with another remedy, or remedies are not in the order in which they act.
    """
    remedies = [Remedy.read(part) for part in written.split("+")]
    name = f"{scheme.name}+{written}"
    # Stages: the input itself, its transforms, the transformed input, the weight; remedies without a stage go anywhere.
    stages = {part: REMEDIES.get(re.split("[=@]", part)[0], RemedyKind()).stage for part in name.split("+")[1:]}
    given = [part for part, stage in stages.items() if stage]
    acting = sorted(given, key=lambda part: STAGES.index(stages[part]))
    if acting != given:
        raise UserError(
            f"scheme '{name}' has '{'+'.join(given)}'; expected the order in which remedies act, {', '.join(STAGES)}: "
            f"write '{'+'.join(acting)}'"
        )
    return replace(scheme, name=name, remedies=(*scheme.remedies, *remedies))


def is_builtin(scheme: Scheme) -> bool:
    """Return whether a scheme is defined by its name: it is one of this project's, at any outlier threshold, and not
    one of a plugin or a user."""
    return _is_one_of(scheme, [*_OWN, *_OF_FORMATS, parse_grouped(scheme.name)])


def reports_bits(scheme: Scheme) -> bool:
    """Return whether rows report the bits per value of a scheme.

    The paper's schemes and that of bitsandbytes have 8 bits, and so few scales that these hardly count; all others
    report.
    """
    return scheme.quantizes_projections and not _is_one_of(scheme, _OWN)


def _is_one_of(scheme: Scheme, schemes: Iterable[Scheme | None]) -> bool:
    return any(
        (scheme.name, scheme.description) == (known.name, known.description)
        and (scheme.outlier_threshold is None) == (known.outlier_threshold is None)
        for known in schemes
        if known
    )


def scheme_fields(scheme: Scheme, skip: Collection[str] = (), only: Collection[str] = ()) -> dict:
    """Return the fields of a row that describe its scheme, apart from its name; empty if the scheme quantizes nothing.

    alpha: its threshold. scheme_parts: the components of a scheme that is not this project's own. arithmetic:
    "simulated" if dequantized operands are multiplied. skip, only: as for `outliers.quantize`.
    """
    if not scheme.quantizes:
        return {}
    row = {"alpha": scheme.outlier_threshold, "scheme_parts": None if is_builtin(scheme) else scheme.description}
    row["arithmetic"] = None if scheme.has_exact_sums or not scheme.quantizes_projections else "simulated"
    row |= {"skip": sorted(set(skip)) or None, "only": sorted(set(only)) or None}
    return {field: value for field, value in row.items() if value is not None}


def by_weights(schemes: Iterable[Scheme]) -> list[Scheme]:
    """Return schemes sorted so that those which share weight codes are adjacent, unquantized ones first."""
    schemes = list(schemes)
    operands = list(dict.fromkeys(scheme.weight_operand for scheme in schemes))
    return sorted(schemes, key=lambda scheme: (scheme.quantizes, operands.index(scheme.weight_operand)))


def write_scheme(scheme: Scheme) -> str:
    """Return a scheme as JSON, for `read_scheme`.

    Raises:
        UserError: a remedy is custom, which JSON cannot hold.
    """
    if any(remedy.own for remedy in scheme.remedies):
        raise UserError(f"scheme '{scheme.name}' has a custom transform, which no file can hold; expected REMEDIES")
    return json.dumps(asdict(scheme) | {"remedies": [remedy[:3] for remedy in scheme.remedies]})


def read_scheme(written: str) -> Scheme:
    """Parse a scheme with quantized weights from the JSON of a saved model, of this version or an earlier one.

    Raises:
        ValueError: the text is no such scheme.
    """
    try:
        parts = json.loads(written)
        parts.pop("label", None)  # in models that were saved by earlier versions
        remedies = [Remedy(name, number, tuple(roles)) for name, number, roles in parts.pop("remedies", [])]
        if transform := parts.pop("transform", None):
            remedies += map(Remedy.read, transform.split("+"))
        for name, (number, roles) in EARLIER.items():
            roles = tuple(parts.pop(roles, ()))
            if (value := parts.pop(number, None)) is not None:
                remedies.append(Remedy(name, value, roles))
        if unknown := sorted(set(parts) - {field.name for field in fields(Scheme)}):
            raise ValueError(f"its scheme: unknown part '{unknown[0]}'; quantize the exact model again")
        operands = {name: None if parts[name] is None else Quantizer(**parts[name]) for name in OPERANDS}
        scheme = Scheme(**parts | operands, remedies=remedies)
    except (TypeError, AttributeError, KeyError, ArithmeticError, RecursionError, UserError) as error:
        raise ValueError(f"its scheme: {error}") from None
    if scheme.weights is None:
        raise ValueError(f"its scheme '{scheme.name}' quantizes no weights")
    return scheme
