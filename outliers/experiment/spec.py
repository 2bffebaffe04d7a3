"""What an experiment file holds."""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from outliers.criterion import ALPHA
from outliers.errors import UserError, unknown_name
from outliers.quantization.schemes import SCHEMES

Names = Annotated[list[str], Field(min_length=1), AfterValidator(lambda names: list(dict.fromkeys(names)))]


class Experiment(BaseModel):
    """A sweep: every model under every scheme on one text.

    block: tokens a block (T). blocks: how many (N). alpha: outlier threshold of the decomposing schemes.
    """

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")] = "sweep"
    models: Names
    schemes: Names = list(SCHEMES)
    text: str = "sample"
    block: Annotated[int, Field(ge=2)] = 256
    blocks: PositiveInt = 32
    alpha: PositiveFloat = ALPHA
    device: str = "cpu"
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    revision: str | None = None

    @property
    def folder(self) -> Path:
        """Where its results go unless the user says otherwise."""
        return Path("results") / self.name


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


def make_experiment(fields: dict) -> Experiment:
    """Validate the fields of an experiment.

    Raises:
        UserError: a field is unknown, missing or out of range.
    """
    try:
        return Experiment(**fields)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            raise unknown_name("field", field, Experiment.model_fields) from None
        raise UserError(f"field '{field}': {first['msg']}, got {first['input']!r}") from None
