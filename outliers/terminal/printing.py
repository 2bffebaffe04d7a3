"""Print without breaking a run: in any encoding, into a closed pipe, or nowhere."""

import contextlib
import io
import os
import sys
import threading
import unicodedata
from collections.abc import Iterator
from typing import TextIO

NO_TEXT = ("Cc", "Cs", "Zl", "Zp")  # Unicode categories: control characters, surrogates, line and paragraph separators

STDERR = 2
_silence = threading.RLock()


def is_line(text: str) -> bool:
    """Return whether a text fits in one line of UTF-8, and so in a name."""
    return not any(unicodedata.category(character) in NO_TEXT for character in text)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Discard what the process writes to standard error within this context, also from libraries in C or Rust.

    Only one thread at a time does so.
    """
    with _silence, contextlib.ExitStack() as restoring:
        with contextlib.suppress(OSError):  # standard error is closed, and silent
            saved = os.dup(STDERR)
            restoring.callback(os.close, saved)
            restoring.callback(os.dup2, saved, STDERR)
            with open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), STDERR)
        yield


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Let a command print within this context: characters that an encoding lacks are escaped, and stdout is flushed.

    Exit with 1, silently, if the reader of standard output has gone, as under `| head`, and with 2 and one line if it
    cannot be written.
    """
    # A closed stdout or stderr (`>&-`) is opened to nowhere, so that no file of the run gets its number.
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, "w"))  # noqa: SIM115, open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OSError as error:
        if not _is_closed(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        print_to_stderr(f"error: cannot write to standard output ({error.strerror or error}); print to another file")
        sys.exit(2)


def _is_closed(stream: TextIO) -> bool:
    try:
        print(file=stream, flush=True)
    except OSError:
        return True
    return False


def print_to_stderr(line: str) -> None:
    """Print a line to standard error; a closed one is ignored."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)
