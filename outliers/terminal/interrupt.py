"""Ctrl-C, or SIGTERM, during a run: the first one lets what is being measured finish, the second one stops at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """A run that has stopped on request; the message tells what it has finished."""


SIGNALS = (signal.SIGINT, signal.SIGTERM)
SECONDS = 8  # after SIGTERM; many schedulers kill after ten
LOST = "interrupted: what was being measured is lost, finished rows are kept; run the same command again to go on\n"
_stop_requested = False  # of the whole process, as its signals are
_timers: list[threading.Timer] = []  # that will end the process


def asked_to_stop() -> bool:
    """Return whether Ctrl-C was pressed since the run began."""
    return _stop_requested


def stop_if_asked() -> None:
    """Raise KeyboardInterrupt if Ctrl-C was pressed; called where nothing would be lost."""
    if _stop_requested:
        raise KeyboardInterrupt


@contextlib.contextmanager
def ending_alike() -> Iterator[None]:
    """Make SIGTERM, with which schedulers end a process, act like Ctrl-C within this context.

    The process ends itself if stopping takes longer than schedulers wait.
    """
    handler = signal.getsignal(signal.SIGTERM)
    changes = handler is signal.SIG_DFL and threading.current_thread() is threading.main_thread()
    if changes:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        for timer in _timers:
            timer.cancel()
        _timers.clear()
        if changes:
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """Note the first Ctrl-C within this context, for `stop_if_asked`; the second one raises KeyboardInterrupt at once.

    Nothing changes outside the main thread, or if Ctrl-C does not raise KeyboardInterrupt, as in a background process
    that ignores it.
    """
    global _stop_requested
    _stop_requested = False
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    noted = {number: usual for number, usual in handlers.items() if usual in (signal.default_int_handler, _terminate)}
    if threading.current_thread() is not threading.main_thread():
        noted = {}
    for number in noted:
        signal.signal(number, _request_stop)
    try:
        yield
    finally:
        for number, handler in noted.items():
            signal.signal(number, handler)


def _terminate(number: int, frame: FrameType | None) -> None:
    _start_end_timer()
    signal.default_int_handler(number, frame)


def _start_end_timer() -> None:
    """End the process in some seconds, even if the main thread is in a long call."""
    timer = threading.Timer(SECONDS, _end)
    timer.daemon = True
    timer.start()
    _timers.append(timer)


def _end() -> None:
    with contextlib.suppress(OSError):
        os.write(2, LOST.encode())
    os._exit(130)


def _request_stop(number: int, _frame: FrameType | None) -> None:
    """Handle the first signal: the run stops after what it measures; a second one stops at once."""
    global _stop_requested
    _stop_requested = True
    if number == signal.SIGTERM:
        _start_end_timer()
    signal.signal(number, signal.default_int_handler)
    if sys.stderr.isatty():
        # not through sys.stderr, which may be in the middle of a write
        os.write(sys.stderr.fileno(), b"\nstopping after what is being measured; Ctrl-C again stops at once\n")
