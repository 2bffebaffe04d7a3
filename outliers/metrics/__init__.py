"""Metrics of a subject: a folder each, with its record, its measurement and its view."""

import pkgutil
from importlib import import_module

from outliers.errors import UserError
from outliers.models.plugins import plugins


def metrics() -> dict[str, type]:
    """The records of metrics by their names: of each folder here, and of installed packages, as entry points.

    Raises:
        UserError: a plugin has a name that is taken, or cannot be imported.
    """
    found = {folder.name: _record(folder.name) for folder in pkgutil.iter_modules(__path__) if folder.ispkg}
    for name, origin, record in plugins(__name__):
        if name in found:
            raise UserError(f"{origin} is a metric whose name is taken; remove one of the two")
        found[name] = record
    return found


def _record(name: str) -> type:
    """The class of a folder that has its name."""
    classes = (one for one in vars(import_module(f"{__name__}.{name}")).values() if isinstance(one, type))
    return next(one for one in classes if getattr(one, "name", None) == name)
