"""What type checkers and editors see of public names, which are imported when they are first used.

    python scripts/stubs.py

It writes `__init__.pyi` beside each `__init__.py` that has a table `_HOME`: an import of every name from its home.
"""

from itertools import groupby
from pathlib import Path
from types import ModuleType

import outliers
import outliers.plot

HEAD = "# Of the tables in __init__.py, by scripts/stubs.py: public names, as type checkers and editors see them.\n"
VERSION = {outliers: ["__version__: str\n"]}
PACKAGES = (outliers, outliers.plot)


def stub(package: ModuleType) -> str:
    """Return the stub of a package: an import of each public name from the module that defines it."""
    homes = package._HOME | dict.fromkeys(getattr(package, "_ROOMS", ()), "outliers")
    lines = sorted(f"from {home} import {name} as {name}\n" for name, home in homes.items())
    ours = ["".join(some) for _, some in groupby(lines, lambda line: line.startswith("from outliers"))]
    return "\n".join([HEAD, *ours, *VERSION.get(package, [])])


def stub_file(package: ModuleType) -> Path:
    return Path(package.__file__).with_suffix(".pyi")


if __name__ == "__main__":
    for package in PACKAGES:
        stub_file(package).write_text(stub(package), encoding="utf-8")
