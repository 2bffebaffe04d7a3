"""Printing that ends no run: in any encoding, into a pipe that is closed, or nowhere."""

import contextlib
import io
import os
import sys
import unicodedata
from collections.abc import Iterator
from typing import TextIO

NO_TEXT = ("Cc", "Cs", "Zl", "Zp")  # Unicode's categories of control characters, halves of others, and ends of lines


def is_line(text: str) -> bool:
    """Whether a text can stand in one line of UTF-8, and in a name."""
    return not any(unicodedata.category(character) in NO_TEXT for character in text)


@contextlib.contextmanager
def printing() -> Iterator[None]:
    """Let a command print: what an encoding lacks is escaped, and standard output is written before this ends.

    Exits with 1 and no word if nobody reads standard output any more, as under `| head`, and with 2 and one line if
    it cannot be written.
    """
    _open_what_is_closed()
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
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        if isinstance(error, BrokenPipeError):
            sys.exit(1)
        say(f"error: cannot write to standard output ({error.strerror or error}); print to another file")
        sys.exit(2)


def _is_closed(stream: TextIO) -> bool:
    """Whether nothing more can be printed."""
    try:
        print(file=stream, flush=True)
    except OSError:
        return True
    return False


def say(line: str) -> None:
    """Print a line to standard error; a run goes on where nobody reads it."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _open_what_is_closed() -> None:
    """Give the numbers of closed streams (`>&-`) to no file that a run writes."""
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, "w"))  # noqa: SIM115, as long as the process
