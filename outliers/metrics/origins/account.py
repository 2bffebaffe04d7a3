"""The account of features of the residual stream: sums of what was written, which add up over parts of a text."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from outliers.metrics.origins import PART_OF

PLACES = 3  # where a writer writes most, at most
DIGITS = ".7g"  # of float32

Key = tuple[int | None, str]  # layer, None before all of them; and what is summed there
Parts = dict[Key, np.ndarray]


class Sums(NamedTuple):
    """Sums of n columns over a text.

    total: (2 + chosen positions, n) float64, over positions after the first, at the first, and at each chosen one.
    magnitude: (n,) float64, of |x| after the first. largest: (n, PLACES) float32, where |x| is largest after the first;
    at: (n, PLACES, 2) int32, position and token id there.
    """

    total: torch.Tensor
    magnitude: torch.Tensor
    largest: torch.Tensor
    at: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, masks: torch.Tensor, ids: torch.Tensor) -> "Sums":
        """Those of a sequence: x (T, n) float32, masks (2 + chosen, T) float32, ids (T,)."""
        columns = x[1:].T.contiguous()
        magnitudes = columns.abs()
        best = magnitudes.topk(min(PLACES, len(x) - 1), 1).indices
        at = torch.stack([best + 1, ids[1:][best]], 2).int()
        return cls((masks @ x).double(), magnitudes.sum(1).double(), columns.gather(1, best), at)

    def joined(self, other: "Sums") -> "Sums":
        """Those of both texts; of places that are alike the earlier text's come first."""
        largest, at = torch.cat([self.largest, other.largest], 1), torch.cat([self.at, other.at], 1)
        best = largest.abs().sort(dim=1, descending=True, stable=True).indices[:, :PLACES]
        at = at.gather(1, best[..., None].expand(-1, -1, 2))
        return Sums(self.total + other.total, self.magnitude + other.magnitude, largest.gather(1, best), at)

    def cpu(self) -> "Sums":
        """The same in the host's memory."""
        return Sums(*(part.cpu() for part in self))


class Gains(NamedTuple):
    """The gain of a norm at some features, (features,), and its place among all.

    reads: roles whose projections read its output. median: of |gain| over all features; ranks: 1 where it is largest.
    """

    reads: tuple[str, ...]
    gains: list[float]
    median: float
    ranks: list[int]


class Terms(NamedTuple):
    """Contributions of writers of one kind to some features: means (2 + chosen, writers, features), mean magnitudes and
    largest terms (writers, features, …) with their places."""

    means: np.ndarray
    magnitudes: np.ndarray
    largest: np.ndarray
    at: np.ndarray


