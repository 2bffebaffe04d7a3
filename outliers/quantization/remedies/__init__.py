"""Remedies that lower the cost of quantization: a row of `REMEDIES` and a file each."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from numbers import Real
from typing import Any, NamedTuple

from outlier_kernels.formats import FORMATS, find

from outliers.criterion import ALPHA, QUANTIZED, THRESHOLDS
from outliers.errors import UserError, shown, unknown_name

SEARCH = "search"  # in the place of a number: each projection has the one of a grid with the least error
STAGES = ("tokens", "transforms", "clip", "gptq")  # in the order in which remedies act
COSTLY = ("gram", "rows")  # statistics that a calibration keeps where a scheme needs them
PRODUCTS = ("scores", "values")  # what attention multiplies: queries with keys, and probabilities with values
INTEGERS = {format.bits: name for name, format in FORMATS.items() if name == f"int{format.bits}"}


class Number(NamedTuple):
    """The number that a remedy takes, such as a strength.

    expected: which ones it may be, in words. fits: whether one is among them. default: the one that it has where none
    is said, or `SEARCH`; None where one has to be, such as the example. grid: those that a search tries; none where
    there is nothing to search.
    """

    expected: str
    fits: Callable[[float], bool]
    default: float | str | None = None
    grid: tuple[float, ...] = ()
    example: float | None = None


def _no_projection(scheme: object) -> bool:  # which can be pickled, as one's own remedies are
    return not scheme.quantizes_projections


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A row of the table of remedies.

    number: that it takes; None for none. stage: which of `STAGES` it acts in; None for one with its own place. places:
    where it may be asked to act alone. needs: statistics that a calibration has to keep for it. calibrated: whether it
    has to know the magnitudes of the inputs. refuses: reasons why a scheme cannot have it, and whether they are so.
    learns: whether it learns with the whole model what it is. name: of one's own, which is in no table.

    What it does, a function or where it is, "module:name"; None where it does nothing. around: the product of hidden
    states (tokens, features), with its number, the exact product and the quantized one. clips: hidden states, behind
    the transforms, from them, its number and the scheme. codes: those of a weight, from it, those rounded to nearest,
    `Magnitudes`, the quantizer and its number. scheme: another scheme, from the one that has it, and its number.
    """

    number: Number | None = None
    stage: str | None = None
    places: tuple[str, ...] = QUANTIZED
    needs: tuple[str, ...] = ()
    calibrated: bool = False
    refuses: tuple[tuple[str, Callable], ...] = (("where no operand is quantized", _no_projection),)
    learns: bool = False
    name: str = ""
    around: Callable | str | None = None
    clips: Callable | str | None = None
    codes: Callable | str | None = None
    scheme: Callable | str | None = None


@dataclass(frozen=True)
class Transform(Kind):
    """A function-preserving change of a layer's features, (X T)(T⁻¹ W) = X W, made before anything is quantized
    (SmoothQuant: Xiao et al., 2023; QuaRot).

    fit: of a weight (outputs, features), then of `Magnitudes` where the transform is calibrated, then of its number
    where it takes one, the tensor that says which change it is, such as a factor for each feature; a layer keeps it.
    hidden_states: of X (tokens, features) and that tensor X T. weight: of a weight (outputs, features) and that tensor
    the weight times T⁻ᵀ. by_feature: whether each feature becomes one feature, so that the largest magnitudes become
    what the values become; after others nothing calibrated can follow. calibrated: whether it has to know the
    magnitudes of the inputs. name: of one's own, which is in no table.

    Example:
        >>> import torch
        >>> flip = outliers.Transform(
        ...     fit=lambda weight: -torch.ones(weight.shape[1]),
        ...     hidden_states=lambda x, signs: x * signs,
        ...     weight=lambda weight, signs: weight * signs,
        ...     name="flip",
        ... )
        >>> row, column = outliers.Quantizer("int8", "row"), outliers.Quantizer("int8", "column")
        >>> flipped = outliers.quantize(model, outliers.Scheme("mine", row, column, remedies=[flip]))
    """

    fit: Callable | str
    hidden_states: Callable | str
    weight: Callable | str
    by_feature: bool = False
    stage: str = field(default="transforms", kw_only=True)


