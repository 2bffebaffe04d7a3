"""Plan files: which projections of a model stay exact under a scheme, and which get another scheme."""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from outliers.errors import UserError, mistake_in, reason_of, unknown_name
from outliers.files import read_whole, write_whole

MOST_BYTES = 1_000_000  # largest size of a plan file
MARK = "@"  # prefix of a plan file in a list of places
HEADER = "# Which projections stay exact, or get a better scheme (python -m outliers.plan): --skip @this-file\n"


class Plan(BaseModel):
    """An assignment of a scheme, or none, to each projection of a model.

    model, weights_hash: the model it was made for. scheme: the name of the scheme of all other projections. exact: full
    paths of unquantized projections. instead: paths of projections with another scheme, by its name. projections:
    number of projections of the model. measured: text and results of the measurement behind the plan; perplexities have
    no unit, costs are relative.

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
        """The plan as YAML, for `read_plan`."""
        return HEADER + yaml.safe_dump(self.model_dump(), sort_keys=False, width=120, allow_unicode=True)

    def write(self, path: str | Path) -> None:
        """Write the plan as YAML, for `read_plan`; raise UserError if the file cannot be written."""
        write_whole(Path(path), self.text)

    def check(self, paths: Iterable[str]) -> None:
        """Raise UserError unless these are the paths of the projections of the plan's model."""
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
    """Yield places to skip, with `@FILE` replaced by the exact projections of a plan file.

    Raises:
        UserError: a file has no plan, or one that assigns several schemes, which a list of places cannot express.
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
