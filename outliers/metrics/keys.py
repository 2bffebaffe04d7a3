"""Magnitude and constancy of queries, keys and values by head and channel, and share of biases (docs/caches.md)."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from outliers.errors import UserError, not_finite
from outliers.metrics.measurement import CellMeasurement, float_digits
from outliers.metrics.records import AFTER, ATTENDED, BEFORE, TINY
from outliers.models.anatomy.parts import StreamReader, stream_readers
from outliers.models.anatomy.weights import parameter_of
from outliers.models.attention import attentions, is_replaceable, product_hooks
from outliers.models.decoder import inference, watched_pass
from outliers.models.skeleton import skeleton
from outliers.models.stream import AS_IT_IS, Variant
from outliers.quantization.linear import stored_weight
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache

FEATURES = 3  # listed features that write a channel, at most
SHORT = ".4g"  # format of numbers in long lists

LayerRole = tuple[int, str]  # layer and role
Channel = tuple[int, int, int]  # layer, head and channel
StateKey = tuple[int, str, str]  # layer, role and side


class ChannelSums(NamedTuple):
    """Sums of channels over positions, each (heads, head size).

    total, squares: float64, of x and x². largest: float64, the entry of the largest magnitude, with its sign; position:
    int64, its position in its sequence. count: number of positions.
    """

    total: torch.Tensor
    squares: torch.Tensor
    largest: torch.Tensor
    position: torch.Tensor
    count: int

    @classmethod
    def of(cls, x: torch.Tensor) -> "ChannelSums":
        """Return the sums of one sequence, x (T, heads, head size)."""
        x = x.double()
        position = x.abs().argmax(0)
        largest = x.gather(0, position[None])[0]
        return cls(x.sum(0).cpu(), x.square().sum(0).cpu(), largest.cpu(), position.cpu(), len(x))

    def joined(self, other: "ChannelSums") -> "ChannelSums":
        """Return the sums of two texts; among equal magnitudes the earlier position stays."""
        larger = other.largest.abs() > self.largest.abs()
        return ChannelSums(
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
    def constancy(self) -> torch.Tensor:
        """mean² / mean of squares: 1 for a channel that is the same at all positions, also if it is always 0."""
        return torch.where(self.squares > 0, self.means.square() / self.mean_squares, 1.0)

    def largest_channels(self, count: int) -> list[tuple[int, int]]:
        """Return head and number of the channels with the largest magnitudes."""
        order = self.magnitudes.flatten().sort(descending=True, stable=True).indices[:count].tolist()
        return [divmod(place, self.largest.shape[1]) for place in order]


@dataclass(eq=False)
class Channels:
    """Statistics of queries, keys and values over a text; statistics of parts of a text can be merged.

    sums: by layer, role and side: before or after what attention does to a projection's output, such as the rotary
    embedding. changed: layers and roles in which attention changes it. biases: of projections, float64 (heads, head
    size). inputs: the sum over positions of the input of each layer's key projection, float64 (features,). weights: by
    channel of keys with large outputs of the projection, the row of its weight, float64 (features,).
    """

    sums: dict[StateKey, ChannelSums] = field(default_factory=dict)
    changed: set[LayerRole] = field(default_factory=set)
    biases: dict[LayerRole, torch.Tensor] = field(default_factory=dict)
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    weights: dict[Channel, torch.Tensor] = field(default_factory=dict)

    def add(self, place: LayerRole, before: torch.Tensor, after: torch.Tensor) -> None:
        """Add states (T, heads, head size) of one sequence, before and after what attention does to them.

        Raises:
            BrokenModel: a state is NaN or inf.
        """
        for side, x in ((BEFORE, before), (AFTER, after)):
            sums = ChannelSums.of(x)
            if not sums.largest.isfinite().all():
                raise not_finite(f"in the {place[1]} of layer {place[0]}")
            key = *place, side
            self.sums[key] = self.sums[key].joined(sums) if key in self.sums else sums
        if not torch.equal(before, after):
            self.changed.add(place)

    def merge(self, other: "Channels") -> "Channels":
        sums = {key: sums.joined(other.sums[key]) for key, sums in self.sums.items()}
        inputs = {layer: total + other.inputs[layer] for layer, total in self.inputs.items()}
        return Channels(sums, self.changed | other.changed, self.biases, inputs, self.weights | other.weights)

    def records(self, count: int) -> list[dict]:
        """Return a flat dictionary for each layer, each head, and each of the `count` largest channels of a layer."""
        kept = [key for key in sorted(self.sums, key=lambda key: key[0]) if key[2] == AFTER or key[:2] in self.changed]
        rows = [record for key in kept for record in self._of(key, count)]
        keys = [row for row in rows if (row["metric"], row["role"], row["side"]) == ("keys.head", "keys", AFTER)]
        most = max(row["value"] / max(row["median"], TINY) for row in keys)
        return [{"metric": "keys", "value": float_digits(most)}, *rows]

    def _of(self, key: StateKey, count: int) -> Iterator[dict]:
        layer, role, side = key
        place = {"layer": layer, "role": role, "side": side}
        for record in (self._layer_record(key), *self._head_records(key), *self._channel_records(key, count)):
            yield record | place

    def _layer_record(self, key: StateKey) -> dict:
        sums, bias = self.sums[key], self._bias(key)
        share = {} if bias is None else _bias_fields(bias.norm(), sums.mean_squares.sum())
        return {
            "metric": "keys.layer",
            "value": float_digits(sums.magnitudes.max()),
            **_median(sums, slice(None)),
            **share,
        }

    def _head_records(self, key: StateKey) -> Iterator[dict]:
        sums = self.sums[key]
        for head, magnitudes in enumerate(sums.magnitudes):
            place = {"head": head, "channel": int(magnitudes.argmax())}
            listed = {"magnitudes": [float_digits(size, SHORT) for size in magnitudes]} if key[1] != "queries" else {}
            value = float_digits(magnitudes.max())
            yield {"metric": "keys.head", "value": value, **_median(sums, head), **place, **listed}

    def _channel_records(self, key: StateKey, count: int) -> Iterator[dict]:
        sums, bias = self.sums[key], self._bias(key)
        for at in sums.largest_channels(count):
            head, channel = at
            yield {
                "metric": "keys.channel",
                "value": float_digits(sums.magnitudes[at]),
                "median": _median(sums, head)["median"],
                "mean": float_digits(sums.means[at]),
                "rms": float_digits(sums.mean_squares[at].sqrt()),
                "constant": float_digits(sums.constancy[at]),
                **({} if bias is None else _bias_fields(bias[at], sums.mean_squares[at])),
                "head": head,
                "channel": channel,
                "position": int(sums.position[at]),
                **(self._features((key[0], *at), sums.count) if key[1] == "keys" and self._is_projected(key) else {}),
            }

    def _is_projected(self, key: StateKey) -> bool:
        """Return whether the statistics are of the projection's output."""
        return key[2] == BEFORE or key[:2] not in self.changed

    def _bias(self, key: StateKey) -> torch.Tensor | None:
        """Return the bias of the projection, if the statistics are of its output."""
        return self.biases.get(key[:2]) if self._is_projected(key) else None

    def _features(self, channel: Channel, positions: int) -> dict:
        """Return the input features with the largest terms weight · mean of a channel over so many positions."""
        if channel not in self.weights:
            return {}
        terms = self.weights[channel] * self.inputs[channel[0]] / positions
        features = terms.abs().sort(descending=True, stable=True).indices[:FEATURES]
        return {"features": features.tolist(), "terms": [float_digits(term) for term in terms[features]]}


