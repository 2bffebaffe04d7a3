"""`python -m outliers`, or the script `outliers`: lists commands and models, or runs a command."""

import re
import sys
from pathlib import Path

import outliers
from outliers.errors import UserError, unknown_name
from outliers.models.names import PACKAGED, packaged_file, pocket_models
from outliers.specification.files import experiment_files
from outliers.terminal.command import answering, called

PURPOSE = re.compile(r'"""`python -m outliers\.\w+`: (.*)\.')


def _commands() -> dict[str, str]:
    """The purpose of each command: the first line of its file, which is not run for it."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    purposes = {file.stem: PURPOSE.match(file.read_text(encoding="utf-8")) for file in files}
    return {name: purpose[1] for name, purpose in purposes.items() if purpose}


COMMANDS = _commands()


def overview() -> None:
    """Print the commands and the models."""
    print(f"outliers {outliers.__version__}: {outliers.__doc__.splitlines()[0]}\n\nCommands, each with --help:\n")
    for name, description in COMMANDS.items():
        print(f"  {' '.join(called(f'{name:<10}'))} {description}")
    print("\nModels by name; others are a hub id, a local folder, or a GGUF file:\n")
    for name in pocket_models():
        print(f"  {name:<20} trained for this project, embedded")
    for name, packaged in PACKAGED.items():
        place = packaged_file(name) or f"`{' '.join(called('get'))} {name}` gets it"
        print(f"  {name:<20} {packaged.size / 1e6:.0f} MB, {packaged.licence}: {place}")


def main() -> None:
    """Run the command that is named, with what follows its name; without one, print what there is."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in COMMANDS:
        del sys.argv[1]
        from outliers.app import run  # late, as all that the list does not need

        run(name)
        return
    with answering():
        if name == "--version":
            print(f"outliers {outliers.__version__}")
        elif name == "--help":
            overview()
        elif name in {known.partition("/")[0] for known in experiment_files()}:
            raise UserError(f"'{name}' is no command but experiments; `{' '.join(called('report'))} {name}` runs them")
        else:
            raise unknown_name("command", name, COMMANDS)


if __name__ == "__main__":
    main()
