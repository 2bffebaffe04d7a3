"""Queries, keys and values over a text: sums by head and channel, which add up over parts of the text."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from outliers.errors import not_finite
from outliers.metrics.keys import AFTER, BEFORE

FEATURES = 3  # that write a channel, at most
TINY = 1e-30  # in the place of a median of 0
DIGITS, SHORT = ".7g", ".4g"  # of a number; of one of many

Place = tuple[int, str]  # layer and role
Channel = tuple[int, int, int]  # layer, head and channel
Key = tuple[int, str, str]  # layer, role and side


class Sums(NamedTuple):
    """Sums of channels over positions, each (heads, head size).

    total, squares: float64, of x and x². largest: float64, the entry of the largest magnitude, with its sign; position:
    int64, where it is in its sequence. count: of positions.
    """

    total: torch.Tensor
    squares: torch.Tensor
    largest: torch.Tensor
    position: torch.Tensor
    count: int

    @classmethod
    def of(cls, x: torch.Tensor) -> "Sums":
        """Those of one sequence, x (T, heads, head size)."""
        x = x.double()
        position = x.abs().argmax(0)
        largest = x.gather(0, position[None])[0]
        return cls(x.sum(0).cpu(), x.square().sum(0).cpu(), largest.cpu(), position.cpu(), len(x))

    def joined(self, other: "Sums") -> "Sums":
        """Those of both texts; of equal magnitudes the earlier text's position stays."""
        larger = other.largest.abs() > self.largest.abs()
        return Sums(
            self.total + other.total,
            self.squares + other.squares,
            other.largest.where(larger, self.largest),
            other.position.where(larger, self.position),
            self.count + other.count,
        )

    @property
    def magnitudes(self) -> torch.Tensor:
        """The largest |x| of each channel."""
        return self.largest.abs()

    @property
    def means(self) -> torch.Tensor:
        return self.total / self.count

    @property
    def mean_squares(self) -> torch.Tensor:
        return self.squares / self.count

    @property
    def constant(self) -> torch.Tensor:
        """mean² / mean of squares: 1 where a channel is the same at all positions, as where it is 0."""
        return torch.where(self.squares > 0, self.means.square() / self.mean_squares, 1.0)

    def first(self, count: int) -> list[tuple[int, int]]:
        """Head and number of the channels with the largest magnitudes."""
        order = self.magnitudes.flatten().sort(descending=True, stable=True).indices[:count].tolist()
        return [divmod(place, self.largest.shape[1]) for place in order]


