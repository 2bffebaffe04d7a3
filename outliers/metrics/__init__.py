"""Metrics of a subject: their records, and a file each with how it is measured."""

from outliers.errors import UserError
from outliers.metrics import records
from outliers.models.plugins import plugins


def metrics() -> dict[str, type]:
    """The records of metrics by their names: those of this project, and those of installed packages, as entry points.

    Raises:
        UserError: a plugin has a name that is taken, or cannot be imported.
    """
    own = [record for record in vars(records).values() if isinstance(record, type) and "name" in vars(record)]
    by_name = {record.name: record for record in own}
    for name, origin, record in plugins(__name__):
        if name in by_name:
            raise UserError(f"{origin} is a metric whose name is taken; remove one of the two")
        by_name[name] = record
    return by_name