@dataclass(eq=False)
class Account:
    """Contributions to features of the residual stream over a text; accounts of parts of a text add up.

    features: those asked for; controls: random others, whose writers are what is ordinary. positions: the chosen ones.
    counts: (2 + chosen,) float64, how many positions were after the first, the first, and the chosen ones.

    sums, by layer (None before all) and what is summed; columns are features, those asked for before the controls, or
    (writers, features): "state", before the layer; the writers of `PARTS`; "before NORM" and "behind NORM". Those of
    "neuron" are the neurons themselves, which `weights` by layer, (features, neurons), multiply. gains: by layer and
    norm. names: of token ids, where they are known.
    """

    features: list[int]
    controls: list[int]
    positions: list[int]
    counts: torch.Tensor
    sums: dict[Key, Sums]
    weights: dict[int, torch.Tensor]
    gains: dict[tuple[int, str], Gains]
    names: dict[int, str] = field(default_factory=dict)

    def merge(self, other: "Account") -> "Account":
        """The account of both texts, of the same model and features."""
        sums = {key: sums_here.joined(other.sums[key]) for key, sums_here in self.sums.items()}
        counts, names = self.counts + other.counts, self.names | other.names
        return Account(self.features, self.controls, self.positions, counts, sums, self.weights, self.gains, names)

    @property
    def columns(self) -> list[int]:
        """The features of all columns."""
        return [*self.features, *self.controls]

    @property
    def layers(self) -> int:
        """Number of decoder layers of the model."""
        return sum(kind == "state" for _, kind in self.sums) - 1

    def writers(self, neurons: int = 3) -> pd.DataFrame:
        """One row a writer: `feature`, `layer`, `writer` (its kind) and `index`; `value`, `first` and `magnitude`, its
        mean term after the first position, at the first, and its mean magnitude; `at`, at the chosen ones.

        neurons: how many of a layer are named, those with the largest means at some place; the rest is one writer.
        """
        return pd.DataFrame(record for record in self.records(neurons) if record["metric"] == "origins.writer")

    def states(self) -> pd.DataFrame:
        """One row a feature and layer: its state before the layer, and, with their number as layer, after all."""
        return pd.DataFrame(record for record in self.records() if record["metric"] == "origins.state")

    def gates(self) -> pd.DataFrame:
        """One row a feature and norm in front of projections: `value`, its gain, with `median` and `rank` among all;
        `before` and `behind` it the mean after the first position, `first_before` and `first_behind` at the first."""
        return pd.DataFrame(record for record in self.records() if record["metric"] == "origins.gate")

    @property
    def rest(self) -> np.ndarray:
        """(features,): the largest difference of a state and the sum of what wrote it, of any layer and mean, as a
        share of the feature's largest state."""
        return self._rest(self._parts())

    def records(self, neurons: int = 3) -> list[dict]:
        """A flat dictionary for each state, writer and gate of each feature, for what is ordinary, and for the rest."""
        by_feature = [[*self._states(number), *self._gates(number)] for number in range(len(self.features))]
        for key in self._written():
            terms = self._terms(key)
            for number, records in enumerate(by_feature):
                records += self._writers(key, terms, number, neurons)
        parts = self._parts()
        for records, rest in zip(by_feature, self._rest(parts), strict=True):
            records.append({"metric": "origins.rest", "value": _short(rest)})
        pairs = zip(self.features, by_feature, strict=True)
        with_features = [{**record, "feature": feature} for feature, records in pairs for record in records]
        return [*with_features, *self._ordinary(parts)]

    def _written(self) -> list[Key]:
        """Those of the sums that are of writers, in the order in which they write."""
        keys = [key for key in self.sums if key[1] in PART_OF]
        return sorted(keys, key=lambda key: (-1 if key[0] is None else key[0], [*PART_OF].index(key[1])))

    def _means(self, key: Key) -> np.ndarray:
        return (self.sums[key].total / self.counts[:, None]).numpy()

    def _terms(self, key: Key) -> Terms:
        layer, kind = key
        sums, count = self.sums[key], len(self.columns)
        means, magnitudes = self._means(key), sums.magnitude.numpy() / self.counts[0].item()
        largest, at = sums.largest.numpy(), sums.at.numpy()
        if kind == "neuron":
            weights = self.weights[layer].double().numpy().T
            at = np.broadcast_to(at[:, None], (len(at), count, *at.shape[1:]))
            largest = largest[:, None] * weights[..., None]
            return Terms(means[..., None] * weights, magnitudes[:, None] * abs(weights), largest, at)
        shape = (-1, count)
        means, magnitudes = means.reshape(len(means), *shape), magnitudes.reshape(shape)
        return Terms(means, magnitudes, *(part.reshape(*shape, *part.shape[1:]) for part in (largest, at)))

    def _parts(self) -> Parts:
        """By layer and part what all of its writers write, (2 + chosen, columns)."""
        written: Parts = {}
        for layer, kind in self._written():
            key = layer, PART_OF[kind]
            written[key] = written.get(key, 0) + self._terms((layer, kind)).means.sum(1)
        return written

    def _rest(self, parts: Parts) -> np.ndarray:
        states = np.stack([self._means((layer, "state")) for layer in range(self.layers + 1)])
        written = np.zeros_like(states)
        for (layer, _), whole in parts.items():
            written[0 if layer is None else layer + 1] += whole
        rest = np.abs(states - written.cumsum(0)).max((0, 1))
        return (rest / np.abs(states).max((0, 1)).clip(1e-30))[: len(self.features)]

    def _states(self, number: int) -> Iterator[dict]:
        for layer in range(self.layers + 1):
            sums = self.sums[layer, "state"]
            record = {
                "metric": "origins.state",
                "layer": layer,
                **self._values(self._means((layer, "state"))[:, number]),
            }
            yield record | {"magnitude": _short(sums.magnitude[number] / self.counts[0])}

    def _gates(self, number: int) -> Iterator[dict]:
        for (layer, norm), gains in self.gains.items():
            before, behind = (self._means((layer, f"{side} {norm}"))[:, number] for side in ("before", "behind"))
            yield {
                "metric": "origins.gate",
                "layer": layer,
                "norm": norm,
                "role": "+".join(gains.reads),
                "value": _short(gains.gains[number]),
                "median": _short(gains.median),
                "rank": gains.ranks[number],
                "before": _short(before[0]),
                "behind": _short(behind[0]),
                "first_before": _short(before[1]),
                "first_behind": _short(behind[1]),
            }

    def _writers(self, key: Key, terms: Terms, number: int, neurons: int) -> Iterator[dict]:
        layer, kind = key
        place = {"metric": "origins.writer", **({} if layer is None else {"layer": layer})}
        means = terms.means[..., number]
        indices = range(means.shape[1])
        if kind == "neuron":
            indices = sorted({index for row in abs(means) for index in np.argsort(-row, kind="stable")[:neurons]})
        for index in indices:
            at = terms.at[index, number]
            yield {
                **place,
                "writer": kind,
                **({"index": int(index)} if kind in ("head", "neuron", "expert") else {}),
                **self._values(means[:, index]),
                "magnitude": _short(terms.magnitudes[index, number]),
                "largest": [_short(value) for value in terms.largest[index, number]],
                "largest_positions": at[:, 0].tolist(),
                "largest_tokens": [self.names.get(token, f"#{token}") for token in at[:, 1].tolist()],
            }
        if len(indices) < means.shape[1]:
            others = means.sum(1) - means[:, list(indices)].sum(1)
            yield {**place, "writer": "other neurons", "count": means.shape[1] - len(indices), **self._values(others)}

    def _values(self, means: np.ndarray) -> dict:
        chosen = {"at": [_short(value) for value in means[2:]]} if self.positions else {}
        return {"value": _short(means[0]), "first": _short(means[1]), **chosen}

    def _ordinary(self, parts: Parts) -> Iterator[dict]:
        """Contribution of a part of a layer to a control, and the state before it: medians over the controls of the
        magnitudes of means."""
        states = {(layer, "state"): self._means((layer, "state")) for layer in range(self.layers + 1)}
        for (layer, part), means in (parts | states).items() if self.controls else ():
            value, first = np.median(abs(means[:2, len(self.features) :]), 1)
            place = {} if layer is None else {"layer": layer}
            yield {"metric": "origins.ordinary", **place, "part": part, "value": _short(value), "first": _short(first)}


def _short(value: float) -> float:
    return float(f"{float(value):{DIGITS}}")
