"""Run code of strangers within a time limit."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")


class _Stopped(BaseException):
    """Raised inside code that takes too long. It derives from BaseException, so that `except Exception` does not catch
    it."""


def within(seconds: float, function: Callable[[], Made]) -> Made:
    """Call a function and return its result, or raise its error, within a time limit.

    The function runs in a thread of its own, which is interrupted between two Python bytecodes. A thread that never
    reaches another bytecode is abandoned.

    Raises:
        TimeoutError: the function takes longer than `seconds`.
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