def _median(sums: ChannelSums, heads: int | slice) -> dict:
    """Return the statistics of the median channel of some heads."""
    by_channel = {"median": sums.magnitudes, "rms": sums.mean_squares.sqrt(), "constant": sums.constancy}
    return {name: float_digits(values[heads].median()) for name, values in by_channel.items()}


def _bias_fields(bias: torch.Tensor, mean_square: torch.Tensor) -> dict:
    """Return a bias, or a norm of biases, and its share of the output's mean square, above 1 if the rest of the output
    opposes the bias."""
    share = bias**2 / mean_square if mean_square > 0 else 0.0
    return {"bias": float_digits(bias), "bias_share": float_digits(share)}


@inference
def observed_channels(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], count: int = 3, variant: Variant = AS_IT_IS
) -> Channels:
    """Return statistics of queries, keys and values by head and channel, in one pass that keeps no state.

    They are taken of the projections' outputs, and of what attention multiplies, after the rotary embedding.

    Args:
        model: a model whose attention can be replaced, resident or streamed; it is not changed.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,).
        count: number of the largest key channels of a layer that are decomposed by input features.
        variant: a change of the model. A quantized cache changes what attention multiplies; the tokens of a prefix are
            not counted. Contributions of features use exact weights.

    Raises:
        UserError: the attention of the model cannot be replaced.
        BrokenModel: a state is NaN or inf.
    """
    check_shows(model)
    channels = Channels()
    watched_pass(model, blocks, partial(_hooks, channels, count), variant)
    return channels


