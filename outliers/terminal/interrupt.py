"""Ctrl-C during a run: the first one lets what is being measured finish, the second one stops at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop, and has; the message says what it has finished."""


_stop_requested = False  # of the whole process, as its signals are


def asked_to_stop() -> bool:
    """Whether Ctrl-C was pressed since the run began."""
    return _stop_requested


def stop_if_asked() -> None:
    """Raise KeyboardInterrupt here, where nothing would be lost, if Ctrl-C was pressed."""
    if _stop_requested:
        raise KeyboardInterrupt


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Let the first Ctrl-C only be noted, for `stop_if_asked`; the second one raises KeyboardInterrupt where it comes.

    Nothing changes where Ctrl-C does something else than to raise KeyboardInterrupt, such as in a background process
    that ignores it, and outside of the main thread.
    """
    global _stop_requested
    _stop_requested = False
    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def _note(*_signal) -> None:
    global _stop_requested
    _stop_requested = True
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.stderr.isatty():
        # not through sys.stderr, which may be in the middle of a write
        os.write(sys.stderr.fileno(), b"\nstopping after what is being measured; Ctrl-C again stops at once\n")
