"""What an experiment file holds."""

from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    ValidationError,
)

from outliers.criterion import ALPHA
from outliers.errors import UserError, unknown_name
from outliers.quantization.schemes import TABLE1

# A list may be given as "a,b", as on the command line; repeated entries count once.
Split = BeforeValidator(lambda value: [part for part in value.split(",") if part] if isinstance(value, str) else value)
Once = AfterValidator(lambda entries: list(dict.fromkeys(entries)))
Names = Annotated[list[str], Split, Field(min_length=1), Once]
Numbers = Annotated[list[int], Split, Field(min_length=1), Once]


class Settings(BaseModel):
    """What every measurement needs to know beside its model.

    block: tokens a block (T). blocks: how many (N). alpha: from which magnitude on a value is an outlier.
    """

    model_config = ConfigDict(extra="forbid")

    text: str = "sample"
    block: Annotated[int, Field(ge=2)] = 256
    blocks: PositiveInt = 32
    alpha: PositiveFloat = ALPHA
    device: str = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"


class Experiment(Settings):
    """A sweep: every model under every scheme on one text."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "sweep"
    models: Names
    schemes: Names = TABLE1
    revision: str | None = None

    @property
    def folder(self) -> Path:
        """Where its results go unless the user says otherwise."""
        return Path("results") / self.name


Kind = TypeVar("Kind", bound=Settings)


class OneModel(Settings):
    """A trace of one model."""

    model: str
    revision: str | None = None

    @property
    def folder(self) -> Path:
        """Where its results go unless the user says otherwise."""
        return Path("results") / "trace" / full_name(self.model, self.revision)


class Ablation(OneModel):
    """An ablation of one model; features: None for the outlier features that a trace finds.

    methods, where, controls and seed are the arguments of `outliers.ablate`.
    """

    features: Numbers | None = None
    methods: Names = ["zero"]
    where: Names = ["attn_in"]
    controls: int = 10
    seed: int = 0

    @property
    def folder(self) -> Path:
        """Where its results go unless the user says otherwise."""
        return Path("results") / "ablate" / full_name(self.model, self.revision)


class Emergence(Settings):
    """Outlier features along a family of models, or along revisions of one."""

    models: Names
    revisions: Names | None = None

    @property
    def folder(self) -> Path:
        """Where its results go unless the user says otherwise."""
        return Path("results") / "emergence"


def short_name(model: str) -> str:
    """A model's name without where it comes from."""
    return model.rstrip("/").rpartition("/")[2]


def full_name(model: str, revision: str | None) -> str:
    """The short name of a model with its revision, if it has one."""
    return short_name(model) if revision is None else f"{short_name(model)}@{revision}"


def experiment_files() -> dict[str, Path]:
    """Name to file of the experiments that come with the project: inside the package when it was installed from a
    wheel, beside it in a clone."""
    package = Path(__file__).parent.parent
    folders = (package / "experiments", package.parent / "experiments")
    return {file.stem: file for folder in folders for file in sorted(folder.glob("*.yaml"))}


def read_experiment(name: str) -> dict:
    """Read an experiment file, by path or by the name of one that comes with the project, as a mapping.

    Raises:
        UserError: there is no such file, or it is not a YAML mapping.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        if name not in experiment_files():
            raise unknown_name("experiment", name, experiment_files(), "or the path of a .yaml file")
        path = experiment_files()[name]
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"experiment file '{path}' does not exist; known: {', '.join(experiment_files())}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"experiment file '{path}' cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        raise UserError(f"experiment file '{path}' holds no fields; expected a mapping with 'models', 'text', …")
    return {"name": path.stem, **fields}


def make_experiment(fields: dict, kind: type[Kind] = Experiment) -> Kind:
    """Validate the fields of an experiment, by default a sweep.

    Raises:
        UserError: a field is unknown, missing or out of range.
    """
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise unknown_name("field", field, kind.model_fields) from None
        raise UserError(f"field '{field}': {first['msg']}, got {first['input']!r}") from None
