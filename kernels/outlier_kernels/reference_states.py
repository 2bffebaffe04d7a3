"""The reference for the statistics of a trace's hidden states, in plain torch."""

import numpy as np
import torch

from outlier_kernels.states import HIT, NotFinite, State, Statistics

IN_CACHE = 1 << 16  # float64 entries at once on a CPU, two to three times as fast as all at once; a GPU takes all


def add(state: State, alpha: float, listed: bool = True) -> torch.Tensor:
    """See `dispatch.add_state`."""
    x, kept, statistics = state.x.float(), state.kept, state.statistics
    low, high = x.amin(0), x.amax(0)
    by_feature = torch.maximum(-low, high)
    check_finite(by_feature)
    columns = (by_feature >= alpha).nonzero()[:, 0]
    candidates = x[:, columns]
    hit = candidates.abs() >= alpha
    hits = torch.zeros_like(low, dtype=torch.int64).index_copy_(0, columns, hit.sum(0))
    if kept is not None and kept.dtype == torch.bool:
        kept[:, columns.to(kept.device)] |= hit.to(kept.device)
    elif kept is not None:
        kept.copy_(torch.maximum(kept.to(x), x.abs()))
    torch.minimum(statistics["min"], low, out=statistics["min"])
    torch.maximum(statistics["max"], high, out=statistics["max"])
    join_largest(statistics, x, by_feature, state.ids)
    if len(x) > 1:
        statistics["rest.max"].copy_(torch.maximum(statistics["rest.max"], x[1:].abs().amax()))
    statistics["hits"] += hits
    statistics["sequences_hit"] += hits.clamp(max=1)
    for name, value in moments(x).items():
        statistics[name] += value
    if listed:
        state.found.append(state.label, _values_of(x, hits, alpha))
    return hits


def _values_of(x: torch.Tensor, hits: torch.Tensor, alpha: float) -> np.ndarray:
    """List the hits of a state in any order, (hits,) of `states.HIT`; hits: their number in each feature."""
    columns = hits.nonzero()[:, 0]
    candidates = x.index_select(1, columns)
    hit = candidates.abs() >= alpha
    values = np.empty(int(hit.sum()), HIT)
    values["feature"], values["value"] = columns.expand_as(hit)[hit].cpu(), candidates[hit].cpu()
    return values


def add_residual(state: State, limits: tuple[float, float], massive: torch.Tensor) -> None:
    """See `dispatch.add_residual`."""
    above, ratio = limits
    x, kept, statistics = state.x.float(), state.kept, state.statistics
    magnitude = x.abs()
    by_feature = magnitude.amax(0)
    check_finite(by_feature)
    middle = magnitude.median()  # the lower of two middle values
    if kept is not None:
        kept.copy_(torch.maximum(kept.to(x), magnitude))
    join_largest(statistics, x, by_feature, state.ids)
    largest = by_feature.amax().double()
    statistics["sum_of_max"] += largest
    statistics["sum_of_ratios"] += largest / middle
    at_places = (magnitude > above) & (magnitude >= ratio * middle)
    statistics["massive"] += at_places.sum(0)
    massive += at_places.sum(1)


def moments(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return power sums by feature and the kurtosis of one hidden state (tokens, features), in float64.

    Returns:
        `sum` and `squares` (features,); `squares_rest`, the squares without position 0; `kurtosis_tensor` over all
        entries and `kurtosis_token`, over the features of a token and summed over tokens, each (2,): with all positions
        and without position 0.
    """
    rows = len(x) if x.is_cuda else max(1, IN_CACHE // x.shape[1])
    sums, sums_of_squares, by_token = 0, 0, []
    for part in x.split(rows):
        part = part.double()
        squares = part * part
        sums, sums_of_squares = sums + part.sum(0), sums_of_squares + squares.sum(0)
        powers = part.sum(1), squares.sum(1), torch.linalg.vecdot(squares, part), torch.linalg.vecdot(squares, squares)
        by_token.append(torch.stack(powers))
    return {
        "sum": sums,
        "squares": sums_of_squares,
        "squares_rest": sums_of_squares - x[0].double().square(),
        **kurtoses(torch.cat(by_token, 1), x.shape[1]),
    }


def kurtoses(by_token: torch.Tensor, features: int) -> dict[str, torch.Tensor]:
    """Return `kurtosis_tensor` and `kurtosis_token`, each with all positions and without position 0, from the power
    sums of each token (4, tokens)."""
    of_tokens = kurtosis(by_token / features)
    of_tensor = [kurtosis(by_token[:, first:].mean(1) / features) for first in (0, 1)]
    return {
        "kurtosis_tensor": torch.stack(of_tensor),
        "kurtosis_token": torch.stack([of_tokens.sum(), of_tokens[1:].sum()]),
    }


def kurtosis(means: torch.Tensor) -> torch.Tensor:
    """Return E[(x − μ)⁴] / σ⁴ from the means of x, x², x³ and x⁴ (4, …); 1, the smallest kurtosis, if x is constant."""
    mean, square, cube, fourth = means
    variance = square - mean**2
    central_fourth = fourth - 4 * mean * cube + 6 * mean**2 * square - 3 * mean**4
    constant = variance <= 1e-14 * square
    return torch.where(constant, 1.0, central_fourth / torch.where(constant, 1.0, variance) ** 2)


def attention_sums(query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    """See `dispatch.attention_sums`."""
    keys = key[0].float().repeat_interleave(query.shape[1] // key.shape[1], 0)
    scores = query[0].float() @ keys.mT * scaling
    return scores.masked_fill_(torch.ones_like(scores[0]).triu_(1).bool(), -torch.inf).softmax(-1).sum(1)


def check_finite(by_feature: torch.Tensor) -> None:
    """Raise NotFinite if the largest |x| of a feature (features,) is NaN or inf."""
    bad = ~torch.isfinite(by_feature)
    if bad.any():
        raise NotFinite(int(bad.nonzero()[0]))


def join_largest(statistics: Statistics, x: torch.Tensor, by_feature: torch.Tensor, ids: torch.Tensor) -> None:
    """Replace the largest entry so far by the largest entry of x, if its numbers (magnitude, value, feature, position,
    token) are lexicographically larger.

    by_feature: the largest |x| of each feature (features,). ids: the tokens (tokens,).
    """
    # Tensors of one element: reading a number would make the host wait for the device.
    feature = by_feature.argmax(0, keepdim=True)
    column = x.index_select(1, feature)[:, 0]
    position = column.abs().argmax(0, keepdim=True)
    entry = by_feature[feature], column[position], feature, position, ids[position]
    entry, largest = torch.cat([value.double() for value in entry]), statistics["largest"]
    decides = (entry != largest).int().argmax(0, keepdim=True)
    largest.copy_(torch.where(entry[decides] > largest[decides], entry, largest))
