"""The statistics of a trace: the dtype and shape of each, and how those of two texts are combined."""

from collections.abc import Iterable

import torch
from outlier_kernels import states

from outliers.criterion import CROSS_ROLES, PAPER, STREAM
from outliers.tracing.tokens import EXTREMES, MOST_POSITIONS, WINDOW

ON_STREAM = (*STREAM, "cross_kv")  # cross_kv is on the residual stream of another stack
# Roles with quartiles of each feature; not ffn_out, because too many feed-forward units have hits.
SKETCHED = (*PAPER, *CROSS_ROLES)
# The dimension of positions, for statistics by position up to the end of the longest sequence.
BY_POSITION = {"magnitude": 0, "massive_positions": 0, "sequences": 0, "sinks": 1}

StatisticTypes = dict[str, tuple[torch.dtype, Iterable]]


def _of_layers(table: dict[str, tuple]) -> StatisticTypes:
    return {
        name: (dtype, ("L", *("h" if size == states.FEATURES else size for size in shape)))
        for name, (shape, dtype, _) in table.items()
    }


# Statistic: dtype and shape (L layers, T positions, h features of the state, E experts, u units of each, s features of
# the state that they read, X experts of all layers, V token ids, n of them that occurred).
OF_ROLE, OF_STREAM = _of_layers(states.STATISTICS), {"magnitude": (torch.float64, "Th")}
OF_UNITED = dict.fromkeys(("layers_hit", "positions_hit"), (torch.int64, "h"))
OF_RESIDUAL = _of_layers(states.RESIDUAL) | {
    "massive_positions": (torch.int64, "T"),
    "massive_tokens": (torch.int64, "V"),
}
OF_ATTENTION = {"sinks": (torch.int64, "LT"), "sinks_tokens": (torch.int64, "V")}
OF_TEXT = {"sequences": (torch.int64, "T")}
OF_EXPERTS = {
    "tokens": (torch.int64, "LE"),
    "max": (torch.float32, "LEu"),
    "hits": (torch.int64, "LEu"),
    "squares": (torch.float32, "LEu"),
    "state_squares": (torch.float32, "LEs"),
    "largest": (torch.float64, ("X", 5)),
}
OF_TOKENS = dict.fromkeys(("ids", "positions"), (torch.int64, "n"))
OF_CARRIERS = {
    "token_sum": (torch.float64, "nh"),
    "token_max": (torch.float32, "nh"),
    **dict.fromkeys(EXTREMES, (torch.float32, ("h", MOST_POSITIONS))),
    **dict.fromkeys([f"{extreme}_at" for extreme in EXTREMES], (torch.int64, ("h", MOST_POSITIONS, 1 + WINDOW))),
}


def united_roles(roles: Iterable[str]) -> list[tuple[str, ...]]:
    """Return the sets of roles over which hits are united: each role, and the roles that share the residual stream's
    features."""
    shared = tuple(role for role in STREAM if role in roles)
    return [(role,) for role in roles] + ([shared] if len(shared) > 1 else [])


def token_states(roles: Iterable[str]) -> list[str]:
    """Return the states for which statistics by token may be kept: the united roles of the residual stream, such as
    "attn_in+ffn_in", and "residual"."""
    return [state for state in ("+".join(role for role in ON_STREAM if role in roles), "residual") if state]


def tables_of(roles: Iterable[str], attention: bool, tokens: bool, experts: bool) -> dict[str, StatisticTypes]:
    """Return the statistics of each state of a trace."""
    tables = {role: OF_ROLE | (OF_STREAM if role in ON_STREAM else {}) for role in roles}
    tables |= {"residual": OF_RESIDUAL, "text": OF_TEXT} | ({"attention": OF_ATTENTION} if attention else {})
    tables |= ({"tokens": OF_TOKENS} if tokens else {}) | ({"experts": OF_EXPERTS} if experts else {})
    more = [("+".join(united), OF_UNITED) for united in united_roles(roles)]
    more += [(state, OF_CARRIERS) for state in token_states(roles) if tokens]
    for state, table in more:
        tables[state] = tables.get(state, {}) | table
    return tables


def _larger_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the larger of each pair of rows, compared lexicographically, so that the order of merging has no
    effect."""
    rows = [max(pair) for pair in zip(a.tolist(), b.tolist(), strict=True)]
    return torch.tensor(rows, dtype=a.dtype, device=a.device)


COMBINE = {"min": torch.minimum, "max": torch.maximum, "largest": _larger_rows}  # all others add up


def combine(name: str, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return a statistic of two traces from those of each, added up unless the last part of its name has another
    rule."""
    kind = name.rpartition(".")[2]
    if kind in BY_POSITION:
        return add_from_start(first.clone(), second, BY_POSITION[kind])
    return COMBINE.get(kind, torch.add)(first, second)


def add_from_start(total: torch.Tensor, value: torch.Tensor, dim: int) -> torch.Tensor:
    """Add a value to the first positions of a total in place, or of an extended copy if the value has more
    positions."""
    if total.shape == value.shape:
        return total.add_(value)
    shape = list(total.shape)
    shape[dim] = value.shape[dim] - shape[dim]
    if shape[dim] > 0:
        total = torch.cat([total, total.new_zeros(shape)], dim)
    total.narrow(dim, 0, value.shape[dim]).add_(value)
    return total
