"""The statistics that a trace keeps of hidden states, from a single read of each on torch's threads."""

import ctypes
import threading
from functools import cache

import numpy as np
import torch

from outlier_kernels import reference_states
from outlier_kernels.cpu import all_passes
from outlier_kernels.cpu.codes import as_rows
from outlier_kernels.states import HIT, NotFinite, State, serves

__all__ = ["add", "add_residual", "serves"]

ROWS = 128  # tokens in a piece
STRIP = 1024  # features of a piece, at most, whose sums stay in a core's first cache


def add(state: State, alpha: float, listed: bool = True) -> torch.Tensor:
    """See `dispatch.add_state`."""
    x = as_rows(state.x)
    tokens, features = x.shape
    blocks, strips = -(-tokens // ROWS), -(-features // STRIP)
    width, hits = -(-features // strips), torch.empty(features, dtype=torch.int64)
    room = _room.of(8 * (2 * blocks * features + strips * 4 * tokens) + 4 * (3 * blocks * features + blocks * strips))
    arguments = {"x": x, "width": width, "height": ROWS, "alpha": _float32(alpha), "room": room, "hits": hits}
    broken = all_passes().add_state(blocks * strips, ROWS * width, **arguments, **_pass_arguments(state))
    if broken:
        raise NotFinite(broken - 1)
    if listed:
        state.found.append(state.label, _values_of(x, hits, alpha))
    return hits


def _pass_arguments(state: State) -> dict:
    return {"ids": state.ids, "kept": state.kept, "joined": state.statistics}


def _values_of(x: torch.Tensor, hits: torch.Tensor, alpha: float) -> np.ndarray:
    """Return the hits of a state, (hits,) of `HIT`."""
    places, room = 8 * x.shape[1], _room.of(8 * (x.shape[1] + x.numel()))
    count = all_passes().hits_of_state(1, 0, x=x, alpha=_float32(alpha), hits=hits, room=room)
    return np.frombuffer(ctypes.string_at(room + places, count * HIT.itemsize), HIT)


def add_residual(state: State, limits: tuple[float, float], massive: torch.Tensor) -> None:
    """See `dispatch.add_residual`."""
    x = as_rows(state.x)
    tokens, features = x.shape
    blocks, at_position = -(-tokens // ROWS), torch.zeros(tokens, dtype=torch.int64)
    room = _room.of(8 * 5 * blocks + 4 * (tokens + tokens * features))
    arguments = {"x": x, "height": ROWS, "limits": _float32(*limits), "room": room, "massive": at_position}
    count = all_passes().add_residual(blocks, ROWS * features, **arguments, **_pass_arguments(state))
    if count < 0:
        reference_states.check_finite(x.float().abs().amax(0))
    if count:
        massive += at_position


class _Room(threading.local):
    def __init__(self):
        self.size, self.memory, self.address = -1, None, 0

    def of(self, size: int) -> int:
        """Return the address of at least this many bytes, valid until the thread's next call."""
        if size > self.size:
            self.size, self.memory = size, torch.empty(size, dtype=torch.uint8)
            self.address = self.memory.data_ptr()
        return self.address


_room = _Room()


@cache
def _float32(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)
