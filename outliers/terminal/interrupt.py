"""Ctrl-C, or SIGTERM, during a run: the first one lets what is being measured finish, the second one stops at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator


class Interrupted(KeyboardInterrupt):
    """A run was asked to stop, and has; the message says what it has finished."""


SIGNALS = (signal.SIGINT, signal.SIGTERM)
_stop_requested = False  # of the whole process, as its signals are


def asked_to_stop() -> bool:
    """Whether Ctrl-C was pressed since the run began."""
    return _stop_requested


def stop_if_asked() -> None:
    """Raise KeyboardInterrupt here, where nothing would be lost, if Ctrl-C was pressed."""
    if _stop_requested:
        raise KeyboardInterrupt


@contextlib.contextmanager
def ending_alike() -> Iterator[None]:
    """Let SIGTERM, with which schedulers end a process, do within this context what Ctrl-C does."""
    usual = signal.getsignal(signal.SIGTERM)
    changes = usual is signal.SIG_DFL and threading.current_thread() is threading.main_thread()
    if changes:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if changes:
            signal.signal(signal.SIGTERM, usual)


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Let the first Ctrl-C only be noted, for `stop_if_asked`; the second one raises KeyboardInterrupt where it comes.

    Nothing changes where Ctrl-C does something else than to raise KeyboardInterrupt, such as in a background process
    that ignores it, and outside of the main thread.
    """
    global _stop_requested
    _stop_requested = False
    noted = [number for number in SIGNALS if signal.getsignal(number) is signal.default_int_handler]
    if threading.current_thread() is not threading.main_thread():
        noted = []
    for number in noted:
        signal.signal(number, _note)
    try:
        yield
    finally:
        for number in noted:
            signal.signal(number, signal.default_int_handler)


def _note(number: int, _frame) -> None:
    global _stop_requested
    _stop_requested = True
    signal.signal(number, signal.default_int_handler)
    if sys.stderr.isatty():
        # not through sys.stderr, which may be in the middle of a write
        os.write(sys.stderr.fileno(), b"\nstopping after what is being measured; Ctrl-C again stops at once\n")
