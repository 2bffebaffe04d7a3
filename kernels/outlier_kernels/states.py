"""The statistics that a trace keeps of hidden states, added up over sequences, and the path that adds.

Statistics are tensors by name, on the device of the states, which `empty` makes and `add` and `add_residual` change.
Counts, extremes, medians and places are the same bit by bit on every path. Sums in float64 are of another order: they
agree to 1e-13 of the sum of what is added, magnitude by magnitude; the kurtoses, differences of such sums, as far as
these cancel.
"""

import os
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import torch


class Statistics(dict[str, torch.Tensor]):
    """Tensors by name, which change in place."""

    @cached_property
    def addresses(self) -> dict[str, int]:
        """Of their memory, by name; looked up once, for that takes longer than to pass them on."""
        return {name: tensor.data_ptr() for name, tensor in self.items()}


FEATURES = -1  # in a shape: as many as there are features
LEAST, MOST = torch.inf, -torch.inf
# By name, in the order in which the paths know them: shape, dtype, and what there is of no state. `rest`: without
# position 0. Largest: absolute value, value, feature, position and token id of the largest entry, the later one in the
# order of these numbers among equal ones of several sequences, the first feature's first one within a sequence.
STATISTICS = {
    "min": ((FEATURES,), torch.float32, LEAST),
    "max": ((FEATURES,), torch.float32, MOST),
    "largest": ((5,), torch.float64, MOST),
    "rest.max": ((), torch.float32, 0),
    "hits": ((FEATURES,), torch.int64, 0),
    "sequences_hit": ((FEATURES,), torch.int64, 0),
    "sum": ((FEATURES,), torch.float64, 0),
    "squares": ((FEATURES,), torch.float64, 0),
    "squares_rest": ((FEATURES,), torch.float64, 0),
    "kurtosis_tensor": ((2,), torch.float64, 0),
    "kurtosis_token": ((2,), torch.float64, 0),
}
RESIDUAL = {
    "largest": ((5,), torch.float64, MOST),
    "sum_of_max": ((), torch.float64, 0),
    "sum_of_ratios": ((), torch.float64, 0),
    "massive": ((FEATURES,), torch.int64, 0),
}
HIT = np.dtype([("feature", np.int32), ("value", np.float32)])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # that are read as they are


class NotFinite(ValueError):
    """A hidden state holds NaN or inf; feature: the first one with it."""

    def __init__(self, feature: int):
        super().__init__(f"NaN or inf in feature {feature}")
        self.feature = feature


def empty(table: dict[str, tuple], features: int, device: torch.device) -> Statistics:
    """The statistics of a table, of no state."""
    return Statistics(
        (name, torch.full([features if one == FEATURES else one for one in shape], value, dtype=dtype, device=device))
        for name, (shape, dtype, value) in table.items()
    )


def add(
    statistics: Statistics, x: torch.Tensor, ids: torch.Tensor, alpha: float, kept: torch.Tensor | None
) -> torch.Tensor:
    """Add a hidden state to the statistics of `STATISTICS`.

    Args:
        statistics: of the same features.
        x: the hidden state of one sequence, (tokens, features) of any floating-point dtype and strides.
        ids: its token ids, int64 (tokens,), on any device.
        alpha: magnitude of a hit, as float32 has it.
        kept: what is kept of each entry, (tokens, features) contiguous, on any device: its largest magnitude so far, in
            the dtype of x; or bool, whether it was a hit. None: neither.

    Returns:
        The hits of each feature, int64 (features,).

    Raises:
        NotFinite: there is NaN or inf in x; the statistics are of no use then.
    """
    return _path(x).add(statistics, x, ids.to(x.device), alpha, kept)


def values_of_hits(x: torch.Tensor, hits: torch.Tensor, alpha: float) -> np.ndarray:
    """The hits of x in any order, (hits,) of `HIT`; hits: of each feature how many, as `add` returns them."""
    return _path(x).values_of_hits(x, hits, alpha)


def add_residual(
    statistics: Statistics,
    x: torch.Tensor,
    ids: torch.Tensor,
    limits: tuple[float, float],
    kept: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Add a state of the residual stream to the statistics of `RESIDUAL`.

    Args:
        statistics: of the same features.
        x: the state of one sequence, (tokens, features).
        ids: its token ids, int64 (tokens,), on any device.
        limits: as float32 has them; an entry is massive with a magnitude above the first, and of at least the second
            times the median magnitude, which is an entry's, the lower one of two.
        kept: the largest magnitude of each entry so far, as in `add`. None: nothing is kept.

    Returns:
        Massive activations at each position, int64 (tokens,); None if there is none.

    Raises:
        NotFinite: there is NaN or inf in x.
    """
    return _path(x).add_residual(statistics, x, ids.to(x.device), limits, kept)


def path(device: torch.device, dtype: torch.dtype) -> str:
    """The path that reads states of a dtype on a device: "cpu", "triton" or "reference"; the one place that decides it.

    The variable OUTLIERS_KERNELS=reference asks for the reference.
    """
    if dtype not in DTYPES or os.environ.get("OUTLIERS_KERNELS") == "reference":
        return "reference"
    if device.type == "cuda" and find_spec("triton"):
        return "triton"
    return "cpu" if device.type == "cpu" else "reference"


MODULES = {
    "cpu": "outlier_kernels.cpu.states",
    "triton": "outlier_kernels.triton.states",
    "reference": "outlier_kernels.reference_states",
}


def _path(x: torch.Tensor) -> ModuleType:
    return import_module(MODULES[path(x.device, x.dtype)])
