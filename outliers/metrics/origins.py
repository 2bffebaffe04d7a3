"""The contributions to a feature of the residual stream, layer by layer, and the gains of norms at it."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outliers.errors import UserError
from outliers.metrics.measurement import OnePass, short
from outliers.metrics.records import PART_OF
from outliers.models.anatomy import (
    Layer,
    Projection,
    anatomy_of,
    check_features,
    check_one_stack,
    check_plain,
    family_of,
    features_of,
    heads_of,
    in_layer,
    layers_of,
    norms_are_in_the_residual_stream,
    stacks_of,
    width_of,
)
from outliers.models.anatomy.examples import Block
from outliers.models.anatomy.experts import number_of
from outliers.models.anatomy.row import config_of_stack
from outliers.models.anatomy.trust import check_sums
from outliers.models.anatomy.weights import parameter_of
from outliers.models.decoder import inference, watched_pass
from outliers.models.hooks import residual_hooks
from outliers.models.stream import AS_IT_IS, Variant, apart
from outliers.quantization.linear import stored_weight
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache
from outliers.terminal.progress import with_bar
from outliers.text.blocks import sequences
from outliers.text.tokens import visible_token

PLACES = 3  # listed positions with a writer's largest terms, at most

Key = tuple[int | None, str]  # layer, or None before all layers; and what is summed
Parts = dict[Key, np.ndarray]


class Sums(NamedTuple):
    """Sums of n columns over a text.

    total: (2 + chosen positions, n) float64, over positions after the first, at the first, and at each chosen one.
    magnitude: (n,) float64, sum of |x| after the first. largest: (n, PLACES) float32, the entries with the largest |x|
    after the first; at: (n, PLACES, 2) int32, their positions and token ids.
    """

    total: torch.Tensor
    magnitude: torch.Tensor
    largest: torch.Tensor
    at: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, masks: torch.Tensor, ids: torch.Tensor) -> "Sums":
        """Return the sums of a sequence: x (T, n) float32, masks (2 + chosen, T) float32, ids (T,)."""
        columns = x[1:].T.contiguous()
        magnitudes = columns.abs()
        best = magnitudes.topk(min(PLACES, len(x) - 1), 1).indices
        at = torch.stack([best + 1, ids[1:][best]], 2).int()
        return cls((masks @ x).double(), magnitudes.sum(1).double(), columns.gather(1, best), at)

    def joined(self, other: "Sums") -> "Sums":
        """Return the sums of both texts; among equal entries those of the earlier text come first."""
        largest, at = torch.cat([self.largest, other.largest], 1), torch.cat([self.at, other.at], 1)
        best = largest.abs().sort(dim=1, descending=True, stable=True).indices[:, :PLACES]
        at = at.gather(1, best[..., None].expand(-1, -1, 2))
        return Sums(self.total + other.total, self.magnitude + other.magnitude, largest.gather(1, best), at)

    def cpu(self) -> "Sums":
        return Sums(*(part.cpu() for part in self))


class Gains(NamedTuple):
    """The gains of a norm at some features, and their ranks among all.

    reads: roles whose projections read its output. gains: at the features. median: of |gain| over all features. ranks:
    1 for the largest |gain|.
    """

    reads: tuple[str, ...]
    gains: list[float]
    median: float
    ranks: list[int]


class Terms(NamedTuple):
    """Contributions of writers of one kind to some features.

    means: (2 + chosen, writers, features). magnitudes: means of |term|, (writers, features). largest, at: the largest
    terms with their positions and token ids, (writers, features, …).
    """

    means: np.ndarray
    magnitudes: np.ndarray
    largest: np.ndarray
    at: np.ndarray


@dataclass(eq=False)
class Account:
    """Contributions to features of the residual stream over a text; accounts of parts of a text can be merged.

    features: the requested features; controls: random other features, for comparison. positions: the chosen positions.
    counts: (2 + chosen,) float64, the numbers of positions after the first, at the first, and at the chosen ones. sums:
    by layer (None before all) and what is summed; columns are features, the requested ones before the controls, or
    (writers, features): "state", before the layer; the writers of `WRITERS_OF`; "before NORM" and "behind NORM". Those
    of "neuron" are of the neurons themselves, which `weights` by layer, (features, neurons), multiply. gains: by layer
    and norm. names: texts of token ids, if known.
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
        """Return the account of both texts, of the same model and features."""
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
        """Return one row per writer: its mean terms and magnitudes.

        Columns are `feature`, `layer`, `writer` (its kind) and `index`; `value`, `first` and `magnitude`, its mean term
        after the first position, at the first, and its mean magnitude; `at`, its terms at the chosen positions.

        neurons: number of neurons of a layer that are listed, those with the largest means at some place; the others
        are one writer.
        """
        table = pd.DataFrame(record for record in self.records(neurons) if record["metric"] == "origins.writer")
        return table.astype({name: "Int64" for name in ("layer", "index", "count") if name in table})

    def states(self) -> pd.DataFrame:
        """Return one row per feature and layer: its state before the layer, and after the last layer, numbered as
        one more."""
        return pd.DataFrame(record for record in self.records() if record["metric"] == "origins.state")

    def gates(self) -> pd.DataFrame:
        """Return one row per feature and norm before projections.

        Columns are `value`, its gain, with `median` and `rank` among all features; `before` and `behind` the norm the
        mean after the first position, `first_before` and `first_behind` at the first.
        """
        return pd.DataFrame(record for record in self.records() if record["metric"] == "origins.gate")

    @property
    def rest(self) -> np.ndarray:
        """(features,): the largest difference between a state and the sum of its terms, relative to the feature's
        largest state.

        The maximum is over layers and kinds of means.
        """
        return self._rest(self._parts())

    def records(self, neurons: int = 3) -> list[dict]:
        """Return a flat dictionary for each state, writer and gate of each feature, for the controls, and for the
        rest."""
        by_feature = [[*self._states(number), *self._gates(number)] for number in range(len(self.features))]
        for key in self._written():
            terms = self._terms(key)
            for number, records in enumerate(by_feature):
                records += self._writers(key, terms, number, neurons)
        parts = self._parts()
        for records, rest in zip(by_feature, self._rest(parts), strict=True):
            records.append({"metric": "origins.rest", "value": short(rest)})
        pairs = zip(self.features, by_feature, strict=True)
        with_features = [{**record, "feature": feature} for feature, records in pairs for record in records]
        return [*with_features, *self._ordinary(parts)]

    def _written(self) -> list[Key]:
        """Return the keys of sums of writers, in the order in which they write."""
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
        """Return the sum of all writers' mean terms by layer and part, (2 + chosen, columns)."""
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
            yield record | {"magnitude": short(sums.magnitude[number] / self.counts[0])}

    def _gates(self, number: int) -> Iterator[dict]:
        for (layer, norm), gains in self.gains.items():
            before, behind = (self._means((layer, f"{side} {norm}"))[:, number] for side in ("before", "behind"))
            yield {
                "metric": "origins.gate",
                "layer": layer,
                "norm": norm,
                "role": "+".join(gains.reads),
                "value": short(gains.gains[number]),
                "median": short(gains.median),
                "rank": gains.ranks[number],
                "before": short(before[0]),
                "behind": short(behind[0]),
                "first_before": short(before[1]),
                "first_behind": short(behind[1]),
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
                "magnitude": short(terms.magnitudes[index, number]),
                "largest": [short(value) for value in terms.largest[index, number]],
                "largest_positions": at[:, 0].tolist(),
                "largest_tokens": [self.names.get(token, f"#{token}") for token in at[:, 1].tolist()],
            }
        if len(indices) < means.shape[1]:
            others = means.sum(1) - means[:, list(indices)].sum(1)
            yield {**place, "writer": "other neurons", "count": means.shape[1] - len(indices), **self._values(others)}

    def _values(self, means: np.ndarray) -> dict:
        chosen = {"at": [short(value) for value in means[2:]]} if self.positions else {}
        return {"value": short(means[0]), "first": short(means[1]), **chosen}

    def _ordinary(self, parts: Parts) -> Iterator[dict]:
        """Yield the ordinary contribution of each part of a layer: the median over controls of the magnitudes of means.

        The state before each layer is included.
        """
        states = {(layer, "state"): self._means((layer, "state")) for layer in range(self.layers + 1)}
        for (layer, part), means in (parts | states).items() if self.controls else ():
            value, first = np.median(abs(means[:2, len(self.features) :]), 1)
            place = {} if layer is None else {"layer": layer}
            yield {"metric": "origins.ordinary", **place, "part": part, "value": short(value), "first": short(first)}


