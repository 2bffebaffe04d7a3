"""Remedies that lower the cost of quantization: each is a row of `REMEDIES`, and a file if it needs more."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Real
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from outlier_kernels.formats import FORMATS, import_location

from outliers.criterion import ALPHA, QUANTIZED, ROUTER, THRESHOLDS
from outliers.errors import UserError, shown, unknown_name

if TYPE_CHECKING:
    import torch

SEARCH = "search"  # instead of a number: each projection gets the number of a grid with the least error
STAGES = ("tokens", "transforms", "clip", "gptq")  # in the order in which remedies act
COSTLY = ("gram", "rows")  # statistics that a calibration keeps only if a scheme needs them
PRODUCTS = ("scores", "values")  # of attention: queries with keys, and probabilities with values
INTEGERS = {format.bits: name for name, format in FORMATS.items() if name == f"int{format.bits}"}


class RemedyNumber(NamedTuple):
    """The number that a remedy takes, such as a strength.

    expected: the valid numbers, in words. fits: whether a number is valid. default: the number if none is given, or
    `SEARCH`; None if it is required. grid: the numbers that a search tries; empty if the number cannot be searched.
    example: a number for messages.
    """

    expected: str
    fits: Callable[[float], bool]
    default: float | str | None = None
    grid: tuple[float, ...] = ()
    example: float | None = None


def _quantizes_no_projection(scheme: object) -> bool:  # a function, because custom remedies are pickled
    return not scheme.quantizes_projections


@dataclass(frozen=True, kw_only=True)
class RemedyKind:
    """A row of the table of remedies.

    number: the number that it takes; None for none. stage: which of `STAGES` it acts in; None if its position does not
    matter. places: roles or products to which it can be restricted. needs: statistics that a calibration has to keep
    for it. calibrated: whether it requires the magnitudes of the inputs. refuses: reasons why a scheme cannot have it,
    each with a predicate on the scheme. learns: whether it is learned with the whole model. name: the name of a custom
    remedy, which is in no table.

    The actions are functions, or their locations as "module:name"; None for no action. around: computes the product of
    hidden states (tokens, features) from its number, the exact product and the quantized one. clips: changes hidden
    states after the transforms, from them, its number and the scheme. codes: returns the codes of a weight, from the
    weight, its codes rounded to nearest, `InputSummary`, the quantizer and its number. scheme: returns another
    scheme, from the one that has the remedy and its number.
    """

    number: RemedyNumber | None = None
    stage: str | None = None
    places: tuple[str, ...] = QUANTIZED
    needs: tuple[str, ...] = ()
    calibrated: bool = False
    refuses: tuple[tuple[str, Callable], ...] = (("where no operand is quantized", _quantizes_no_projection),)
    learns: bool = False
    name: str = ""
    around: Callable | str | None = None
    clips: Callable | str | None = None
    codes: Callable | str | None = None
    scheme: Callable | str | None = None


@dataclass(frozen=True)
class Transform(RemedyKind):
    """A function-preserving change of a layer's features, (X T)(T⁻¹ W) = X W, made before quantization (SmoothQuant:
    Xiao et al., 2023; QuaRot).

    fit: returns the tensor that defines the change, such as a factor for each feature, which the layer keeps; from a
    weight (outputs, features), `InputSummary` if the transform is calibrated, and its number if it takes one.
    hidden_states: returns X T from X (tokens, features) and that tensor. weight: returns the weight times T⁻ᵀ from the
    weight (outputs, features) and that tensor. by_feature: whether each feature maps to one feature, so that the
    largest magnitudes are transformed like values; after other transforms nothing calibrated can follow. calibrated:
    whether it requires the magnitudes of the inputs. name: the name of a custom transform, which is in no table.

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


class InputMagnitudes(Protocol):
    """The magnitudes of the inputs (features,) of a weight."""

    inputs: "torch.Tensor"


def _by_magnitude(weight: "torch.Tensor", magnitudes: InputMagnitudes) -> "torch.Tensor":
    """Return the features by decreasing magnitude of their inputs, int64 (features,)."""
    return magnitudes.inputs.to(weight.device).argsort(descending=True, stable=True)


_IN = __name__ + "."
_SCALED = lambda x, factors: x / factors, lambda weight, factors: weight * factors
_ROTATED = 2 * (_IN + "hadamard:rotate",)
_SORTED = 2 * (lambda matrix, order: matrix[:, order],)  # puts similar features into groups that share a scale
_TWENTIETHS = tuple(number / 20 for number in range(21))
_QUANTILES = (1, 0.9999, 0.999, 0.995, 0.99, 0.98, 0.95, 0.9)
LEAST, MOST = THRESHOLDS

