"""Int8 kernels in Triton, for NVIDIA GPUs from compute capability 8.0.

Nothing here waits for the device: the number of outlier features is known only there. A layer of up to 32 tokens is one
kernel. For more tokens, one kernel finds the outlier features, one makes codes, and one multiplies them.
"""

import os
import threading
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch


def runs_on(device: str, asked: bool) -> bool:
    """Return whether Triton compiles for a type of device; if asked for, also whether it interprets a program
    (TRITON_INTERPRET=1), a thousand times slower."""
    interprets = asked and os.environ.get("TRITON_INTERPRET") == "1"
    return find_spec("triton") is not None and (device == "cuda" or (device == "cpu" and interprets))


@cache
def has_int8_units(device: torch.device) -> bool:
    """Return whether a device multiplies int8: GPUs from compute capability 8.0 on, except 10.x, and the
    interpreter."""
    if device.type != "cuda":
        return True
    major, _ = torch.cuda.get_device_capability(device)
    return major >= 8 and major != 10


def launch(kernel, grid: tuple[int, ...], first: torch.Tensor, *arguments, **named) -> None:
    """Launch a kernel on the device of its first argument.

    Multiplications and additions are not fused, because torch rounds after each of them.
    """
    with torch.cuda.device_of(first):  # Triton launches on the current device, not that of the tensors
        kernel[grid](first, *arguments, **named, enable_fp_fusion=False)


class _Rooms(threading.local):
    """Scratch tensors of a thread, made once and reused by later kernels on the same stream."""

    def __init__(self):
        self.made = {}


_rooms = _Rooms()


def room(make: Callable, device: torch.device, *sizes: int, buffer: int = 0):
    """Return the scratch memory that `make` allocates for a device and sizes, once per stream and number of a buffer.

    It is kept for good, because a captured graph would continue to use it: round sizes that vary up to powers of two.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = make, device, stream, buffer, *sizes
    if key not in _rooms.made:
        _rooms.made[key] = make(device, *sizes)
    return _rooms.made[key]