WRITTEN = {"attn_out": "attention", "ffn_out": "feed-forward"}  # part of a layer, by the role of its output projection
CONTROLS = 10  # number of random features, for comparison


@with_bar
def origins(
    model: PreTrainedModel,
    blocks: Iterable[Block],
    features: Iterable[int],
    positions: Iterable[int] = (),
    variant: Variant = AS_IT_IS,
    tokens: PreTrainedTokenizerBase | None = None,
    attention_mask: Iterable[torch.Tensor] | None = None,
    *,
    progress: bool | None = None,
) -> Account:
    """Return the contributions to features of the residual stream, and the gains of norms at them.

    The state of a feature before a layer is the sum of the embedding, the positions, and the terms of all heads,
    neurons, experts and biases of the layers before it (docs/writers.md). It takes one pass, and keeps no hidden state.

    Args:
        model: a causal language model, resident or streamed; it is not changed.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,).
        features: dimensions of the residual stream.
        positions: further positions at which terms are reported, beside their means after the first position and the
            first one.
        variant: a change of the model. Terms of quantized projections are computed with exact weights, so that rounding
            errors appear in `Account.rest`.
        tokens: the model's tokenizer, to report the texts of tokens.
        attention_mask: as for `outliers.trace`.
        progress: whether to show a bar after two seconds; by default on a terminal and in a notebook.

    Raises:
        UserError: a feature is out of range, or no block reaches a position; there is no block, or one has less than
            two tokens; the norms rescale the residual stream itself (OPT-350m), so that it is no sum of terms; an
            output projection is no plain layer.

    Example:
        >>> account = outliers.origins(model, blocks, features=[3])
        >>> bool(account.rest.max() < 1e-5)
        True
    """
    model = apart(model)
    features, positions = list(dict.fromkeys(features)), sorted(set(positions))
    check_accountable(model.config, features_of(model), features)
    observer = _observed(model, sequences(blocks, attention_mask), features, positions, variant)
    account = observer.account()
    if tokens is not None:
        occurred = {token for sums in account.sums.values() for token in sums.at[..., 1].unique().tolist()}
        account.names = {token: visible_token(tokens, token) for token in sorted(occurred)}
    return account


