"""Schemes that other installed distributions declare, under the entry point group `outliers.schemes`."""

import functools
from collections.abc import Container
from importlib.metadata import entry_points

from outliers.errors import UserError

GROUP = "outliers.schemes"


def plugin_schemes(kind: type, taken: Container[str]) -> dict:
    """Name to scheme, of a kind, loaded when a name is first asked for that this project does not have.

    Raises:
        UserError: a plugin cannot be imported, holds something else, or a name that is taken.
    """
    found, origins = {}, {}
    for origin, schemes in _loaded():
        for scheme in schemes if isinstance(schemes, list | tuple) else [schemes]:
            if not isinstance(scheme, kind):
                raise UserError(f"{origin} is {type(scheme).__name__}; expected a Scheme or a list of them: remove it")
            if scheme.name in taken or scheme.name in found:
                other = origins.get(scheme.name, "outliers itself")
                raise UserError(f"{origin} has a scheme '{scheme.name}', as {other} has; remove one of them")
            found[scheme.name], origins[scheme.name] = scheme, origin
    return found


@functools.cache
def _loaded() -> list[tuple[str, object]]:
    """What each entry point holds, and what to call it."""
    loaded = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.dist.name, entry.name)):
        origin = f"plugin '{entry.name}' of the installed distribution '{entry.dist.name}'"
        try:
            loaded.append((origin, entry.load()))
        except Exception as error:  # whatever the code of others raises
            raise UserError(f"{origin} cannot be imported ({type(error).__name__}: {error}); remove it") from None
    return loaded
