"""Read experiment files: YAML mappings that become experiments, with errors that name file, line and field."""

import difflib
import itertools
import logging
import posixpath
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import yaml

from outliers.config.experiment import AnyExperiment
from outliers.config.fields import FieldError
from outliers.errors import UserError, reason_of, shown, unknown_name
from outliers.files import start_of
from outliers.models.names import PACKAGED, not_here, packaged_file
from outliers.terminal.amounts import size

ENDINGS = (".yaml", ".yml")
MOST_BYTES, MOST_VALUES = 1_000_000, 10_000  # of an experiment file
ALIKE = 0.8  # similarity of difflib from which a name is a mistyped experiment, not a model
MOST_FILES = 10  # that extend one another
logger = logging.getLogger(__name__)


class Fields(NamedTuple):
    """The fields of an experiment.

    values: by field. places: where each value stands, such as "my.yaml, line 3", by path in the values.
    """

    values: dict
    places: dict[tuple, str]

    def replaced(self, fields: dict) -> "Fields":
        """Return a copy in which the values of some fields are replaced, for example by values of the command line."""
        places = {path: place for path, place in self.places.items() if not path or path[0] not in fields}
        return Fields(self.values | fields, places)


def specify(name: str | None, fields: dict, default: str | None, experiment_type: type[AnyExperiment]) -> AnyExperiment:
    """Return the experiment of a command.

    With models and no name, or without a default, fields that are not given have their defaults. An experiment that
    comes with the project leaves out the packaged models that are not on this machine, and logs that.

    Args:
        name: of an experiment, or its file.
        fields: values that replace those of the experiment.
        default: name of the experiment if none is given.
        experiment_type: type of the experiment.

    Raises:
        UserError: as `read_experiment` and `make_experiment`.
    """
    if name is None and (default is None or "models" in fields):
        return experiment_type(**fields)
    name = name or default
    experiment = make_experiment(read_experiment(name).replaced(fields), experiment_type)
    return (
        _with_models_that_are_here(experiment) if name in experiment_files() and "models" not in fields else experiment
    )


def _with_models_that_are_here(experiment: AnyExperiment) -> AnyExperiment:
    missing = [model for model in experiment.models if model in PACKAGED and not packaged_file(model)]
    for model in missing:
        logger.info(f"{not_here(model)}; this run goes on without it")
    kept = [model for model in experiment.models if model not in missing]
    return experiment.model_copy(update={"models": kept}) if kept and missing else experiment


def is_experiment(name: str) -> bool:
    """Return whether a name is that of an experiment or of its file, and not that of a model."""
    return name in experiment_files() or Path(name).suffix in ENDINGS


def is_meant_as_experiment(name: str) -> bool:
    """Return whether a name is of an experiment or a set of experiments, or close to one and no existing path."""
    names = [part for known in experiment_files() for part in (known, *known.split("/"))]
    return (
        name in names
        or is_experiment(name)
        or bool(difflib.get_close_matches(name, names, 1, ALIKE) and not Path(name).exists())
    )


def experiment_files() -> dict[str, Path]:
    """Return the files of the experiments that come with the project by name.

    They are inside the package if it was installed from a wheel, and beside it in a clone.
    """
    package = Path(__file__).parent.parent
    folders = (package / "experiments", package.parent / "experiments")
    return {
        file.relative_to(folder).with_suffix("").as_posix(): file
        for folder in folders
        for file in sorted(folder.rglob("*.yaml"))
    }


def read_experiment(name: str) -> Fields:
    """Read an experiment file, by path or by the name of one that comes with the project.

    A file with `extends: other.yaml` inherits the fields of that file, including the name, and overrides them.

    Raises:
        UserError: there is no such file, or it is not a YAML mapping.
    """
    if not is_experiment(name):
        raise unknown_name("experiment", name, experiment_files(), "(or the path of a .yaml file)")
    path = Path(name)
    if path.suffix in ENDINGS:
        name = path.stem
    else:
        path = experiment_files()[name]
    return _read(path, name)


