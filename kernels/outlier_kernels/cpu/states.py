"""What a trace keeps of hidden states, from one read of each on the threads that torch has."""

from functools import cache

import torch

from outlier_kernels import reference_states
from outlier_kernels.cpu.codes import as_rows
from outlier_kernels.cpu.compiled import HITS, KINDS, NOTHING, passes
from outlier_kernels.states import RESIDUAL, STATISTICS, NotFinite, Statistics

ROWS = 128  # of a piece
STRIP = 1024  # features of a piece, at most, whose sums stay in a core's first cache


def add(
    statistics: Statistics, x: torch.Tensor, ids: torch.Tensor, alpha: float, kept: torch.Tensor | None
) -> torch.Tensor:
    """See `states.add`."""
    if not x.numel() or (kept is not None and not kept.is_cpu):
        return reference_states.add(statistics, x, ids, alpha, kept)
    x = as_rows(x)
    tokens, features = x.shape
    kind, size, stride = KINDS[x.dtype], x.element_size(), x.stride(0) * x.element_size()
    blocks, strips = -(-tokens // ROWS), -(-features // STRIP)
    width = -(-features // strips)
    kept_kind = NOTHING if kept is None else HITS if kept.dtype == torch.bool else kind
    found, hits = torch.empty(1, dtype=torch.int64), torch.empty(features, dtype=torch.int64)
    room = (
        torch.empty(2, blocks, features),
        torch.empty(blocks, features, dtype=torch.int32),
        torch.empty(2, blocks, features, dtype=torch.float64),
        torch.empty(strips, 4, tokens, dtype=torch.float64),
        torch.empty(blocks, strips),
    )
    given = 0, x, kind, size, tokens, stride, features, width, ROWS, _float32(alpha), ids, kept, kept_kind
    joined = (statistics[name] for name in STATISTICS)
    passes().add_state(blocks * strips, ROWS * width, *given, *room, *joined, hits, found)
    if (broken := found.item()) >= 0:
        raise NotFinite(broken)
    return hits


def values_of_hits(x: torch.Tensor, hits: torch.Tensor, alpha: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `states.values_of_hits`."""
    x, ends = as_rows(x), hits.cumsum(0)
    tokens, features = x.shape
    where, values = torch.empty(int(ends[-1]), dtype=torch.int64), torch.empty(int(ends[-1]))
    if len(where):
        given = x, KINDS[x.dtype], x.element_size(), tokens, x.stride(0) * x.element_size(), _float32(alpha)
        passes().hits(features, tokens, *given, hits, ends, where, values)
    return where, values


def add_residual(
    statistics: Statistics,
    x: torch.Tensor,
    ids: torch.Tensor,
    limits: tuple[float, float],
    kept: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """See `states.add_residual`."""
    if not x.numel() or (kept is not None and not kept.is_cpu):
        return reference_states.add_residual(statistics, x, ids, limits, kept)
    x = as_rows(x)
    tokens, features = x.shape
    kind = KINDS[x.dtype]
    blocks = -(-tokens // ROWS)
    found, at_position = torch.empty(2, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64)
    room = (
        torch.empty(tokens, dtype=torch.int32),
        torch.empty(tokens, features, dtype=torch.int32),
        torch.empty(blocks, 5, dtype=torch.int64),
    )
    given = 0, x, kind, x.element_size(), tokens, x.stride(0) * x.element_size(), features, ROWS, ids
    joined = (statistics[name] for name in RESIDUAL)
    last = at_position, found, kept, NOTHING if kept is None else kind
    passes().add_residual(blocks, ROWS * features, *given, _float32(*limits), *room, *joined, *last)
    broken, massive = found.tolist()
    if broken:
        reference_states.check_finite(x.float().abs().amax(0))
    return at_position if massive else None


@cache
def _float32(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)
