"""The parts that all commands share: options, one line for a user's mistake or Ctrl-C, and exit codes."""

import contextlib
import functools
import gc
import importlib
import logging
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated

import typer
from typer import BadParameter, Option

from outliers.errors import UserError
from outliers.terminal.interrupt import ending_alike
from outliers.terminal.printing import is_line, print_to_stderr, printing

# transformers imports torchao if it is installed; torchao then warns of kernels for other devices, torch of it.
NOISY = ("torchao", "torch.utils._pytree")

UsageError = BadParameter.__base__  # from the copy of Click inside Typer

Models = Annotated[list[str] | None, Option("--model", "--models", help="Models as an option.", metavar="A,B,…")]
Out = Annotated[Path | None, Option(help="Folder for the results; by default in results/.")]
Force = Annotated[bool, Option("--force", help="Measure again even if finished.")]
DryRun = Annotated[
    bool, Option("--dry-run", help="Measure nothing: print what would be measured, for how long, with how much memory.")
]
Debug = Annotated[bool, Option("--debug", help="Show the traceback of an error, with the messages of libraries.")]


def run_command(command) -> None:
    """Run a command function with the process's arguments; exit with 2 after a mistake, with 130 after Ctrl-C."""
    with reporting_mistakes(), warnings.catch_warnings():
        logger = logging.getLogger("outliers")
        logger.handlers, logger.propagate = [_BesideBars()], False
        logger.setLevel(logging.INFO)
        for name in NOISY:
            logging.getLogger(name).setLevel(logging.ERROR)
        warnings.showwarning = lambda message, *_place: logger.warning(f"warning: {message}")
        for argument in sys.argv[1:]:
            if not argument:
                raise UserError("an argument is empty (''); expected a value, or leave its option out")
            if not is_line(argument):
                raise UserError(f"argument '{argument}' holds bytes that are no text; expected UTF-8 in one line")
        app_of(command)(prog_name=shlex.join(invocation(command.__name__)), standalone_mode=False)


def app_of(command: Callable) -> typer.Typer:
    """Return the Typer app of a function, whose annotations are its options, all of them optional."""
    name = command.__name__
    of_examples = shlex.join(invocation(name))
    help_text = (command.__doc__ or "").replace(f"python -m outliers.{name}", of_examples)
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command(help=help_text)(_with_debug(command))
    return app


def import_for_good(*modules: str) -> None:
    """Import modules that a command uses until it ends, without garbage collection, then freeze all existing objects.

    Python searches for garbage after every 700 new objects, but torch and transformers make hundreds of thousands that
    stay: searching them again and again takes a sixth of the start. Only the first call in a process freezes objects,
    because later there may be models among them.
    """
    if modules[0] in sys.modules:
        return
    gc.disable()
    try:
        for module in modules:
            importlib.import_module(module)
        gc.freeze()
    finally:
        gc.enable()


@contextlib.contextmanager
def reporting_mistakes() -> Iterator[None]:
    """Let a command print within this context; turn a user's mistake into one line and exit code 2."""
    with printing():
        try:
            yield
        except UsageError as error:
            print_to_stderr(f"error: {UserError(error.format_message())}")
            sys.exit(2)
        except UserError as error:
            print_to_stderr(f"error: {error}")
            sys.exit(error.code)


def _with_debug(command: Callable) -> Callable:
    """Return the command with the option `--debug`, which shows the traceback of a mistake above its line.

    After Ctrl-C the command prints in a line what is finished and how to go on.
    """

    @functools.wraps(command)
    def command_with_debug(debug: bool, **options):
        try:
            with ending_alike():
                return command(**options)
        except UserError as error:
            if debug:
                _show_all(error)
                traceback.print_exception(error)
            raise
        except KeyboardInterrupt as stop:
            finished = f": {stop}" if str(stop) else ""
            again = "the same command without --force" if options.get("force") else "the same command again"
            print(f"interrupted{finished}; run {again} to go on", file=sys.stderr)
            sys.exit(130)

    hints = {name: hint for name, hint in command.__annotations__.items() if name != "return"} | {"debug": Debug}
    parameters = [Parameter(key, Parameter.KEYWORD_ONLY, default=None, annotation=hint) for key, hint in hints.items()]
    command_with_debug.__signature__, command_with_debug.__annotations__ = Signature(parameters), hints
    return command_with_debug


def _show_all(error: BaseException | None) -> None:
    """Include the errors of libraries, which a UserError hides, in its traceback."""
    while error:
        error.__suppress_context__, error = False, error.__context__


class _BesideBars(logging.Handler):
    """A log handler that prints to standard error without breaking a progress bar, and ignores a closed one."""

    def __init__(self):
        super().__init__()
        self.stream = sys.stderr  # kept, for sys.stderr is replaced while a library is silenced

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # late, for `--help` does not need it

        with contextlib.suppress(OSError, ValueError):  # ValueError: the stream is closed
            tqdm.write(record.getMessage(), file=self.stream)


def models_of(entries: Iterable[str]) -> list[str]:
    """Return models that are given one by one or separated by commas; an existing path may contain a comma."""
    return [part for entry in entries for part in ([entry] if os.path.exists(entry) else entry.split(",")) if part]


def invocation(command: str) -> list[str]:
    """Return how the user calls a command: as a Python module, or with the script `outliers`."""
    return ["outliers", command] if Path(sys.argv[0]).stem == "outliers" else ["python", "-m", f"outliers.{command}"]


def command_line(command: str) -> str:
    """Return `invocation` with the arguments of this process: the line that runs the command again."""
    return shlex.join([*invocation(command), *sys.argv[1:]])
