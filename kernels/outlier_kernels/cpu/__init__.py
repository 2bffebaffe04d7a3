"""Int8 products on CPUs: passes over memory that numba compiles, around the fastest product that is there."""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch


def has_int8_units() -> bool:
    """Whether this processor has AVX-512 VNNI, and torch was built with oneDNN."""
    return torch.cpu._is_vnni_supported() and torch.backends.mkldnn.is_available()


@cache
def all_passes() -> ModuleType:
    """The module of all passes, imported when one is first called, for numba takes its time."""
    return import_module("outlier_kernels.cpu.passes")
