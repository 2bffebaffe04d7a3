"""Passes over memory, run on torch's own threads.

A pass, a function of `passes.py`, takes the pieces of its work (such as rows) one after the other until none is left.
`Pass` runs it on the threads of the OpenMP library that torch's own operators use, because a second pool, such as
numba's, would compete for the same cores. Any number of Python threads may call passes at once, as they may call torch.
"""

import ctypes
import threading
from array import array
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path

import torch

_ALONE = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_IN_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # dtypes that passes read and write
_COMPILING = threading.Lock()
HITS, NOTHING = 3, -1  # kinds of records of states; a record of magnitudes has the kind of its states
SMALLEST_SHARE = 1 << 15  # entries that make another thread worth waking, as in torch


# Places of the counters: the next piece and the number of finished ones, which threads increase; the number of pieces,
# and how many a thread takes at once; then a number that a pass reports.
NEXT, DONE, PIECES, AT_ONCE, REPORT = range(5)


class Pass:
    """A compiled function of a pointer to int64 words; it is compiled on its first call in a process, or read from
    disk.

    The words are the counters, then the arguments: integers, and addresses of contiguous tensors.

    Args:
        function: the function to compile.
        parts: the names of the arguments in the order of their words; for an argument of several words, the function
            that splits it into integers, tensors and None.
    """

    def __init__(self, function: Callable, parts: dict[str, Callable | None]):
        self.function = function
        self.parts = parts
        self.compiled = None  # kept alive, because the code is freed with it

    @cached_property
    def address(self) -> int:
        with _COMPILING:
            self.compiled = self.compiled or _compiled(self.function)
            return self.compiled.address

    def __call__(self, pieces: int, entries: int, **arguments: torch.Tensor | int | tuple | None) -> int:
        """Work on a number of pieces with this many entries each, and return the number that the pass reports. None
        stands for an absent tensor."""
        return self.in_phases([(pieces, entries)], **arguments)

    def in_phases(self, phases: list[tuple[int, int]], **arguments: torch.Tensor | int | tuple | None) -> int:
        """Work on several phases in sequence, and return the number that the pass reports; a report ends the work.

        phases: the number of pieces of each, numbered on from the phase before, and the entries of a piece. A small
        phase wakes no thread.
        """
        words = [0, 0, 0, 0, 0]
        for name, parts in self.parts.items():
            given = arguments[name]
            for part in parts(given) if parts else (given,):
                words.append(0 if part is None else part if isinstance(part, int) else _memory(part))
        packed, first = array("q", words), 0
        memory, _ = packed.buffer_info()
        for pieces, entries in phases:
            smallest = SMALLEST_SHARE // (entries or 1) or 1
            threads = min(torch.get_num_threads(), -(-pieces // smallest)) or 1
            packed[NEXT], packed[PIECES], packed[AT_ONCE] = first, first + pieces, pieces // (threads * 4) or 1
            first += pieces
            if threads > 1 and (in_parallel := _openmp()):
                in_parallel(self.address, memory, threads, 0)
            elif pieces:
                self.single_threaded(memory)
            if packed[REPORT]:
                break
        return packed[REPORT]

    @cached_property
    def single_threaded(self) -> Callable:
        """The compiled function of the address of the words, which runs in the calling thread."""
        return _ALONE(self.address)


def _compiled(function: Callable) -> object:
    import numba

    signature = numba.types.void(numba.types.CPointer(numba.types.int64))
    try:
        return numba.cfunc(signature, cache=True, error_model="numpy")(function)
    except (RuntimeError, OSError):  # neither this folder nor the user's can be written: compile in each process
        return numba.cfunc(signature, error_model="numpy")(function)


def _memory(tensor: torch.Tensor) -> int:
    address = tensor.data_ptr() if tensor.is_cpu else 0
    if not address and tensor.numel():  # compiled code would read address 0
        raise ValueError(f"a pass reads and writes memory of the CPU, and {tensor.device} {type(tensor)} has none")
    return address


@cache
def _openmp() -> Callable | None:
    """Return the function that runs another one on the threads of torch's OpenMP library; None unless the library has
    GCC's interface, as LLVM's also has on Linux."""
    try:
        linked = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"))))
        return _IN_PARALLEL(("GOMP_parallel", linked))
    except (OSError, StopIteration, AttributeError):
        return None
