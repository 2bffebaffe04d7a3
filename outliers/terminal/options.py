"""Options of a command from the fields of what it specifies."""

import re
from collections.abc import Iterable
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo
from typer import Option

NUMBERS = {int: "<int>", float: "<float>"}  # which the field reads, and says what it expects


def options(kind: type[BaseModel], without: Iterable[str] = ()) -> dict[str, Any]:
    """The annotation of an option for each field of a specification but some, its own before those that it inherits.

    A field has its name, or its title, as its option; a list also the singular of it. What the help says is its
    description with the default.
    """
    names = sorted(kind.model_fields, key=lambda name: name not in kind.__annotations__)
    return {name: _option(name, kind.model_fields[name]) for name in names if name not in without}


def _option(name: str, field: FieldInfo) -> Any:
    called, typed = (field.title or name).replace("_", "-"), _typed(field)
    several = typed == list[str]
    names = dict.fromkeys([re.sub("(?<=[nt]ch)es$|s$", "", called), called] if several else [called])
    metavar = "A,B,…" if several else NUMBERS.get(typed)
    option = Option(*(f"--{spelling}" for spelling in names), help=_help(field), metavar=metavar)
    return Annotated[(str if typed in NUMBERS else typed) | None, option]


def _typed(field: FieldInfo) -> type:
    """The type of a field: a number, a flag, a list, or text."""
    read = any(isinstance(check, BeforeValidator) and check.json_schema_input_type is str for check in field.metadata)
    annotation = str if read else _plain(field.annotation)
    if get_origin(annotation) is list:
        return list[str]
    return annotation if annotation in (bool, int, float) else str


def _plain(annotation: Any) -> Any:
    """A type without what is said about it, and without None."""
    if get_origin(annotation) is Annotated:
        return _plain(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        others = [part for part in get_args(annotation) if part is not NoneType]
        return _plain(others[0]) if len(others) == 1 else annotation
    return annotation


def _help(field: FieldInfo) -> str:
    """The description of a field with its choices and its default; what its absence means is in the description."""
    annotation = _plain(field.annotation)
    *choices, last = get_args(annotation) if get_origin(annotation) is Literal else [""]
    help_text = (field.description or "").removesuffix(".") + (f": {', '.join(choices)} or {last}" if choices else "")
    default = [] if field.is_required() else field.get_default(call_default_factory=True)
    if default is None or default is False or default == []:
        return f"{help_text}."
    values = default if isinstance(default, list) else [f"{default:g}" if isinstance(default, float) else default]
    return f"{help_text}; by default {', '.join(map(str, values))}."
