"""Tokens at which features are large: sums and maxima by token, and the positions where a feature is strongest and
weakest."""

from collections.abc import Mapping

import pandas as pd
import torch

from outliers.errors import UserError
from outliers.models.anatomy.vision import CLASS, PATCH, REGISTER
from outliers.text.tokens import DELIMITER, INSIDE_WORD, WORD_START

BEFORE, AFTER = 8, 4  # tokens of a context before and after its own
WINDOW = BEFORE + 1 + AFTER
MOST_POSITIONS = 8  # number of strongest positions of each feature, and of weakest ones
NONE = -1.0  # the magnitude that marks a missing position
FIRST = "first"  # the type of whatever token is at position 0
TYPES = (FIRST, DELIMITER, WORD_START, INSIDE_WORD, CLASS, REGISTER, PATCH)
EXTREMES = ("strongest", "weakest")
# Suffixes of the names of statistics.
SUMS = ("positions", "token_sum", "token_max")
STATISTICS = ("ids", *SUMS, *EXTREMES, *(f"{extreme}_at" for extreme in EXTREMES))

TokenStatistics = dict[str, torch.Tensor]
TokenNames = Mapping[int, tuple[str, str]]  # token id: its text and its type


class TokenSums:
    """An accumulator of the magnitudes of features by token, over sequences and for several states.

    Position 0, where attention sinks and massive activations occur, is kept separate: it counts as a token of its own,
    whose id is the size of the vocabulary, and is never among the strongest or weakest positions of a feature.
    """

    def __init__(self, vocabulary: int):
        self.vocabulary, self.count = vocabulary, 0
        self.rows: torch.Tensor | None = None  # row of each token id, or -1
        self.occurred: torch.Tensor | None = None  # whether each token id occurred, also at position 0
        self.by_row: TokenStatistics = {}  # one row per token; `count` rows are in use
        self.places: TokenStatistics = {}

    def add(self, ids: torch.Tensor, magnitudes: Mapping[str, torch.Tensor]) -> None:
        """Add a sequence: its token ids (T,), int64, and by state magnitudes (T, features), float32, all on one
        device."""
        rows = self._rows_of(ids)
        self._room("tokens.positions", ids.shape[1:], torch.int64, ids.device).index_add_(0, rows, torch.ones_like(ids))
        windows = windows_of(ids, self.vocabulary)
        for state, magnitude in magnitudes.items():
            shape = magnitude.shape[1:]
            sums = self._room(f"{state}.token_sum", shape, torch.float64, ids.device)
            sums.index_add_(0, rows, magnitude.double())
            largest = self._room(f"{state}.token_max", shape, torch.float32, ids.device)
            largest.scatter_reduce_(0, rows[:, None].expand_as(magnitude), magnitude, "amax")
            by_feature = magnitude[1:].T.contiguous()
            for extreme in EXTREMES:
                self._add_places(f"{state}.{extreme}", by_feature, windows[1:])

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens that occurred, in ascending order."""
        return self.occurred.nonzero()[:, 0].tolist()

    def statistics(self) -> TokenStatistics:
        """Return the statistics of all sequences in host memory, see `outliers.tracing.result.Trace`."""
        ids = (self.rows >= 0).nonzero()[:, 0]
        by_token = {name: value[self.rows[ids]] for name, value in self.by_row.items()}
        return {name: value.cpu() for name, value in {"tokens.ids": ids, **by_token, **self.places}.items()}

    def _rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the row of each token, int64 (T,); new tokens get the next free rows."""
        if self.rows is None:
            self.rows = torch.full((self.vocabulary + 1,), -1, device=ids.device)
            self.occurred = torch.zeros(self.vocabulary, dtype=torch.bool, device=ids.device)
        self.occurred[ids] = True
        ids = ids.clone()
        ids[0] = self.vocabulary
        new = ids[self.rows[ids] < 0].unique()
        self.rows[new] = torch.arange(self.count, self.count + len(new), device=ids.device)
        self.count += len(new)
        return self.rows[ids]

    def _room(self, name: str, shape: tuple, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a statistic by row, extended to at least twice its size if it has too few rows."""
        values = self.by_row.get(name, torch.zeros(0, *shape, dtype=dtype, device=device))
        if len(values) < self.count:
            more = max(self.count, 2 * len(values)) - len(values)
            self.by_row[name] = torch.cat([values, values.new_zeros(more, *shape)])
        return self.by_row[name]

    def _add_places(self, name: str, magnitude: torch.Tensor, windows: torch.Tensor) -> None:
        """Merge the strongest or weakest positions of a sequence, magnitude (features, T - 1), with the previous
        ones."""
        features, count = magnitude.shape
        if name not in self.places:
            self.places[name] = magnitude.new_full((features, MOST_POSITIONS), NONE)
            self.places[f"{name}_at"] = windows.new_full((features, MOST_POSITIONS, 1 + WINDOW), self.vocabulary)
            self.places[f"{name}_at"][..., 0] = 0
        order = _sort_key(magnitude, torch.arange(1, count + 1, device=magnitude.device), name)
        best = order.topk(min(MOST_POSITIONS, count), 1).indices
        candidates = magnitude.gather(1, best), torch.cat([1 + best[..., None], windows[best]], 2)
        before = self.places[name], self.places[f"{name}_at"]
        both = (torch.cat(pair, 1) for pair in zip(before, candidates, strict=True))
        self.places[name], self.places[f"{name}_at"] = _best(name, *both)


def windows_of(ids: torch.Tensor, nothing: int) -> torch.Tensor:
    """Return the ids around each position, (T, WINDOW), padded with `nothing`."""
    return torch.cat([ids.new_full((BEFORE,), nothing), ids, ids.new_full((AFTER,), nothing)]).unfold(0, WINDOW, 1)


def _sort_key(magnitude: torch.Tensor, position: torch.Tensor, name: str) -> torch.Tensor:
    """Return a key, int64, that is larger for larger magnitudes of a statistic whose name ends in "strongest", and for
    smaller ones if it ends in "weakest"; then for earlier positions."""
    bits = magnitude.view(torch.int32).long()  # the bits of floats from 0 on sort as their values
    bits = bits if name.endswith(EXTREMES[0]) else torch.iinfo(torch.int32).max - bits
    return torch.where(magnitude < 0, -1, (bits << 32) + (torch.iinfo(torch.int32).max - position))


def _best(name: str, magnitude: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the best positions of each feature, and their magnitudes.

    The arguments are magnitudes (features, places), and positions with their contexts (features, places, 1 + WINDOW).
    Ties in magnitude and position are sorted by the ids of the context.
    """
    order = _sort_key(magnitude, at[..., 0], name)
    order, best = order.sort(dim=1, descending=True, stable=True)
    tied = ((order[:, 1:] == order[:, :-1]) & (order[:, 1:] >= 0)).any(1).nonzero()[:, 0]
    if len(tied):
        best[tied] = _ordered_by_context(best[tied], order[tied], at[tied])
    best = best[:, :MOST_POSITIONS]
    return magnitude.gather(1, best), at.gather(1, best[..., None].expand(-1, -1, at.shape[2]))


def _ordered_by_context(best: torch.Tensor, order: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Sort positions by their order, and ties by the ids of their contexts."""
    at = at.gather(1, best[..., None].expand_as(at))
    places = torch.arange(at.shape[1], device=at.device).expand_as(best)
    for key in [*at.unbind(2)[:0:-1], -order]:  # a stable sort by each, the most important one last
        places = places.gather(1, key.gather(1, places).argsort(dim=1, stable=True))
    return best.gather(1, places)


def merge_token_statistics(first: TokenStatistics, second: TokenStatistics) -> TokenStatistics:
    ids = torch.cat([first["tokens.ids"], second["tokens.ids"]]).unique()
    statistics = {"tokens.ids": ids}
    rows = torch.searchsorted(ids, second["tokens.ids"])
    places = torch.searchsorted(first["tokens.ids"], ids).clamp_(max=len(first["tokens.ids"]) - 1)
    new = first["tokens.ids"][places] != ids
    for name, value in first.items():
        kind = name.rpartition(".")[2]
        if kind in SUMS:
            statistics[name] = value.index_select(0, places)
            statistics[name][new] = 0
            joined = torch.maximum if kind == "token_max" else torch.add
            statistics[name][rows] = joined(statistics[name][rows], second[name])
        elif kind in EXTREMES:
            pairs = ((part[name], part[f"{name}_at"]) for part in (first, second))
            statistics[name], statistics[f"{name}_at"] = _best(
                name, *(torch.cat(pair, 1) for pair in zip(*pairs, strict=True))
            )
    return statistics


def token_name(token: int, names: TokenNames) -> str:
    """Return the text of a token, or its number if it has none."""
    return names[token][0] if token in names else f"#{token}"


def before_patches(names: TokenNames) -> list[str]:
    """Return the names of the positions before the patches of a picture, in order."""
    return [name for _, (name, kind) in sorted(names.items()) if kind in (CLASS, REGISTER)]


def patch_grid(names: TokenNames) -> tuple[int, int]:
    """Return the numbers of rows and columns of patches.

    Raises:
        UserError: the names are not those of positions in pictures.
    """
    places = [tuple(map(int, name.split()[1].split(","))) for name, kind in names.values() if kind == PATCH]
    if not places:
        raise UserError("the trace knows no patches; trace a vision model with tokens=True (--tokens)")
    rows, columns = zip(*places, strict=True)
    return max(rows) + 1, max(columns) + 1


def by_token(statistics: TokenStatistics, state: str, feature: int, names: TokenNames) -> pd.DataFrame:
    """Return one row per token, the strongest first; position 0 is a row of its own, with any token."""
    ids, positions = statistics["tokens.ids"].numpy(), statistics["tokens.positions"].numpy()
    sums, largest = (statistics[f"{state}.{name}"][:, feature].numpy() for name in ("token_sum", "token_max"))
    name, kind = names.get(0, ("", ""))
    first = name if kind in (CLASS, PATCH) else "position 0"  # in pictures, position 0 is always the same place
    labels = [names.get(token, (first, FIRST)) for token in ids.tolist()]
    table = pd.DataFrame(
        {
            "token": [token if token in names else -1 for token in ids.tolist()],
            "token_text": [name for name, _ in labels],
            "type": [kind for _, kind in labels],
            "share": positions / positions.sum(),
            "mean": sums / positions,
            "max": largest,
        }
    )
    return table.sort_values(["mean", "token"], ascending=[False, True], ignore_index=True)


def by_type(statistics: TokenStatistics, state: str, feature: int, names: TokenNames) -> pd.DataFrame:
    """Return one row per type of tokens that occurred, in the order of `TYPES`."""
    table = by_token(statistics, state, feature, names)
    table["mean"] *= table["share"]
    groups = table.groupby("type").agg({"share": "sum", "mean": "sum", "max": "max"})
    groups["mean"] /= groups["share"]
    return groups.reindex([kind for kind in TYPES if kind in groups.index]).reset_index()


def by_position(statistics: TokenStatistics, state: str, feature: int, names: TokenNames) -> pd.DataFrame:
    """Return one row per strongest and weakest position, the strongest first, with its context."""
    rows = []
    for extreme in EXTREMES:
        places = (statistics[f"{state}.{extreme}{at}"][feature].tolist() for at in ("", "_at"))
        for magnitude, (position, *window) in zip(*places, strict=True):
            if magnitude >= 0:
                token = window[BEFORE]
                rows.append((extreme, magnitude, position, token, token_name(token, names), context_of(window, names)))
    return pd.DataFrame(rows, columns=["extreme", "magnitude", "position", "token", "token_text", "context"])


def context_of(window: list[int], names: TokenNames) -> str:
    """Return the text of a window in one line, its own token between « and »."""
    texts = [_unquoted(names[token][0]) if token in names else "" for token in window]
    if names[window[BEFORE]][1] in (REGISTER, PATCH):  # these names have no spaces of their own
        texts = [f" {text}" * bool(text) for text in texts]
    before, token, after = "".join(texts[:BEFORE]), texts[BEFORE], "".join(texts[BEFORE + 1 :])
    blank = " " if token.startswith(" ") and token.strip() else ""  # the token's leading space is put before the mark
    return f"{before}{blank}«{token.removeprefix(blank)}»{after}"


def _unquoted(name: str) -> str:
    quoted = len(name) > 1 and name[0] in "'\"" and name[0] == name[-1]
    return (name[1:-1] if quoted else name).replace("␣", " ")


BY = {"token": by_token, "type": by_type, "position": by_position}


def table_of(
    statistics: TokenStatistics, states: list[str], names: TokenNames, feature: int, by: str, role: str
) -> pd.DataFrame:
    """Return the table of `outliers.tracing.result.Trace.tokens`."""
    if not names:
        raise UserError("the trace does not know which tokens carry a feature; trace with tokens=tokenizer")
    if by not in BY:
        raise UserError(f"tokens by '{by}'; expected by {', '.join(map(repr, BY))}")
    if role not in states:
        raise UserError(f"no tokens of role '{role}'; this trace has {' and '.join(states)}")
    features = statistics[f"{role}.token_max"].shape[1]
    if feature not in range(features):
        raise UserError(f"feature {feature} is out of range; the residual stream has features 0 to {features - 1}")
    return BY[by](statistics, role, int(feature), names)