def check_accountable(config, width: int, features: Iterable[int]) -> None:
    """Raise UserError if a model of this width lacks a feature, or its residual stream is not a sum of terms."""
    check_features(features, width)
    check_one_stack(config)
    if family_of(config).name_of:
        raise UserError("accounts start at the embedding of tokens; expected a model that reads text, not pictures")
    if norms_are_in_the_residual_stream(config):
        raise UserError(
            "this model's norms rescale its residual stream, which is then not the sum of its contributions; "
            "expected norms "
            "before or behind the sub-layers, as in every other architecture"
        )
    check_writers(config)


def check_writers(config) -> None:
    """Raise UserError unless each layer has one attention and one feed-forward part that write."""
    for stack in stacks_of(config):
        for kind in stack.layer_kinds:
            experts = (kind.experts,) if kind.experts else ()
            ffn_out = tuple(one for one in kind.ffn_out if not (experts and one.startswith(f"{kind.experts}.")))
            several = next((of for of in (kind.attn_out, ffn_out + experts) if len(of) > 1), None)
            if kind.recurrent or several:
                what = "mixes positions by a recurrence" if kind.recurrent else f"writes by {' and '.join(several)}"
                raise UserError(
                    f"a layer of '{config.model_type}' {what}; accounts are of layers with one attention, of heads, "
                    "and one feed-forward part or experts: name other parts with --by, such as readers"
                )


