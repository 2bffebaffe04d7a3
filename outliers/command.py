"""What every command has in common: one line for a user's mistake, and exit code 2."""

import sys

import typer

from outliers.errors import UserError


def run(command) -> None:
    """Run a command function with the process's arguments."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command()(command)
    try:
        app()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
