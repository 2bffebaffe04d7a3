"""Derive the options of a command from the fields of its experiment."""

import re
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from typer import Option

NUMBERS = {int: "<int>", float: "<float>"}  # metavars; the field parses and checks the text itself


def options(experiment_type: type[BaseModel], without: Iterable[str] = ()) -> dict[str, Any]:
    """Return the annotation of an option for each field of an experiment, its own fields before inherited ones.

    An option has the title of its field, or its name; that of a list has the singular, too. The help is the field's
    description with the default.

    Args:
        experiment_type: type of the experiment.
        without: fields that have no option.
    """
    names = sorted(experiment_type.model_fields, key=lambda name: name not in experiment_type.__annotations__)
    return {name: _option(name, experiment_type.model_fields[name]) for name in names if name not in without}


def _option(name: str, field: FieldInfo) -> Any:
    """Return the annotation of an option: its type, which is int, float, bool, list[str] or str, spellings and help."""
    title = (field.title or name).replace("_", "-")
    parsed = any(isinstance(check, BeforeValidator) and check.json_schema_input_type is str for check in field.metadata)
    annotation = str if parsed else _plain(field.annotation)
    if get_origin(annotation) is list:
        names = dict.fromkeys([re.sub("(?<=[nt]ch)es$|s$", "", title), title])
        typed, metavar = list[str], "A,B,…"
    else:
        names = {title: None}
        typed, metavar = bool if annotation is bool else str, NUMBERS.get(annotation)
    option = Option(*(f"--{spelling}" for spelling in names), help=_help(field), metavar=metavar)
    return Annotated[typed | None, option]


def _plain(annotation: Any) -> Any:
    """Return a type without Annotated and without None."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        others = [part for part in get_args(annotation) if part is not NoneType]
        return _plain(others[0]) if len(others) == 1 else annotation
    return annotation


def _help(field: FieldInfo) -> str:
    """Return the description of a field with its choices and its default.

    A default of None, False or no entries is left out: the description says what it means.
    """
    annotation = _plain(field.annotation)
    *choices, last = get_args(annotation) if get_origin(annotation) is Literal else [""]
    help_text = (field.description or "").removesuffix(".") + (f": {', '.join(choices)} or {last}" if choices else "")
    default = [] if field.is_required() else field.get_default(call_default_factory=True)
    if default is None or default is False or default == []:
        return f"{help_text}."
    values = default if isinstance(default, list) else [f"{default:g}" if isinstance(default, float) else default]
    return f"{help_text}; by default {', '.join(map(str, values))}."
