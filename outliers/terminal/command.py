"""What every command has in common: options, one line for a user's mistake or Ctrl-C, and exit codes."""

import contextlib
import functools
import inspect
import logging
import shlex
import sys
import traceback
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, BadParameter, Option

from outliers.errors import UserError
from outliers.terminal.printing import is_line, printing, say

(UsageError,) = BadParameter.__bases__  # of the copy of Click that Typer has

MODEL = "Hub id, local folder or GGUF file, pocket/NAME, or smollm2-135m"
Model = Annotated[str, Argument(help=f"{MODEL}.", show_default=False)]
Models = Annotated[list[str] | None, Option("--model", help=f"{MODEL}; repeatable.")]
Text = Annotated[str | None, Option(help="sample (the default), c4, wikitext2, or a .txt, .txt.gz or .jsonl file.")]
Block = Annotated[int | None, Option(help="Tokens a block; by default 256.")]
Blocks = Annotated[int | None, Option(help="How many blocks, from the start of the text; by default 32.")]
Bos = Annotated[
    bool | None, Option("--bos", help="Begin each block with the model's own first token, as Gemma needs it.")
]
Alpha = Annotated[float | None, Option(help="From which magnitude on a value is an outlier; by default 6.")]
Device = Annotated[str | None, Option(help="cpu (the default), cuda, cuda:N, or auto: layers spread over all GPUs.")]
Dtype = Annotated[str | None, Option(help="Of weights and activations: float32 (the default), float16 or bfloat16.")]
Revision = Annotated[
    str | None, Option(help="Branch, tag or commit on the hub, or a checkpoint's folder in a local folder.")
]
Stream = Annotated[
    bool | None,
    Option("--stream", help="Read a layer when its turn comes and drop it then: for models larger than memory."),
]
Memory = Annotated[
    str | None,
    Option(help="With --stream: hidden states beyond this, such as 4GB, are kept in a file; by default none."),
]
Engine = Annotated[
    str | None,
    Option(help="local (the default), or ray: spread over a Ray cluster, or over the cores or GPUs of this machine."),
]
Out = Annotated[Path | None, Option(help="Folder for the results; by default in results/.")]
Force = Annotated[bool, Option("--force", help="Measure again what is finished.")]
Debug = Annotated[bool, Option("--debug", help="Show where a mistake was found, and what a library said of it.")]


def run(command) -> None:
    """Run a command function with the process's arguments; exit with 2 after a mistake, with 130 after Ctrl-C."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
    app.command()(_debuggable(_stoppable(command)))
    with printing():
        logger = logging.getLogger("outliers")
        logger.handlers, logger.propagate = [_BesideBars()], False
        logger.setLevel(logging.INFO)
        try:
            _check_text(sys.argv[1:])
            app(standalone_mode=False)
        except UsageError as error:
            say(f"error: {UserError(error.format_message())}")
            sys.exit(2)
        except UserError as error:
            say(f"error: {error}")
            sys.exit(2)


def _check_text(arguments: list[str]) -> None:
    """Raise UserError for an argument that nobody means: an empty one, of an unset variable, or one that is no text."""
    for argument in arguments:
        if not argument:
            raise UserError("an argument is empty (''); expected a value, or leave its option out")
        if not is_line(argument):
            raise UserError(f"argument '{argument}' holds bytes that are no text; expected UTF-8 in one line")


def _debuggable(command):
    """The same command with the option `--debug`, which shows the traceback of a mistake above its line."""

    @functools.wraps(command)
    def debuggable(*arguments, debug: bool, **options):
        try:
            return command(*arguments, **options)
        except UserError as error:
            if debug:
                _show_all(error)
                traceback.print_exception(error)
            raise

    option = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Debug)
    signature = inspect.signature(command)
    debuggable.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])
    debuggable.__annotations__ = {**command.__annotations__, "debug": Debug}
    return debuggable


def _show_all(error: BaseException | None) -> None:
    """Let a traceback begin with what a library raised, which the line of a mistake stands for."""
    while error:
        error.__suppress_context__, error = False, error.__context__


class _BesideBars(logging.Handler):
    """Prints what a run has to say, without breaking into a progress bar; a run goes on where nobody reads it."""

    def __init__(self):
        super().__init__()
        self.stream = sys.stderr  # also while a library's own messages are kept away from it

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # late, as all that `--help` does not need

        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            tqdm.write(record.getMessage(), file=self.stream)


def _stoppable(command):
    """The same command, in which Ctrl-C gives one line: what is finished, and how to go on."""

    @functools.wraps(command)
    def stoppable(*arguments, **options):
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt as stop:
            finished = f": {stop}" if str(stop) else ""
            again = "the same command without --force" if options.get("force") else "the same command again"
            print(f"interrupted{finished}; run {again} to go on", file=sys.stderr)
            sys.exit(130)

    return stoppable


def typed(command: str) -> str:
    """What the user typed to run a command of this name."""
    return shlex.join(["python", "-m", f"outliers.{command}", *sys.argv[1:]])


def given(arguments: dict) -> dict:
    """Of a command's arguments those that the user gave and that are fields of its experiment."""
    others = ("experiment", "out", "force")
    return {name: value for name, value in arguments.items() if value is not None and name not in others}
