"""Int8 kernels in Triton, for NVIDIA GPUs from compute capability 8.0.

Nothing here waits for the device: how many outlier features there are is known there alone. A layer of up to 32 tokens
is one kernel. Of more tokens one kernel looks for the outlier features, one makes codes, and one multiplies them.
"""

import os
import threading
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec

import torch


def runs_on(device: str, asked: bool) -> bool:
    """Whether Triton compiles for a type of device, or, where it is asked for, interprets (TRITON_INTERPRET=1): that
    takes a thousand times as long."""
    interprets = asked and os.environ.get("TRITON_INTERPRET") == "1"
    return find_spec("triton") is not None and (device == "cuda" or (device == "cpu" and interprets))


@cache
def has_int8_units(device: torch.device) -> bool:
    """Whether a GPU multiplies int8: from compute capability 8.0 on, except 10.x. The interpreter does."""
    if device.type != "cuda":
        return True
    major, _ = torch.cuda.get_device_capability(device)
    return major >= 8 and major != 10


def launch(kernel, grid: tuple[int, ...], first: torch.Tensor, *arguments, **named) -> None:
    """Launch a kernel where its first argument is.

    Multiplications and additions stay apart, for torch rounds after each of them.
    """
    with torch.cuda.device_of(first):  # Triton launches on the current device, whatever the tensors are on
        kernel[grid](first, *arguments, **named, enable_fp_fusion=False)


class _Rooms(threading.local):
    """Tensors of a thread, made once, which kernels leave to later ones on the same stream."""

    def __init__(self):
        self.made = {}


_rooms = _Rooms()


def room(make: Callable, device: torch.device, *sizes: int, place: int = 0):
    """Return what `make` makes for a device and sizes, the same in each call for one place. It stays, for a captured
    graph would go on to use it: sizes that vary are to be rounded up to powers of two."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    key = make, device, stream, place, *sizes
    if key not in _rooms.made:
        _rooms.made[key] = make(device, *sizes)
    return _rooms.made[key]