@inference
def _observed(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], features: list[int], chosen: list[int], variant: Variant
) -> "_Observer":
    check_sums(model)
    observer = _Observer(model, features, chosen)
    watched_pass(model, blocks, observer.hooks, variant, observer.begin)
    return observer


def controls_of(features: list[int], width: int) -> list[int]:
    """Return random other features, always the same ones."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(0)).tolist()
    return [feature for feature in order if feature not in features][:CONTROLS]


class _Observer:
    """An accumulator of the terms of sequences, each (T,); layers may take turns."""

    def __init__(self, model: PreTrainedModel, features: list[int], chosen: list[int]):
        self.model, self.anatomy, self.features, self.chosen = model, anatomy_of(model.config), features, chosen
        self.width = features_of(model)
        self.controls = controls_of(features, self.width)
        self.columns = [*features, *self.controls]
        self.sequences, self.counts = 0, torch.zeros(2 + len(chosen), dtype=torch.float64)
        self.sums: dict[tuple, Sums] = {}
        self.weights: dict[int, torch.Tensor] = {}
        self.gains: dict[tuple[int, str], Gains] = {}

    def begin(self, number: int, inputs: tuple[torch.Tensor]) -> None:
        """Announce the next sequence to the hooks."""
        (ids,) = inputs
        if len(ids) < 2:
            raise UserError(f"sequence {number} has {len(ids)} tokens; expected at least 2")
        self.ids, self.masks = ids, torch.zeros(2 + len(self.chosen), len(ids), device=ids.device)
        self.masks[0, 1:] = self.masks[1, 0] = 1
        for row, position in enumerate(self.chosen, 2):
            self.masks[row, position : position + 1] = 1
        if number == self.sequences:
            self.sequences += 1
            self.counts += self.masks.sum(1).cpu()

    @contextmanager
    def hooks(self, model: PreTrainedModel, layer: int | None) -> Iterator[None]:
        """Observe all layers of a model, or one, within this context; with the first one also the embedding."""
        with ExitStack() as stack:
            for decoder_layer in layers_of(model):
                if layer in (None, decoder_layer.number):
                    if not decoder_layer.number:
                        self._hook_embedding(stack, model, decoder_layer)
                    self._hook_norms(stack, decoder_layer)
                    for role in WRITTEN:
                        anatomy = decoder_layer.anatomy  # a part may be absent
                        if getattr(anatomy, role):
                            stack.enter_context(_SubLayer(self, decoder_layer, role).hooks())
            stack.enter_context(residual_hooks(model, self.see_state, layer))
            yield

    def _hook_embedding(self, stack: ExitStack, model: PreTrainedModel, first: Layer) -> None:
        """Add the terms of the first layer's input: positions, the bias of its norm, and the rest as the embedding."""
        terms, positions, norm = {}, self.anatomy.positions, self.anatomy.embedding_norm
        bias = norm and parameter_of(model.get_submodule(norm), "bias")

        def see_positions(_module, _inputs, output: torch.Tensor) -> None:
            terms["positions"] = output.expand(1, len(self.ids), -1)[0][:, self.columns].float()

        def see_state(_module, inputs: tuple) -> None:
            state = inputs[0][0][:, self.columns].float()
            if bias is not None:
                terms["embedding norm"] = bias[self.columns].float().expand_as(state)
            for kind, of_kind in {**terms, "embedding": state - sum(terms.values())}.items():
                self.add((None, kind), of_kind)
            self.add((0, "state"), state)

        for one in {model, self.model} if positions else ():  # a streamed model embeds before a variant is applied
            stack.callback(one.get_submodule(positions).register_forward_hook(see_positions).remove)
        stack.callback(first.module.register_forward_pre_hook(see_state).remove)

    def see_state(self, layer: int, x: torch.Tensor) -> None:
        self.add((layer + 1, "state"), x[:, self.columns].float())

    def _hook_norms(self, stack: ExitStack, layer: Layer) -> None:
        for path, roles in layer.anatomy.norms.items():
            norm = layer.module.get_submodule(path)
            self.gains.setdefault((layer.number, path), self._gains(norm, roles))
            hook = norm.register_forward_hook(partial(self._see_norm, layer.number, path))
            stack.callback(hook.remove)

    def _gains(self, norm: nn.Module, roles: tuple[str, ...]) -> Gains:
        gain = gain_of(norm, self.anatomy.norm_offset, self.width)
        magnitudes = gain.abs()
        ranks = [1 + int((magnitudes > magnitudes[column]).sum()) for column in self.columns]
        return Gains(roles, gain[self.columns].tolist(), magnitudes.median().item(), ranks)

    def _see_norm(self, layer: int, path: str, _norm, inputs: tuple, output: torch.Tensor) -> None:
        for side, state in (("before", inputs[0]), ("behind", output)):
            self.add((layer, f"{side} {path}"), state.flatten(0, -2)[:, self.columns].float())

    def add(self, key: tuple, x: torch.Tensor) -> None:
        """Add columns (T, n) of this sequence to the sums."""
        sums = Sums.of(x, self.masks.to(x.device), self.ids.to(x.device))
        self.sums[key] = self.sums[key].joined(sums) if key in self.sums else sums

    def account(self) -> Account:
        if not self.sequences:
            raise UserError("no blocks to account for; expected at least one")
        for position, count in zip(self.chosen, self.counts[2:], strict=True):
            if not count:
                raise UserError(f"position {position} is in none of the blocks; expected one that begins at 0")
        sums = {key: sums_of_key.cpu() for key, sums_of_key in self.sums.items()}
        return Account(self.features, self.controls, self.chosen, self.counts, sums, self.weights, self.gains)


