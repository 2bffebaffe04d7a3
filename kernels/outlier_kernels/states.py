"""The statistics that a trace keeps of hidden states, added up over sequences.

Statistics are tensors by name, on the device of the states, which `empty` makes and `dispatch.add_state` and
`dispatch.add_residual` change. Counts, extremes, medians and places are the same bit by bit in every backend. Sums in
float64 are of another order: they agree to 1e-13 of the sum of what is added, magnitude by magnitude; the kurtoses,
differences of such sums, as far as these cancel.
"""

from functools import cached_property
from typing import NamedTuple

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
    """A hidden state holds NaN or inf; feature: the first one with it. place: of the state, where it is found later."""

    def __init__(self, feature: int, place: object = None):
        super().__init__(f"NaN or inf in feature {feature}")
        self.feature, self.place = feature, place


class Found:
    """The hits of states, as far as the host has read them, and reports on devices that it has not.

    hits: the place of a state and its hits, (hits,) of `HIT`. waiting: how many hits those are.
    """

    def __init__(self):
        self.hits: list[tuple[object, np.ndarray]] = []
        self.waiting = 0
        self.reports: dict[torch.device, object] = {}

    def append(self, place: object, hits: np.ndarray) -> None:
        """Add the hits of a state."""
        if len(hits):
            self.hits.append((place, hits))
            self.waiting += len(hits)

    def read(self) -> None:
        """Wait for the states so far.

        Raises:
            NotFinite: there is NaN or inf in one of them.
        """
        for report in self.reports.values():
            report.read(self)


class State(NamedTuple):
    """A hidden state of one sequence, and what it is added to.

    x: (tokens, features) of any floating-point dtype and strides. ids: its token ids, int64 (tokens,), on its device.
    statistics: of the same features. kept: what is kept of each entry, (tokens, features) contiguous, on any device:
    its largest magnitude so far, in the dtype of x; or bool, whether it was a hit. None: neither. found: what gets the
    hits, in any order, and their place; a GPU's when it is read.
    """

    x: torch.Tensor
    ids: torch.Tensor
    statistics: Statistics
    kept: torch.Tensor | None
    found: Found
    place: object = None


def empty(table: dict[str, tuple], features: int, device: torch.device) -> Statistics:
    """The statistics of a table, of no state."""
    return Statistics(
        (name, torch.full([features if one == FEATURES else one for one in shape], value, dtype=dtype, device=device))
        for name, (shape, dtype, value) in table.items()
    )


def serves(x: torch.Tensor, kept: torch.Tensor | None = None) -> bool:
    """Whether kernels read a hidden state and what is kept of it, as `dispatch.add_state` has them."""
    return x.dtype in DTYPES and x.numel() > 0 and (kept is None or kept.device == x.device)
