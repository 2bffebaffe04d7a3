"""Function-preserving changes of the features: (X T)(T⁻¹ W) = X W, made before anything is quantized.

A transform is one file in `outliers/quantization/remedies`, which has its name.
"""

import math
import operator
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from outlier_kernels.formats import find

from outliers.criterion import ROLES
from outliers.errors import UserError, shown, unknown_name
from outliers.quantization import remedies

if TYPE_CHECKING:
    import torch

MOST = 3  # transforms that follow each other in a layer
SEARCH = "search"  # in the place of a number: each projection has the one of a grid with the least error
SAMPLE = 512  # rows of a text that a calibration keeps, at least


class Number(NamedTuple):
    """The number that a transform takes, such as a strength.

    default: the one that it has where none is said, or `SEARCH`. expected: which ones it may be, in words. fits:
    whether one is among them. grid: those that a search tries; none where there is nothing to search.
    """

    default: float | str
    expected: str
    fits: Callable[[float], bool]
    grid: tuple[float, ...] = ()


class Magnitudes(NamedTuple):
    """Statistics of a calibration of projections that share an input, float32.

    inputs: the largest |x| of each feature (features,). weights: the largest |w| that it is multiplied with in any of
    them. sums: of |x| over all tokens. gram: XᵀX (features, features). rows: some of the inputs (tokens, features),
    evenly spaced. These two are None unless a scheme needs them, and the first three of features that are mixed.
    learned: of another shape, what a transform has learned for them with the whole model, if it did.
    """

    inputs: "torch.Tensor | None" = None
    weights: "torch.Tensor | None" = None
    sums: "torch.Tensor | None" = None
    gram: "torch.Tensor | None" = None
    rows: "torch.Tensor | None" = None
    learned: "torch.Tensor | None" = None

    def merge(self, other: "Magnitudes") -> "Magnitudes":
        """Those of two texts; None of what is known of one alone, or learned."""
        both = {name: (getattr(self, name), getattr(other, name)) for name in STATISTICS}
        known = {name: pair for name, pair in both.items() if not any(value is None for value in pair)}
        merged = {name: STATISTICS[name].merge(*pair) for name, pair in known.items()}
        return Magnitudes(weights=self.weights.maximum(other.weights), **merged)

    def under(self, transform: "Transform", fitted: "torch.Tensor") -> "Magnitudes":
        """Those behind a transform; None of features that it mixes."""

        def change(rows: "torch.Tensor") -> "torch.Tensor":
            return transform.hidden_states(rows.to(fitted.device), fitted)

        changed = {
            name: statistic.under(getattr(self, name), change)
            for name, statistic in STATISTICS.items()
            if getattr(self, name) is not None and (transform.by_feature or not statistic.by_feature)
        }
        if transform.by_feature:
            changed["weights"] = transform.weight(self.weights[None].to(fitted.device), fitted)[0].abs()
        return Magnitudes(learned=self.learned, **changed)


class Statistic(NamedTuple):
    """A statistic of a calibration on the inputs of projections.

    of: the inputs of a block, float32 (tokens, features), and how many blocks there are. merge: that of two texts.
    under: that of changed inputs, from the function that changes rows. by_feature: whether features must not be mixed.
    """

    of: Callable
    merge: Callable
    under: Callable
    by_feature: bool = False


