"""Int8 products on CPUs: passes over memory that numba compiles, around the fastest product that is there."""

import torch


def has_int8_units() -> bool:
    """Whether this processor has AVX-512 VNNI, and torch was built with oneDNN."""
    return torch.cpu._is_vnni_supported() and torch.backends.mkldnn.is_available()
