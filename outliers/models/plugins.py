"""Entry points of other installed distributions: schemes, metrics, families of models."""

import functools
from collections.abc import Container
from importlib.metadata import entry_points
from typing import NamedTuple

from outliers.errors import UserError

SCHEMES = "outliers.schemes"


class Plugin(NamedTuple):
    """An entry point: its name, its name in messages, and its object."""

    name: str
    origin: str
    holds: object


@functools.cache
def plugins(group: str) -> list[Plugin]:
    """Return the entry points of a group.

    Raises:
        UserError: one cannot be imported.
    """
    declared = []
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.dist.name, entry.name)):
        origin = f"plugin '{entry.name}' of the installed distribution '{entry.dist.name}'"
        try:
            declared.append(Plugin(entry.name, origin, entry.load()))
        except Exception as error:  # the code of a plugin may raise anything
            raise UserError(f"{origin} cannot be imported ({type(error).__name__}: {error}); remove it") from None
    return declared


def plugin_schemes(kind: type, taken: Container[str]) -> dict:
    """Return the schemes of plugins by name; they are loaded when an unknown name is first used.

    Raises:
        UserError: a plugin cannot be imported, has something other than schemes of this class, or a name that is taken.
    """
    schemes_by_name, origins = {}, {}
    for _, origin, schemes in plugins(SCHEMES):
        for scheme in schemes if isinstance(schemes, list | tuple) else [schemes]:
            if not isinstance(scheme, kind):
                raise UserError(f"{origin} is {type(scheme).__name__}; expected a Scheme or a list of them: remove it")
            if scheme.name in taken or scheme.name in schemes_by_name:
                other = origins.get(scheme.name, "outliers itself")
                raise UserError(f"{origin} has a scheme '{scheme.name}', as {other} has; remove one of them")
            schemes_by_name[scheme.name], origins[scheme.name] = scheme, origin
    return schemes_by_name
