"""Int8 kernels in Triton, for NVIDIA GPUs from compute capability 8.0.

Nothing here waits for the device: how many outlier features there are is known there alone. A layer is one product
kernel, which needs the activations' codes and the outlier features from small kernels before it.
"""

import os
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
