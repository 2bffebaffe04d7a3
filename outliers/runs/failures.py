"""Failures of cells, which cost these alone; all other errors end the run."""

from collections.abc import Callable
from typing import Any

from outliers.errors import BadWeights, BrokenModel, UserError, reason_of
from outliers.subjects.cell import Failed

NO_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")  # in torch's RuntimeError, by device
LESS = "take a smaller --block, fewer schemes at once, --stream, or a machine with more"


def tried(function: Callable, *arguments: Any) -> Any:
    """Return what a function returns, or Failed after a UserError, too little memory, or a refusal of the system.

    Errors of a program, such as TypeError, and Ctrl-C end the run.
    """
    try:
        return function(*arguments)
    except UserError as error:
        return failed(error)
    except (MemoryError, RuntimeError) as error:
        reason = reason_of(error, 300)
        if isinstance(error, RuntimeError) and not any(part in reason for part in NO_MEMORY):
            raise
        return Failed(str(UserError(f"too little memory ({reason}); {LESS}")))
    except BrokenPipeError:  # of what is printed
        raise
    except OSError as error:
        return Failed(str(UserError(f"the system refuses it ({reason_of(error, 300)})")))


def failed(error: UserError) -> Failed:
    """The failure that an error stands for."""
    return Failed(str(error), isinstance(error, BrokenModel), isinstance(error, BadWeights))
