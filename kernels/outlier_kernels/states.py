"""The statistics that a trace keeps of hidden states, accumulated over sequences.

Statistics are tensors by name, on the device of the states; `empty` makes them, and `dispatch.add_state` and
`dispatch.add_residual` update them in place. Counts, extremes, medians and places are bit-identical in every backend.
Sums in float64 are taken in different orders: they agree to 1e-13 of the sum of magnitudes; the kurtoses, which are
differences of such sums, agree less if the sums nearly cancel.
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch


class Statistics(dict[str, torch.Tensor]):
    """Tensors by name, updated in place."""

    @cached_property
    def addresses(self) -> dict[str, int]:
        """The addresses of the tensors' memory by name, cached because a look-up takes longer than passing them."""
        return {name: tensor.data_ptr() for name, tensor in self.items()}


FEATURES = -1  # in a shape: the number of features
LEAST, MOST = torch.inf, -torch.inf
# By name, in the order that all backends share: shape, dtype, and initial value. `rest`: without position 0. `largest`:
# absolute value, value, feature, position and token id of the largest entry. Of equal entries, the first feature's
# first one counts within a sequence, and among sequences the one whose numbers are lexicographically larger.
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
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that are read without conversion


class NotFinite(ValueError):
    """A hidden state holds NaN or inf.

    feature: the first such feature. label: that of the state, if the error is raised only when a report is read."""

    def __init__(self, feature: int, label: object = None):
        super().__init__(f"NaN or inf in feature {feature}")
        self.feature, self.label = feature, label


class Found:
    """The hits that the host has read, and the reports that are still on devices.

    hits: pairs of a `State`'s label and its hits, (hits,) of `HIT`. waiting: the number of hits in `hits`.
    """

    def __init__(self):
        self.hits: list[tuple[object, np.ndarray]] = []
        self.waiting = 0
        self.reports: dict[torch.device, object] = {}

    def append(self, label: object, hits: np.ndarray) -> None:
        if len(hits):
            self.hits.append((label, hits))
            self.waiting += len(hits)

    def read(self) -> None:
        """Wait for all states so far and collect their hits.

        Raises:
            NotFinite: one of the states holds NaN or inf.
        """
        for report in self.reports.values():
            report.read(self)


class State(NamedTuple):
    """A hidden state of one sequence, and the statistics to which it is added.

    x: (tokens, features) of any floating-point dtype and strides. ids: its token ids, int64 (tokens,), on its device.
    statistics: for the same features. kept: a record per entry of all states added to it, such as those of several
    layers, (tokens, features) contiguous, on any device: the largest magnitude, in the dtype of x; or bool, whether one
    was a hit; or None. found: collects the hits, in any order; on a GPU, when it is read. label: what the caller calls
    the state, returned with its hits and errors.
    """

    x: torch.Tensor
    ids: torch.Tensor
    statistics: Statistics
    kept: torch.Tensor | None
    found: Found
    label: object = None


def empty(table: dict[str, tuple], features: int, device: torch.device) -> Statistics:
    """Return the statistics of a table before any state was added."""
    return Statistics(
        (name, torch.full([features if one == FEATURES else one for one in shape], value, dtype=dtype, device=device))
        for name, (shape, dtype, value) in table.items()
    )


def serves(x: torch.Tensor, kept: torch.Tensor | None = None) -> bool:
    """Return whether the kernels read a hidden state and its record, with the meanings in `State`."""
    return x.dtype in DTYPES and x.numel() > 0 and (kept is None or kept.device == x.device)