@dataclass(eq=False)
class Channels:
    """Statistics of queries, keys and values over a text; those of parts of a text add up.

    sums: by layer, role and side. changed: where attention multiplies something else than projections put out. biases:
    of projections, float64 (heads, head size). inputs: what each layer's key projection reads, summed over positions,
    float64 (features,). weights: of channels of keys that are large as projections put them out, the row of the weight,
    float64 (features,).
    """

    sums: dict[Key, Sums] = field(default_factory=dict)
    changed: set[Place] = field(default_factory=set)
    biases: dict[Place, torch.Tensor] = field(default_factory=dict)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    weights: dict[Channel, torch.Tensor] = field(default_factory=dict)

    def add(self, place: Place, before: torch.Tensor, after: torch.Tensor) -> None:
        """Let states (T, heads, head size) of a sequence join those of the others.

        Raises:
            BrokenModel: they are no finite numbers.
        """
        for side, x in ((BEFORE, before), (AFTER, after)):
            sums = Sums.of(x)
            if not sums.largest.isfinite().all():
                raise not_finite(f"in the {place[1]} of layer {place[0]}")
            key = *place, side
            self.sums[key] = self.sums[key].joined(sums) if key in self.sums else sums
        if not torch.equal(before, after):
            self.changed.add(place)

    def merge(self, other: "Channels") -> "Channels":
        """Those of both texts, of the same model."""
        sums = {key: sums.joined(other.sums[key]) for key, sums in self.sums.items()}
        inputs = {layer: total + other.inputs[layer] for layer, total in self.inputs.items()}
        return Channels(sums, self.changed | other.changed, self.biases, inputs, self.weights | other.weights)

    def records(self, count: int) -> list[dict]:
        """A flat dictionary for each layer, head, and each of the largest channels of a layer, which are `count`."""
        kept = [key for key in sorted(self.sums, key=lambda key: key[0]) if key[2] == AFTER or key[:2] in self.changed]
        rows = [record for key in kept for record in self._of(key, count)]
        keys = [row for row in rows if (row["metric"], row["role"], row["side"]) == ("keys.head", "keys", AFTER)]
        most = max(row["value"] / max(row["median"], TINY) for row in keys)
        return [{"metric": "keys", "value": _short(most)}, *rows]

    def _of(self, key: Key, count: int) -> Iterator[dict]:
        layer, role, side = key
        place = {"layer": layer, "role": role, "side": side}
        for record in (self._layer(key), *self._heads(key), *self._channels(key, count)):
            yield record | place

    def _layer(self, key: Key) -> dict:
        sums, bias = self.sums[key], self._bias(key)
        share = {} if bias is None else _of_bias(bias.norm(), sums.mean_squares.sum())
        return {"metric": "keys.layer", "value": _short(sums.magnitudes.max()), **_median(sums, slice(None)), **share}

    def _heads(self, key: Key) -> Iterator[dict]:
        sums = self.sums[key]
        for head, magnitudes in enumerate(sums.magnitudes):
            place = {"head": head, "channel": int(magnitudes.argmax())}
            all_of_them = {"magnitudes": [_short(size, SHORT) for size in magnitudes]} if key[1] != "queries" else {}
            value = _short(magnitudes.max())
            yield {"metric": "keys.head", "value": value, **_median(sums, head), **place, **all_of_them}

    def _channels(self, key: Key, count: int) -> Iterator[dict]:
        sums, bias = self.sums[key], self._bias(key)
        for at in sums.first(count):
            head, channel = at
            yield {
                "metric": "keys.channel",
                "value": _short(sums.magnitudes[at]),
                "median": _median(sums, head)["median"],
                "mean": _short(sums.means[at]),
                "rms": _short(sums.mean_squares[at].sqrt()),
                "constant": _short(sums.constant[at]),
                **({} if bias is None else _of_bias(bias[at], sums.mean_squares[at])),
                "head": head,
                "channel": channel,
                "position": int(sums.position[at]),
                **(self._features((key[0], *at), sums.count) if key[1] == "keys" and self._is_projected(key) else {}),
            }

    def _is_projected(self, key: Key) -> bool:
        """Whether this is what the projection puts out."""
        return key[2] == BEFORE or key[:2] not in self.changed

    def _bias(self, key: Key) -> torch.Tensor | None:
        """The bias of the projection, where it is a part of this."""
        return self.biases.get(key[:2]) if self._is_projected(key) else None

    def _features(self, channel: Channel, count: int) -> dict:
        """The input features that write most into the mean of a channel, with the terms weight · mean."""
        if channel not in self.weights:
            return {}
        terms = self.weights[channel] * self.inputs[channel[0]] / count
        features = terms.abs().sort(descending=True, stable=True).indices[:FEATURES]
        return {"features": features.tolist(), "terms": [_short(term) for term in terms[features]]}


def _median(sums: Sums, heads: int | slice) -> dict:
    """The value of the median channel of some heads."""
    by_channel = {"median": sums.magnitudes, "rms": sums.mean_squares.sqrt(), "constant": sums.constant}
    return {name: _short(values[heads].median()) for name, values in by_channel.items()}


def _of_bias(bias: torch.Tensor, mean_square: torch.Tensor) -> dict:
    """A bias, or the norm of a layer's, and its share of the mean square: above 1 where the rest takes some back."""
    share = bias**2 / mean_square if mean_square > 0 else 0.0
    return {"bias": _short(bias), "bias_share": _short(share)}


def _short(value: torch.Tensor | float, digits: str = DIGITS) -> float:
    return float(f"{float(value):{digits}}")
