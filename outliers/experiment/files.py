"""Experiment files: YAML mappings that become specifications, with file, line and field of a mistake."""

import logging
import posixpath
from pathlib import Path, PurePosixPath
from typing import NamedTuple, TypeVar

import yaml
from pydantic import ValidationError

from outliers.errors import UserError, unknown_name
from outliers.experiment.spec import Named
from outliers.models.names import PACKAGED, not_here, packaged_file

Kind = TypeVar("Kind", bound=Named)
logger = logging.getLogger(__name__)


class Fields(NamedTuple):
    """The fields of an experiment, and of each where it stands, such as "my.yaml, line 3"."""

    values: dict
    places: dict[tuple, str]

    def replaced(self, fields: dict) -> "Fields":
        """With other values in the place of some, such as from the command line."""
        places = {path: place for path, place in self.places.items() if not path or path[0] not in fields}
        return Fields(self.values | fields, places)


def specify(name: str | None, fields: dict, default: str, kind: type[Kind]) -> Kind:
    """What a command runs: an experiment of this name, or the default one, with other values of some fields.

    With models and no name, the other fields have the defaults of their kind. An experiment that comes with the project
    goes on without the packaged models that are not on this machine, and says so.

    Raises:
        UserError: as `read_experiment` and `make_experiment`.
    """
    if name is None and "models" in fields:
        return make_experiment(fields, kind)
    name = name or default
    found = read_experiment(name)
    if name in experiment_files() and "models" not in fields:
        found = _with_models_that_are_here(found)
    return make_experiment(found.replaced(fields), kind)


def _with_models_that_are_here(found: Fields) -> Fields:
    models = found.values.get("models", [])
    missing = [model for model in models if model in PACKAGED and not packaged_file(model)]
    for model in missing:
        logger.info(f"{not_here(model)}; this run goes on without it")
    kept = [model for model in models if model not in missing]
    return found.replaced({"models": kept}) if kept and missing else found


def experiment_files() -> dict[str, Path]:
    """Name to file of the experiments that come with the project: inside the package when it was installed from a
    wheel, beside it in a clone."""
    package = Path(__file__).parent.parent
    folders = (package / "experiments", package.parent / "experiments")
    return {
        file.relative_to(folder).with_suffix("").as_posix(): file
        for folder in folders
        for file in sorted(folder.rglob("*.yaml"))
    }


def read_experiment(name: str) -> Fields:
    """Read an experiment file, by path or by the name of one that comes with the project.

    A file that says `extends: other.yaml` has the fields of that file, its name included, and its own in their place.

    Raises:
        UserError: there is no such file, or it is not a YAML mapping.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        if name not in experiment_files():
            raise unknown_name("experiment", name, experiment_files(), "or the path of a .yaml file")
        path = experiment_files()[name]
    else:
        name = path.stem
    try:
        return _read(path, name)
    except RecursionError:
        raise UserError(f"experiment file '{path}' refers to itself, in 'extends' or by an alias") from None


def _read(path: Path, name: str) -> Fields:
    try:
        text = path.read_text(encoding="utf-8")
        values, node = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except FileNotFoundError:
        raise UserError(f"experiment file '{path}' does not exist; known: {', '.join(experiment_files())}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"experiment file '{path}' cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict) or not all(isinstance(field, str) for field in values):
        raise UserError(f"experiment file '{path}' holds no fields; expected a mapping with 'models', 'text', …")
    if not isinstance(values.get("extends", ""), str):
        raise UserError(f"experiment file '{path}': 'extends' is {values['extends']!r}; expected another file's name")
    fields = Fields({"name": name} | values, {place: f"{path}, line {line}" for place, line in _lines(node).items()})
    if "extends" not in values:
        return fields
    base = PurePosixPath(fields.values.pop("extends"))
    base_name = posixpath.normpath(PurePosixPath(name).parent / base.with_suffix(""))
    inherited = _read(path.parent / base, base_name.removeprefix("../"))
    own = {field: value for field, value in fields.values.items() if field in values}
    return Fields(inherited.values | own, inherited.places | fields.places)


def _lines(node: yaml.Node, path: tuple = ()) -> dict[tuple, int]:
    """Path of every value in a document to its line, from 1."""
    lines = {path: node.start_mark.line + 1}
    children = []
    if isinstance(node, yaml.MappingNode):
        children = [(key.value, key.start_mark.line + 1, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        children = [(number, value.start_mark.line + 1, value) for number, value in enumerate(node.value)]
    for key, line, value in children:
        lines |= _lines(value, (*path, key)) | {(*path, key): line}
    return lines


def make_experiment(fields: dict | Fields, kind: type[Kind]) -> Kind:
    """Validate the fields of an experiment.

    Raises:
        UserError: a field is unknown, missing or out of range; it names the file and the line of a field from a file.
    """
    values, places = fields if isinstance(fields, Fields) else (fields, {})
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        path, field = first["loc"], ".".join(map(str, first["loc"]))
        # A missing field stands nowhere: then the mapping that lacks it is named.
        shortest = 0 if first["type"] == "missing" else 1
        parts = [path[:end] for end in range(len(path), shortest - 1, -1)]
        place = next((places[part] for part in parts if part in places), None)
        where = f"{place}, " if place else ""
        if first["type"] == "extra_forbidden":
            raise UserError(f"{where}{unknown_name('field', field, kind.model_fields)}") from None
        raise UserError(f"{where}field '{field}': {first['msg']}, got {first['input']!r}") from None