_IN = __name__ + "."
_SCALED = lambda x, factors: x / factors, lambda weight, factors: weight * factors
_ROTATED = 2 * (_IN + "hadamard:rotate",)
_SORTED = 2 * (lambda matrix, order: matrix[:, order],)
_TWENTIETHS = tuple(number / 20 for number in range(21))
_QUANTILES = (1, 0.9999, 0.999, 0.995, 0.99, 0.98, 0.95, 0.9)
LEAST, MOST = THRESHOLDS

# By name, in the order in which rows say them: transforms, as they follow each other in a scheme, then the others.
REMEDIES: dict[str, Kind] = {
    "awq": Transform(
        _IN + "awq:factors",
        *_SCALED,
        calibrated=True,
        by_feature=True,
        number=Number("an exponent from 0 to 1", lambda exponent: 0 <= exponent <= 1, SEARCH, _TWENTIETHS[:-1]),
    ),
    "hadamard": Transform(
        _IN + "hadamard:drawn",
        *_ROTATED,
        number=Number("a seed: a whole number from 0 on", lambda seed: seed == seed // 1 and 0 <= seed < 2**53, 0.0),
    ),
    "reorder": Transform(_IN + "reorder:order", *_SORTED, calibrated=True, by_feature=True),
    "rotation": Transform(
        _IN + "rotation:fit",
        *2 * (_IN + "rotation:turn",),
        calibrated=True,
        number=Number("a number of steps: a whole number from 0 on", lambda steps: steps >= 0 == steps % 1, 32),
        learns=True,
    ),
    "smoothing": Transform(
        _IN + "smoothing:factors",
        *_SCALED,
        calibrated=True,
        by_feature=True,
        number=Number("a strength from 0 to 1", lambda strength: 0 <= strength <= 1, 0.5, _TWENTIETHS),
    ),
    "tokens": Kind(
        number=Number(f"a positive number, such as {ALPHA}", lambda number: LEAST <= number <= MOST, example=20),
        stage="tokens",
        around=_IN + "tokens:multiply_by_token",
    ),
    "clip": Kind(
        number=Number(
            f"a quantile above 0, at most 1, or '{SEARCH}'", lambda share: 0 < share <= 1, None, _QUANTILES, 0.999
        ),
        stage="clip",
        refuses=(("where no input is quantized", lambda scheme: not scheme.activations),),
        clips=_IN + "clip:clipped",
    ),
    "activations": Kind(
        number=Number(f"{' or '.join(map(str, INTEGERS))} bits", INTEGERS.__contains__, example=8),
        refuses=(
            (
                "where activations are no integers",
                lambda scheme: not scheme.activations or scheme.activations.format not in INTEGERS.values(),
            ),
        ),
        scheme=_IN + "activations:in_bits",
    ),
    "gptq": Kind(
        number=Number("a damping above 0, at most 1, such as 0.01", lambda damping: 0 < damping <= 1, 0.01),
        stage="gptq",
        needs=("gram",),
        refuses=(
            ("where no weight is quantized", lambda scheme: not scheme.weights),
            ("with weights in {weights.format}", lambda scheme: FORMATS[scheme.weights.format].rounding is None),
            ("with arithmetic '{arithmetic}'", lambda scheme: scheme.arithmetic != "exact"),
            (
                "with outlier features, without which weights are rounded anew",
                lambda scheme: scheme.outlier_threshold is not None,
            ),
        ),
        codes=_IN + "gptq:compensated",
    ),
    "attention": Kind(
        number=Number(
            "the share of its products that stays in 16 bits, from 0 on and below 1", lambda share: 0 <= share < 1, 0.0
        ),
        places=PRODUCTS,
        refuses=(),
    ),
}
_find = cache(find)


class Remedy(NamedTuple):
    """A remedy as a scheme has it, written `NAME[=NUMBER][@ROLE/ROLE]`.

    number: None where none is said, or `SEARCH`. roles: of the inputs of the projections where it applies, or other
    places of its kind; none for all. own: its row of the table, where it is in none.
    """

    name: str
    number: float | str | None = None
    roles: tuple[str, ...] = ()
    own: Kind | None = None

    @classmethod
    def read(cls, written: str) -> "Remedy":
        """The remedy that was written.

        Raises:
            UserError: it is unknown, its number is none, or a role is unknown.
        """
        rest, at, roles = written.partition("@")
        name, equals, number = rest.partition("=")
        try:
            value = (number if number == SEARCH else float(number)) if equals else None
        except ValueError:
            value = math.nan
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"remedy '{written}' has {shown(number)} as its number; expected one, as in tokens=20")
        return cls(name, value, tuple(roles.split("/")) if at else ())._in_order()

    @classmethod
    def of(cls, given: "str | Remedy | Kind") -> "Remedy":
        """A remedy as it is written, or of one's own, with the number that it has where none is said.

        Raises:
            UserError: as `read`; it takes no number, needs one, or another one; one's own has no name.
        """
        if isinstance(given, Kind):
            if not isinstance(given.name, str) or not given.name:
                raise UserError("a custom transform has no name; expected Transform(…, name='mine'), which rows say")
            given = cls(given.name, own=given)
        remedy = cls.read(given) if isinstance(given, str) else given
        if not isinstance(remedy, Remedy):
            raise UserError(f"{shown(given)} as a remedy; expected text such as 'clip=0.999', or a Transform")
        name, number, takes = remedy.name, remedy.number, remedy.kind.number
        if takes is None:
            if number is not None:
                raise UserError(f"'{name}' takes no number, got {said(number)}; write '{remedy._replace(number=None)}'")
            return remedy._in_order()
        number = takes.default if number is None else number
        if number is None:
            example = f"{name}={takes.example:g}" + (f" or {name}={SEARCH}" if takes.grid else "")
            raise UserError(f"remedy '{remedy}' has no number; expected one, as in {example}")
        if not (takes.grid if number == SEARCH else isinstance(number, Real) and takes.fits(number)):
            raise UserError(f"the number of '{remedy}' is {said(number)}; expected {takes.expected}")
        return remedy._replace(number=number)._in_order()

    def _in_order(self) -> "Remedy":
        """The same with its roles in the order of their table; raise UserError if one is unknown."""
        known = self.kind.places
        for role in self.roles:
            if role not in known:
                raise unknown_name("role", role, known)
        return self._replace(roles=tuple(role for role in known if role in self.roles))

    def __str__(self) -> str:
        number = "" if self.number is None else f"={said(self.number)}"
        return self.name + number + (f"@{'/'.join(self.roles)}" if self.roles else "")

    @property
    def kind(self) -> Kind:
        """Its row of the table; raise UserError where there is none."""
        if self.own is None and self.name not in REMEDIES:
            raise unknown_name("remedy", self.name, REMEDIES)
        return self.own or REMEDIES[self.name]

    def do(self, what: str, *given, **named) -> Any:
        """The result of what its row does, see `Kind`."""
        return _find(getattr(self.kind, what))(*given, **named)

    def fit(self, weight: Any, magnitudes: Any) -> Any:
        """The result of its function `fit` for a weight, see `outliers.Transform`."""
        given = [magnitudes] if self.kind.calibrated else []
        return self.do("fit", weight, *given, *([] if self.number is None else [self.number]))

    def applies_at(self, roles: tuple[str, ...]) -> bool:
        """Whether it applies at one of some roles; none stands for all."""
        return not (self.roles and roles) or not set(self.roles).isdisjoint(roles)


def said(number: float | str) -> str:
    """A number as the name of a scheme has it."""
    return number if isinstance(number, str) else f"{number:.12g}"