def _sample(x: "torch.Tensor", blocks: int) -> "torch.Tensor":
    """Rows of a block, evenly spaced and the first among them, where massive activations stand."""
    count = min(len(x), math.ceil(SAMPLE / blocks))
    return x[[number * len(x) // count for number in range(count)]]


def _joined(*rows: "torch.Tensor") -> "torch.Tensor":
    import torch  # late, as wherever a scheme is only named

    return torch.cat(rows)


def _of_features(values: "torch.Tensor", change: Callable) -> "torch.Tensor":
    return change(values[None])[0].abs()


STATISTICS = {
    "inputs": Statistic(lambda x, _: x.abs().amax(0), lambda a, b: a.maximum(b), _of_features, True),
    "sums": Statistic(lambda x, _: x.abs().sum(0), operator.add, _of_features, True),
    "gram": Statistic(lambda x, _: x.T @ x, operator.add, lambda gram, change: change(change(gram).T)),
    "rows": Statistic(_sample, _joined, lambda rows, change: change(rows)),
}
COSTLY = ("gram", "rows")  # found where a scheme needs them


class Transform(NamedTuple):
    """A change of a layer's features, and its inverse in the weight (SmoothQuant: Xiao et al., 2023; QuaRot).

    fit: of a weight (outputs, features), then of `Magnitudes` where the transform is calibrated, then of its number
    where it takes one, the tensor that says which change it is, such as a factor for each feature; a layer keeps it.
    hidden_states: of X (tokens, features) and that tensor X T. weight: of a weight (outputs, features) and that tensor
    the weight times T⁻ᵀ. calibrated: whether it has to know the magnitudes of the inputs. number: the number that it
    takes. by_feature: whether each feature becomes one feature, so that the largest magnitudes become what the values
    become; after others nothing calibrated can follow. label: what tables call a scheme with it. name: of one's own,
    which is in no table. learns: whether it learns with the whole model what it is.

    Example:
        >>> import torch
        >>> flip = outliers.Transform(
        ...     fit=lambda weight: -torch.ones(weight.shape[1]),
        ...     hidden_states=lambda x, signs: x * signs,
        ...     weight=lambda weight, signs: weight * signs,
        ...     name="flip",
        ... )
        >>> row, column = outliers.Quantizer("int8", "row"), outliers.Quantizer("int8", "column")
        >>> flipped = outliers.quantize(model, outliers.Scheme("mine", row, column, transform=flip))
    """

    fit: Callable
    hidden_states: Callable
    weight: Callable
    calibrated: bool = False
    number: Number | None = None
    by_feature: bool = False
    label: str = ""
    name: str = ""
    learns: bool = False


class Setting(NamedTuple):
    """A remedy that is no transform: the fields of a scheme that have its number and its roles, what labels say of it,
    a number that it may have, the one that it has where none is said, with a label of its own, and those that a search
    tries."""

    field: str
    roles: str
    label: str
    example: float
    default: float | None = None
    plain: str = ""
    grid: tuple[float, ...] = ()


SETTINGS = {
    "tokens": Setting("token_threshold", "token_roles", "tokens from {:g} on exact", 20),
    "clip": Setting(
        "clip", "clip_roles", "clipped at {:g}", 0.999, grid=(1, 0.9999, 0.999, 0.995, 0.99, 0.98, 0.95, 0.9)
    ),
    "activations": Setting("activation_bits", "activation_roles", "activations in {:g} bits", 8),
    "gptq": Setting("gptq", "gptq_roles", "GPTQ damped by {:g}", 0.01, 0.01, "GPTQ"),
    "attention": Setting(
        "attention", "attention_products", "attention in int8 but for {percent:g} %", 0.02, 0.0, "attention in int8"
    ),
}


# By name: itself, or where it is, "module:name".
TRANSFORMS: dict[str, str | Transform] = {
    file.name: f"{remedies.__name__}.{file.name}:{file.name.upper()}"
    for file in pkgutil.iter_modules(remedies.__path__)
    if file.name not in SETTINGS
}


# What attention multiplies: queries with keys, and probabilities with values.
PRODUCTS = ("scores", "values")
PLACES = {"attention": PRODUCTS}  # where remedies apply that are not for inputs of projections


class Remedy(NamedTuple):
    """A remedy as a name says it, `NAME[=NUMBER][@ROLE/ROLE]`.

    number: None where none is said, or `SEARCH`. roles: of the inputs of the projections where it applies, or what
    `PLACES` has for it; none for all.
    """

    name: str
    number: float | str | None = None
    roles: tuple[str, ...] = ()

    @classmethod
    def read(cls, written: str) -> "Remedy":
        """The remedy that was written.

        Raises:
            UserError: its number is none, or a role is unknown.
        """
        rest, at, roles = written.partition("@")
        name, equals, number = rest.partition("=")
        try:
            value = (number if number == SEARCH else float(number)) if equals else None
        except ValueError:
            value = math.nan
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"remedy '{written}' has {shown(number)} as its number; expected one, as in tokens=20")
        return cls(name, value, checked_roles(roles.split("/"), name) if at else ())

    def __str__(self) -> str:
        number = "" if self.number is None else f"={written(self.number)}"
        roles = f"@{'/'.join(self.roles)}" if self.roles else ""
        return self.name + number + roles


def written(number: float | str) -> str:
    """A number as the name of a scheme has it."""
    return number if isinstance(number, str) else f"{number:.12g}"


class Applied(NamedTuple):
    """A transform as a scheme has it, with its number; roles as in `Remedy`."""

    name: str
    transform: Transform
    number: float | str | None
    roles: tuple[str, ...]

    @property
    def remedy(self) -> Remedy:
        """As a name says it."""
        return Remedy(self.name, self.number, self.roles)

    def fit(self, weight: "torch.Tensor", magnitudes: Magnitudes | None) -> "torch.Tensor":
        """The result of its function `fit` for a weight, see `Transform`."""
        given = [magnitudes] if self.transform.calibrated else []
        return self.transform.fit(weight, *given, *([] if self.number is None else [self.number]))

    def applies_at(self, roles: tuple[str, ...]) -> bool:
        """Whether it applies at one of some roles; none stands for all."""
        return not (self.roles and roles) or not set(self.roles).isdisjoint(roles)


def checked_roles(roles: list[str] | tuple[str, ...], remedy: str) -> tuple[str, ...]:
    """The roles where a remedy applies in the order of their table; raise UserError if one is unknown."""
    known = PLACES.get(remedy, ROLES)
    for role in roles:
        if role not in known:
            raise unknown_name("role", role, known)
    return tuple(role for role in known if role in roles)


def find_transform(name: str) -> Transform:
    """The transform of a row of the table.

    Raises:
        UserError: there is no such row.
    """
    if name not in TRANSFORMS:
        raise unknown_name("transform", name, TRANSFORMS)
    return find(TRANSFORMS[name])


def transforms_of(written: str | Transform | None) -> tuple[Applied, ...]:
    """The transforms that a scheme has, in the order in which they change the features.

    written: `NAME[=NUMBER][@ROLE/ROLE]`, several joined by +; or a transform of one's own.

    Raises:
        UserError: a transform or role is unknown, a number is not one that the transform takes, or a transform cannot
            follow another one.
    """
    if written is None:
        return ()
    if isinstance(written, Transform):
        if not isinstance(written.name, str) or not written.name:
            raise UserError("a custom transform has no name; expected Transform(…, name='mine'), which rows say")
        return (Applied(written.name, written, written.number and written.number.default, ()),)
    transforms = tuple(_applied(Remedy.read(part)) for part in written.split("+"))
    if len(transforms) > MOST:
        raise UserError(f"{len(transforms)} transforms in '{written}'; expected at most {MOST}")
    for place, applied in enumerate(transforms):
        before = [other for other in transforms[:place] if other.applies_at(applied.roles)]
        if applied.name in (other.name for other in before):
            raise UserError(f"'{applied.name}' is twice in '{written}'; expected each transform once at a role")
        mixing = [other.name for other in before if not other.transform.by_feature]
        if applied.transform.calibrated and mixing:
            raise UserError(
                f"'{applied.name}' comes after '{mixing[0]}', whose outputs no calibration has seen; expected it before"
            )
    return transforms


def _applied(remedy: Remedy) -> Applied:
    """The transform of a remedy with the number that was said, or its own."""
    transform = find_transform(remedy.name)
    number, takes = remedy.number, transform.number
    if takes is None and number is not None:
        raise UserError(
            f"'{remedy.name}' takes no number, got {written(number)}; write '{remedy._replace(number=None)}'"
        )
    if takes is not None and number is None:
        number = takes.default
    if takes is not None and not (takes.grid if number == SEARCH else takes.fits(number)):
        raise UserError(f"the number of '{remedy}' is {written(number)}; expected {takes.expected}")
    return Applied(remedy.name, transform, number, remedy.roles)
