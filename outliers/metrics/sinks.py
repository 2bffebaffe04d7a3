"""Heads that attend to the first position, and the margin by which they prefer it."""

import torch

from outliers.criterion import SINK
from outliers.metrics.attention import AttentionComputation, Visits
from outliers.metrics.measurement import float_digits


def _measure(probabilities: torch.Tensor, by_mask: torch.Tensor, cross: bool) -> torch.Tensor:
    """Sum the attention to the first position, and its margins, by head.

    Returns float64 (heads, 4) for probabilities (1, heads, queries, keys): the attention that queries after the first
    give to the first position, the number of queries that can see it, the sum of the margins, and the number of
    queries with a margin. In cross-attention the first query counts too, as it is no position of the keys.

    The margin of a query is log p(first) minus the mean of log p over the other keys that it sees. A number that is
    added to all logits of a query, such as by its own bias, changes neither p nor the margin; a bias of queries and
    keys that favours the first position does. A query counts if it sees the first key and another one. A key to which
    no head gives any probability is taken as masked, as outside of a window, or by a variant. Probabilities below the
    smallest normal number are clamped to it.

    by_mask: which keys each query can see by the masks of the model, bool (queries, keys).
    """
    queries, by_mask = (seen if cross else seen[..., 1:, :] for seen in (probabilities[0], by_mask))
    visible = (queries > 0).any(0)
    others, least = visible[:, 1:], torch.finfo(queries.dtype).tiny
    count = others.sum(-1)
    counts = visible[:, 0] & (count > 0)
    by_head = []
    for attended_by_head in queries:  # one head at a time, which fits a core's cache
        logs = attended_by_head.clamp(min=least).log_()
        margins = logs[:, 0] - (logs[:, 1:] * others).sum(-1, dtype=torch.float64) / count
        share = attended_by_head[:, 0].sum(dtype=torch.float64)
        margin = margins.where(counts, 0).sum()
        by_head.append(torch.stack([share, by_mask[:, 0].sum(), margin, counts.sum()]))
    return torch.stack(by_head)


def _by_ablation(visits: Visits) -> list[torch.Tensor]:
    """Return the sums of `_measure` for each ablation by layer, float64 (layers, heads, 4)."""
    by_layer = visits.measured.new_zeros(int(visits.layers.max()) + 1, *visits.measured.shape[1:])
    return list(by_layer.index_add_(0, visits.layers, visits.measured).unbind(1))


def _values(results: list[torch.Tensor]) -> list[dict]:
    sums = sum(results)
    layers = sums[:, 0, 1].nonzero()[:, 0]  # the layers of this stack
    sums = sums[layers]
    shares, margins = sums[..., 0] / sums[..., 1], sums[..., 2] / sums[..., 3]
    present = sums[..., 1] > 0  # some layers may have fewer heads
    sinks = (shares > SINK).double()[present].mean()
    # heads of a layer that gives the first position nothing have no margin
    whole = {"value": shares[present].mean(), "margin": margins[present].nanmean(), "heads": sinks}
    values = [{"metric": "sinks", "unit": "1", **{name: _short(value) for name, value in whole.items()}}]
    for row, layer in enumerate(layers.tolist()):
        for head in present[row].nonzero()[:, 0].tolist():
            share, margin = shares[row, head], margins[row, head]
            value = {"value": _short(share), "unit": "1", "margin": _short(margin), "layer": layer, "head": head}
            values.append({"metric": "sinks.head", **value})
    return values


def _short(value: torch.Tensor) -> float | None:
    """Round a value; None if no query counts, as when the first position is masked."""
    return None if value.isnan() else float_digits(value)


COMPUTATION = AttentionComputation(_measure, _by_ablation, _values)
