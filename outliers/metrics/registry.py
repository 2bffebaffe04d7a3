"""Names that stand for what is imported when somebody wants it: those of this project, and those of other packages."""

import functools
import pkgutil
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from typing import Generic, TypeVar

from outliers.errors import UserError, unknown_name

Kind = TypeVar("Kind")


class Registry(Mapping[str, Kind], Generic[Kind]):
    """Things of a kind by their names, such as metrics; a further one is an entry point of an installed package.

    Args:
        what: one of them is called in messages.
        group: of entry points, such as `outliers.metrics`.
        own: name to `module:object`.

    Raises:
        UserError: nothing has the name that is asked for; or a plugin takes one that is taken, or cannot be imported.
    """

    def __init__(self, what: str, group: str, built_in: dict[str, str]):
        self.what, self.group, self.built_in = what, group, built_in

    def __getitem__(self, name: str) -> Kind:
        if name in self.built_in:
            return pkgutil.resolve_name(self.built_in[name])
        if name not in self._others:
            raise unknown_name(self.what, name, self)
        entry = self._others[name]
        try:
            return entry.load()
        except Exception as error:  # whatever the code of others raises
            why = f"{type(error).__name__}: {error}"
            raise UserError(f"{_origin(entry)} cannot be imported ({why}); remove it") from None

    def __iter__(self) -> Iterator[str]:
        return iter([*self.built_in, *self._others])

    def __len__(self) -> int:
        return len(self.built_in) + len(self._others)

    @functools.cached_property
    def _others(self) -> dict:
        entries: dict = {}
        for entry in sorted(entry_points(group=self.group), key=lambda entry: (entry.dist.name, entry.name)):
            if entry.name in self.built_in or entry.name in entries:
                other = _origin(entries[entry.name]) if entry.name in entries else "outliers itself"
                raise UserError(f"{_origin(entry)} is a {self.what} that {other} has; remove one of them")
            entries[entry.name] = entry
        return entries


def _origin(entry) -> str:
    return f"plugin '{entry.name}' of the installed distribution '{entry.dist.name}'"
