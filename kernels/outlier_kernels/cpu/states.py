"""What a trace keeps of hidden states, from one read of each on the threads that torch has."""

from functools import cache

import torch

from outlier_kernels import reference_states
from outlier_kernels.cpu.codes import as_rows
from outlier_kernels.cpu.compiled import passes
from outlier_kernels.states import NotFinite, Statistics

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
    blocks, strips = -(-tokens // ROWS), -(-features // STRIP)
    width = -(-features // strips)
    broken, hits = torch.empty(1, dtype=torch.int64), torch.empty(features, dtype=torch.int64)
    found = (
        *torch.empty(2, blocks, features),
        torch.empty(blocks, strips),
        torch.empty(blocks, features, dtype=torch.int32),
        *torch.empty(2, blocks, features, dtype=torch.float64),
        torch.empty(strips, 4, tokens, dtype=torch.float64),
        hits,
        broken,
    )
    given = {"x": x, "width": width, "height": ROWS, "alpha": _float32(alpha), "ids": ids, "kept": kept, "found": found}
    passes().add_state(blocks * strips, ROWS * width, **given, joined=statistics)
    if (feature := broken.item()) >= 0:
        raise NotFinite(feature)
    return hits


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
    blocks = -(-tokens // ROWS)
    outcome, at_position = torch.empty(2, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64)
    found = (
        torch.empty(tokens, dtype=torch.int32),
        torch.empty(tokens, features, dtype=torch.int32),
        torch.empty(blocks, 5, dtype=torch.int64),
        at_position,
        outcome,
    )
    given = {"x": x, "height": ROWS, "ids": ids, "limits": _float32(*limits), "kept": kept, "found": found}
    passes().add_residual(blocks, ROWS * features, **given, joined=statistics)
    broken, massive = outcome.tolist()
    if broken:
        reference_states.check_finite(x.float().abs().amax(0))
    return at_position if massive else None


@cache
def _float32(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)