# In the order in which rows list them: transforms, which keep the order of their scheme, then the others.
REMEDIES: dict[str, RemedyKind] = {
    "awq": Transform(
        _IN + "awq:factors",
        *_SCALED,
        calibrated=True,
        by_feature=True,
        number=RemedyNumber("an exponent from 0 to 1", lambda exponent: 0 <= exponent <= 1, SEARCH, _TWENTIETHS[:-1]),
    ),
    "hadamard": Transform(
        _IN + "hadamard:random_rotation",
        *_ROTATED,
        number=RemedyNumber(
            "a seed: a whole number from 0 on", lambda seed: seed == seed // 1 and 0 <= seed < 2**53, 0.0
        ),
    ),
    "reorder": Transform(_by_magnitude, *_SORTED, calibrated=True, by_feature=True),
    "rotation": Transform(
        _IN + "rotation:fit",
        *2 * (_IN + "rotation:multiply",),
        calibrated=True,
        number=RemedyNumber("a number of steps: a whole number from 0 on", lambda steps: steps >= 0 == steps % 1, 32),
        learns=True,
    ),
    "smoothing": Transform(
        _IN + "smoothing:factors",
        *_SCALED,
        calibrated=True,
        by_feature=True,
        number=RemedyNumber("a strength from 0 to 1", lambda strength: 0 <= strength <= 1, 0.5, _TWENTIETHS),
    ),
    "tokens": RemedyKind(
        number=RemedyNumber(f"a positive number, such as {ALPHA}", lambda number: LEAST <= number <= MOST, example=20),
        stage="tokens",
        around=_IN + "tokens:multiply_by_token",
    ),
    "clip": RemedyKind(
        number=RemedyNumber(
            f"a quantile above 0, at most 1, or '{SEARCH}'", lambda share: 0 < share <= 1, None, _QUANTILES, 0.999
        ),
        stage="clip",
        refuses=(("where no input is quantized", lambda scheme: not scheme.activations),),
        clips=_IN + "clip:clipped",
    ),
    "activations": RemedyKind(
        number=RemedyNumber(f"{' or '.join(map(str, INTEGERS))} bits", INTEGERS.__contains__, example=8),
        refuses=(
            (
                "where activations are no integers",
                lambda scheme: not scheme.activations or scheme.activations.format not in INTEGERS.values(),
            ),
        ),
        scheme=lambda scheme, bits: replace(scheme, activations=replace(scheme.activations, format=f"int{bits:g}")),
    ),
    "gptq": RemedyKind(
        number=RemedyNumber("a damping above 0, at most 1, such as 0.01", lambda damping: 0 < damping <= 1, 0.01),
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
    ROUTER: RemedyKind(places=()),
    "attention": RemedyKind(
        number=RemedyNumber(
            "the share of its products that stays in 16 bits, from 0 on and below 1", lambda share: 0 <= share < 1, 0.0
        ),
        places=PRODUCTS,
        refuses=(),
    ),
}
_find = cache(import_location)


class Remedy(NamedTuple):
    """A remedy of a scheme, written `NAME[=NUMBER][@ROLE/ROLE]`.

    number: None if it has none, or `SEARCH`. roles: those of `RemedyKind.places`, such as the roles of inputs of
    projections, to which it is restricted; empty for all. own: the definition of a custom remedy, which is in no table.
    """

    name: str
    number: float | str | None = None
    roles: tuple[str, ...] = ()
    own: RemedyKind | None = None

    @classmethod
    def read(cls, written: str) -> "Remedy":
        """Parse a remedy.

        Raises:
            UserError: the remedy or a role is unknown, or the number is not one.
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
    def of(cls, given: "str | Remedy | RemedyKind") -> "Remedy":
        """Return a valid remedy, with its default number filled in, from text, a remedy or a custom definition.

        Raises:
            UserError: as `read`; the number is missing, invalid, or not taken; a custom definition has no name.
        """
        if isinstance(given, RemedyKind):
            if not isinstance(given.name, str) or not given.name:
                raise UserError("a custom transform has no name; expected Transform(…, name='mine'), which rows say")
            given = cls(given.name, own=given)
        remedy = cls.read(given) if isinstance(given, str) else given
        if not isinstance(remedy, Remedy):
            raise UserError(f"{shown(given)} as a remedy; expected text such as 'clip=0.999', or a Transform")
        name, number, takes = remedy.name, remedy.number, remedy.kind.number
        if takes is None:
            if number is not None:
                without = remedy._replace(number=None)
                raise UserError(f"'{name}' takes no number, got {number_text(number)}; write '{without}'")
            return remedy._in_order()
        number = takes.default if number is None else number
        if number is None:
            example = f"{name}={takes.example:g}" + (f" or {name}={SEARCH}" if takes.grid else "")
            raise UserError(f"remedy '{remedy}' has no number; expected one, as in {example}")
        if not (takes.grid if number == SEARCH else isinstance(number, Real) and takes.fits(number)):
            raise UserError(f"the number of '{remedy}' is {number_text(number)}; expected {takes.expected}")
        return remedy._replace(number=number)._in_order()

    def _in_order(self) -> "Remedy":
        """Return the remedy with its roles in the order of their table; raise UserError if one is unknown."""
        known = self.kind.places
        for role in self.roles:
            if role not in known:
                raise unknown_name("role", role, known)
        return self._replace(roles=tuple(role for role in known if role in self.roles))

    def __str__(self) -> str:
        number = "" if self.number is None else f"={number_text(self.number)}"
        return self.name + number + (f"@{'/'.join(self.roles)}" if self.roles else "")

    @property
    def kind(self) -> RemedyKind:
        """The definition of the remedy; raises UserError if there is none."""
        if self.own is None and self.name not in REMEDIES:
            raise unknown_name("remedy", self.name, REMEDIES)
        return self.own or REMEDIES[self.name]

    def call(self, action: str, *given, **named) -> Any:
        """Call the function that a field of `RemedyKind`, such as "fit", names, with these arguments."""
        return _find(getattr(self.kind, action))(*given, **named)

    def fit(self, weight: "torch.Tensor", magnitudes: InputMagnitudes) -> "torch.Tensor":
        """Return the tensor that defines the transform of a weight, see `outliers.Transform`."""
        given = [magnitudes] if self.kind.calibrated else []
        return self.call("fit", weight, *given, *([] if self.number is None else [self.number]))

    def applies_at(self, roles: tuple[str, ...]) -> bool:
        """Return whether the remedy applies at any of some roles; no roles stand for all."""
        return not (self.roles and roles) or not set(self.roles).isdisjoint(roles)


def number_text(number: float | str) -> str:
    """Return a number as it is written in the name of a scheme."""
    return number if isinstance(number, str) else f"{number:.12g}"