class _SubLayer:
    """An observer of the terms of the attention or the feed-forward part of a layer.

    A term is a row of the output projection times its input. It is multiplied by the scale of the residual stream, and,
    if a norm follows the projection, by its gain and by a factor for each position, which is known once the norm has
    seen the output.
    """

    def __init__(self, observer: _Observer, layer: Layer, role: str):
        self.observer, self.layer, self.part, self.written = observer, layer.number, WRITTEN[role], {}
        self.of_experts: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # number, tokens, and what is added there
        anatomy, config, block = layer.anatomy, observer.model.config, layer.module
        behind = [path for path, of in anatomy.norms_behind.items() if of == role]
        self.norm = block.get_submodule(behind[0]) if behind else None
        self.centred = isinstance(self.norm, nn.LayerNorm)
        self.scale = getattr(config, anatomy.residual_scale) if anatomy.residual_scale else 1.0
        self.gain = None if self.norm is None else gain_of(self.norm, anatomy.norm_offset, observer.width)
        self.heads = heads_of(layer, config_of_stack(config, anatomy))
        if role == "ffn_out" and anatomy.experts:
            self.module, self.see = block.get_submodule(anatomy.experts), self._see_experts
        else:
            (name,) = getattr(anatomy, role)
            projection = in_layer(layer, role, name)
            self.module, self.see = projection.module, self._see_projection
            self._read(projection)

    def _read(self, projection: Projection) -> None:
        """Keep the required rows of a weight, and the bias."""
        plain = getattr(projection.module, "projection", projection.module)  # under a scheme
        check_plain(projection._replace(module=plain))
        self.rows = self.seen(stored_weight(plain))
        bias = parameter_of(plain, "bias")
        self.bias = None if bias is None else self.seen(bias[:, None])[:, 0]
        if self.part == "feed-forward":
            self.observer.weights.setdefault(self.layer, self.rows.cpu())

    def seen(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the change of the residual stream at the columns, (columns, n), by outputs (features, n).

        The factor of a following norm for each position is left out.
        """
        rows = self.scale * outputs[self.observer.columns].float()
        if self.centred:
            rows -= self.scale * outputs.float().mean(0)
        return rows if self.gain is None else rows * self.gain[self.observer.columns, None]

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as stack:
            for number in range(number_of(self.module) if self.see == self._see_experts else 0):
                expert = self.module.get_submodule(str(number))
                stack.callback(expert.register_forward_hook(partial(self._see_expert, number)).remove)
            stack.callback(self.module.register_forward_hook(self.see).remove)
            if self.norm is not None:
                stack.callback(self.norm.register_forward_hook(self._see_norm).remove)
            yield

    def _see_projection(self, _module, inputs: tuple, _output) -> None:
        x = inputs[0].flatten(0, -2).float()
        if self.part == "feed-forward":
            self.written = {"neuron": x}
        else:
            by_head, rows = (tensor.unflatten(1, (self.heads, -1)) for tensor in (x, self.rows))
            self.written = {"head": torch.einsum("thd,fhd->thf", by_head, rows).flatten(1)}
        if self.bias is not None:
            self.written[f"{self.part} bias"] = self.bias.expand(len(x), -1)
        self._end()

    def _see_expert(self, number: int, _expert: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        self.of_experts.append((number, inputs[1], self.seen(output.T).T))

    def _see_experts(self, experts: nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
        sizes = len(self.observer.ids), number_of(experts), len(self.observer.columns)
        terms = torch.zeros(sizes, device=output.device)
        for number, tokens, added in self.of_experts:
            terms[tokens, number] = added
        self.of_experts.clear()
        self.written = {"expert": terms.flatten(1)}
        self._end()

    def _see_norm(self, _module, inputs: tuple, output: torch.Tensor) -> None:
        """Multiply the terms by the norm's factor at each position, found from its input and output."""
        y, normed = inputs[0].flatten(0, -2).float(), output.flatten(0, -2).float()
        bias = parameter_of(self.norm, "bias")
        if bias is not None:
            normed = normed - bias.float()
        seen = (y - y.mean(1, keepdim=True) if self.centred else y) * self.gain
        factor = (normed * seen).sum(1, keepdim=True) / seen.square().sum(1, keepdim=True).clamp(min=1e-30)
        self.written = {kind: factor * terms for kind, terms in self.written.items()}
        if bias is not None:
            self.written[f"{self.part} norm"] = (self.scale * bias[self.observer.columns].float()).expand(len(y), -1)
        self._add()

    def _end(self) -> None:
        if self.norm is None:
            self._add()

    def _add(self) -> None:
        for kind, terms in self.written.items():
            self.observer.add((self.layer, kind), terms)
        self.written = {}


def gain_of(norm: nn.Module, offset: float, width: int) -> torch.Tensor:
    """Return the gain of a norm, float32 (features,); 1 if it has no weight."""
    weight = parameter_of(norm)
    return torch.ones(width) if weight is None else offset + weight.float()


class OfWriters(OnePass):
    """The measurement of accounts, in one pass per cell."""

    cost = 2.5

    def check(self, cell: Cell) -> None:
        metric, block = cell.metric, cell.subject.settings.block
        if not metric.features:
            raise UserError("no feature is given; expected features of the residual stream, such as --features 3,17")
        check_accountable(cell.subject.config, width_of(cell.subject.config), metric.features)
        for position in metric.positions:
            if position >= block:
                raise UserError(f"position {position} in blocks of {block} tokens; expected 0 to {block - 1}")

    def provenance(self, cell: Cell, _model_cache: ModelCache) -> dict:
        return {"controls": controls_of(cell.metric.features, cell.subject.width)}

    def observed(
        self, model_cache: ModelCache, cell: Cell, model: PreTrainedModel, blocks: Iterable, variant: Variant
    ) -> Account:
        metric = cell.metric
        return origins(model, blocks, metric.features, metric.positions, variant, model_cache.tokenizer(cell.subject))

    def values(self, cell: Cell, answers: list[Account]) -> list[dict]:
        return [value | {"unit": "1"} for value in reduce(Account.merge, answers).records(cell.metric.neurons)]


MEASUREMENT = OfWriters()