def check_shows(model: PreTrainedModel) -> None:
    """Raise UserError unless hooks can observe what a model's attention multiplies; it may be on the meta device."""
    if not is_replaceable(model):
        raise UserError(
            f"queries, keys and values of '{model.config.model_type}', whose attention cannot be replaced in "
            "transformers; expected an architecture such as gpt2, llama, bert or vit"
        )
    for attention in attentions(model):
        if not {*ATTENDED} <= {part.name for part in stream_readers(model, attention.layer)}:
            raise UserError(
                f"'{attention.path}' of '{model.config.model_type}' makes no queries, keys and values of one state by "
                "a projection each; expected an architecture such as gpt2, llama, bert or vit"
            )


@contextmanager
def _hooks(channels: Channels, count: int, model: PreTrainedModel, layer: int | None) -> Iterator[None]:
    """Observe all layers of a model, or one, within this context; read the weights at its end."""
    numbers = [attention.layer for attention in attentions(model) if layer in (None, attention.layer)]
    observers = {number: _LayerObserver(channels, model, number) for number in numbers}
    with ExitStack() as stack:
        for observer in observers.values():
            stack.enter_context(observer.hooks())
        see = lambda number, *states_and_call: observers[number].see_attention(*states_and_call[:3])  # noqa: E731
        stack.enter_context(product_hooks(model, see, layer))
        yield
    for observer in observers.values():
        observer.take_apart(count)


class _LayerObserver:
    def __init__(self, channels: Channels, model: PreTrainedModel, layer: int):
        self.channels, self.layer = channels, layer
        self.parts = {part.name: part for part in stream_readers(model, layer) if part.name in ATTENDED}
        self.projected: dict[str, torch.Tensor] = {}

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as stack:
            for part in self.parts.values():
                hook = partial(self._see_projection, part)
                stack.callback(part.reader.module.register_forward_hook(hook).remove)
            yield

    def _see_projection(self, part: StreamReader, _module, inputs: tuple, output: torch.Tensor) -> None:
        self.projected[part.name] = output.flatten(0, -2)[:, part.outputs.to(output.device)]
        if part.name == "k":
            total = inputs[0].flatten(0, -2).double().sum(0).cpu()
            self.channels.inputs[self.layer] = self.channels.inputs.get(self.layer, 0) + total

    def see_attention(self, *states: torch.Tensor) -> None:
        for name, by_head in zip(ATTENDED, states, strict=True):  # (1, heads, T, head size), after those of a prefix
            before = self.projected.pop(name)
            after = by_head[0, :, -len(before) :].transpose(0, 1)
            self.channels.add((self.layer, ATTENDED[name]), before, after)

    def take_apart(self, count: int) -> None:
        """Keep the biases, and the weight rows of the largest key channels."""
        for name, part in self.parts.items():
            bias = parameter_of(_exact_module(part), "bias")
            if bias is not None:
                outputs = part.outputs.to(bias.device)
                self.channels.biases[self.layer, ATTENDED[name]] = bias.detach()[outputs].double().cpu()
        keys, sums = self.parts["k"], self.channels.sums.get((self.layer, "keys", BEFORE))
        weight = stored_weight(_exact_module(keys))
        if sums is not None and weight.is_floating_point():  # a layer of bitsandbytes has integer codes
            for head, channel in sums.largest_channels(count):
                row = weight.detach()[keys.outputs[head, channel]].double().cpu()
                self.channels.weights[self.layer, head, channel] = row


def _exact_module(part: StreamReader) -> nn.Module:
    """Return the exact projection, also of a quantized one."""
    return getattr(part.reader.module, "projection", part.reader.module)


class KeysMeasurement(CellMeasurement):
    """The measurement of channels, in one pass per cell."""

    def check(self, cell: Cell) -> None:
        check_shows(skeleton(cell.subject.config))

    def measure_cell(
        self, _model_cache: ModelCache, cell: Cell, model: PreTrainedModel, blocks: Iterable, variant: Variant
    ) -> Channels:
        return observed_channels(model, blocks, cell.metric.channels, variant)

    def values(self, cell: Cell, results: list[Channels]) -> list[dict]:
        return [value | {"unit": "1"} for value in reduce(Channels.merge, results).records(cell.metric.channels)]


MEASUREMENT = KeysMeasurement()
