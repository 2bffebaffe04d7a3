"""Int8 products on CPUs: passes over memory compiled by numba, around the fastest available product."""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch


def has_int8_units() -> bool:
    """Return whether this processor has AVX-512 VNNI, and torch was built with oneDNN."""
    return torch.cpu._is_vnni_supported() and torch.backends.mkldnn.is_available()


@cache
def all_passes() -> ModuleType:
    """Return the module of all passes, imported on first use because numba is slow to import."""
    return import_module("outlier_kernels.cpu.passes")
