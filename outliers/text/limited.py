"""Code of strangers under a limit of time."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")


class _Stopped(BaseException):
    """Raised inside of what takes too long, which catches no such thing."""


def within(seconds: float, function: Callable[[], Made]) -> Made:
    """Call a function and return what it does.

    It runs in a thread of its own, which is interrupted between two steps of Python. One that never comes to a next
    step is left alone.

    Raises:
        TimeoutError: it takes longer. Whatever the function raises.
    """
    made: list[Made] = []
    raised: list[BaseException] = []

    def call() -> None:
        try:
            made.append(function())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped))
        thread.join(1)
    if made:
        return made[0]
    if raised and not isinstance(raised[0], _Stopped):
        raise raised[0]
    raise TimeoutError(f"it takes longer than {seconds:g} seconds")