def _read(path: Path, name: str, extended_by: tuple[Path, ...] = ()) -> Fields:
    text, place = _text(path), path.resolve()
    if place in extended_by or len(extended_by) > MOST_FILES:
        raise UserError(f"experiment file '{path}' refers to itself in 'extends'; expected at most {MOST_FILES} others")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        lines = {} if node is None else dict(_lines(node, itertools.count(1)))
        values = None if node is None else loader.construct_document(node)
    except RecursionError:
        raise UserError(f"experiment file '{path}' refers to itself by an alias, or nests too deep") from None
    except (LookupError, AttributeError, TypeError):  # of the library where it converts a value
        raise UserError(
            f"experiment file '{path}' cannot be read: a value does not fit its tag, such as !!bool"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"experiment file '{path}' cannot be read: {reason_of(error, 300)}") from None
    if not isinstance(values, dict) or not all(isinstance(field, str) for field in values):
        raise UserError(f"experiment file '{path}' holds no fields; expected a mapping with 'models', 'text', …")
    fields = Fields({"name": name} | values, {place: f"{path}, line {line}" for place, line in lines.items()})
    if "extends" not in values:
        return fields
    base = fields.values.pop("extends")
    if not isinstance(base, str) or Path(base).suffix not in ENDINGS:
        raise UserError(f"experiment file '{path}': 'extends' is {shown(base)}; expected another file's name")
    base_name = posixpath.normpath(PurePosixPath(name).parent / PurePosixPath(base).with_suffix(""))
    inherited = _read(path.parent / base, base_name.removeprefix("../"), (*extended_by, place))
    overriding = {field: value for field, value in fields.values.items() if field in values}
    return Fields(inherited.values | overriding, inherited.places | fields.places)


def _text(path: Path) -> str:
    try:
        if not path.exists():
            raise UserError(f"experiment file '{path}' does not exist; known: {', '.join(experiment_files())}")
        content = start_of(path, MOST_BYTES + 1)
        if content is None or len(content) > MOST_BYTES:
            raise UserError(f"experiment file '{path}' is not a file of at most {size(MOST_BYTES)}; expected YAML")
        return content.decode()
    except (OSError, ValueError) as error:
        raise UserError(f"experiment file '{path}' cannot be read: {error}") from None


def _lines(node: yaml.Node, count: Iterator[int], path: tuple = ()) -> Iterator[tuple[tuple, int]]:
    """Yield path and line number, from 1, of every value in a document, with aliases expanded.

    Raise YAMLError if a mapping has a field twice, or aliases multiply a few values to too many.
    """
    if next(count) > MOST_VALUES:
        raise yaml.YAMLError(f"more than {MOST_VALUES} values; expected those of an experiment")
    yield path, node.start_mark.line + 1
    children = []
    if isinstance(node, yaml.MappingNode):
        children = [(key.value, key.start_mark.line + 1, value) for key, value in node.value]
        known = set()
        for field, line, _ in children:
            if not isinstance(field, str) or field in known:
                what = f"field '{field}' stands twice" if isinstance(field, str) else "a field's name is no text"
                raise yaml.YAMLError(f"line {line}: {what}; expected one value of each field")
            known.add(field)
    elif isinstance(node, yaml.SequenceNode):
        children = [(number, value.start_mark.line + 1, value) for number, value in enumerate(node.value)]
    for key, line, value in children:
        yield from _lines(value, count, (*path, key))
        yield (*path, key), line


def make_experiment(fields: Fields, experiment_type: type[AnyExperiment]) -> AnyExperiment:
    """Return the experiment of some fields; a UserError gives file and line of a wrong field from a file."""
    try:
        return experiment_type(**fields.values)
    except FieldError as error:
        parts = [error.path[:end] for end in range(len(error.path), 0, -1)] or [()]
        place = next((fields.places[part] for part in parts if part in fields.places), None)
        located = FieldError(f"{place}, {error}" if place else str(error))
        located.field = error.field
        raise located from None
