"""Metrics of a subject: a folder each, with its record and its measurement."""

import pkgutil
from importlib import import_module

from outliers.errors import UserError
from outliers.models.plugins import plugins


def metrics() -> dict[str, type]:
    """The records of metrics by their names: of each folder here, and of installed packages, as entry points.

    Raises:
        UserError: a plugin has a name that is taken, or cannot be imported.
    """
    records = {folder.name: _record(folder.name) for folder in pkgutil.iter_modules(__path__) if folder.ispkg}
    for name, origin, record in plugins(__name__):
        if name in records:
            raise UserError(f"{origin} is a metric whose name is taken; remove one of the two")
        records[name] = record
    return records


def _record(name: str) -> type:
    """The class of a folder that has its name."""
    classes = (member for member in vars(import_module(f"{__name__}.{name}")).values() if isinstance(member, type))
    return next(member for member in classes if getattr(member, "name", None) == name)
