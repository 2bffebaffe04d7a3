"""A plan as a file: which projections of a model stay exact under a scheme, and which get a better one."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outliers.errors import UserError, mistake_in, reason_of, unknown_name
from outliers.files import read_whole, write_whole

MOST_BYTES = 1_000_000  # of a file
MARK = "@"  # before the file of a plan, where places are expected
HEADER = "# Which projections stay exact, or get a better scheme (python -m outliers.plan): --skip @this-file\n"


class Plan(BaseModel):
    """An assignment of a scheme, or none, to each projection of a model.

    model, weights_hash: that it was made for. scheme: the name of the scheme of all other projections. exact: full
    paths of those that no scheme quantizes. instead: paths by the name of the scheme that they get in its place.
    measured: on which text and with what result, perplexities without a unit and costs as shares.

    Example:
        >>> plan = outliers.Plan(model="mine", scheme="absmax", exact=["transformer.h.0.mlp.c_proj"], projections=8)
        >>> quantized = outliers.quantize(model, plan.scheme, skip=plan.exact)
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    model: str
    weights_hash: str | None = None
    scheme: str
    exact: list[str] = []
    instead: dict[str, list[str]] = {}
    projections: int = Field(ge=1)
    measured: dict[str, str | int | float | bool | None] = {}

    @property
    def text(self) -> str:
        """It as YAML, for `read_plan`."""
        return HEADER + yaml.safe_dump(self.model_dump(), sort_keys=False, width=120, allow_unicode=True)

    def write(self, path: str | Path) -> None:
        """Write it as YAML, for `read_plan`; raise UserError where it cannot be written."""
        write_whole(Path(path), self.text)

    def check(self, paths: Iterable[str]) -> None:
        """Raise UserError unless these are the paths of the projections of its model."""
        known = list(paths)
        for path in chain(self.exact, *self.instead.values()):
            if path not in known:
                raise unknown_name("projection", path, known, f"(the plan is of '{self.model}', another model)")
        if len(known) != self.projections:
            raise UserError(
                f"the plan is of '{self.model}' with {self.projections} projections, and this model has {len(known)}; "
                "expected the model that it was made for"
            )


def read_plan(path: str | Path) -> Plan:
    """Return the plan in a file that `Plan.write` wrote.

    Args:
        path: of the file, YAML.

    Raises:
        UserError: there is no such file, or it holds no plan.

    Example:
        >>> outliers.Plan(model="mine", scheme="absmax", projections=8).write("plan.yaml")
        >>> outliers.read_plan("plan.yaml").scheme
        'absmax'
    """
    try:
        content = read_whole(Path(path), MOST_BYTES).decode()
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(content, yaml.SafeLoader)):
            raise ValueError("it refers to itself by an alias")
        return Plan.model_validate(yaml.safe_load(content))
    except ValidationError as error:
        wrong = mistake_in(error.errors(include_url=False)[0])
        raise UserError(f"'{path}' is not a plan ({wrong}); {_EXPECTED}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"cannot read the plan '{path}' ({reason_of(error, 200)}); {_EXPECTED}") from None


_EXPECTED = "expected what `python -m outliers.plan` writes"


def expanded(places: Iterable[str]) -> Iterator[str]:
    """Places to skip, with those of a plan in the place of `@FILE`.

    Raises:
        UserError: a file holds no plan, or one with schemes in the place of another, which skips cannot say.
    """
    for place in places:
        if not place.startswith(MARK):
            yield place
            continue
        plan = read_plan(place.removeprefix(MARK))
        if plan.instead:
            raise UserError(
                f"the plan '{place.removeprefix(MARK)}' has {', '.join(plan.instead)} in the place of {plan.scheme}, "
                f"which --skip cannot say; use it as a variant: --variant {place}"
            )
        yield from plan.exact
