"""The contributions to a feature of the residual stream, layer by layer, and the gains of norms at it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outliers.errors import UserError
from outliers.metrics.measurement import CellMeasurement, float_digits
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
    layers_of,
    norms_are_in_the_residual_stream,
    reader_at,
    stacks_of,
    width_of,
)
from outliers.models.anatomy.examples import Block
from outliers.models.anatomy.experts import ExpertProjection, expert_count
from outliers.models.anatomy.row import Anatomy, config_of_stack
from outliers.models.anatomy.trust import check_sums
from outliers.models.anatomy.weights import parameter_of
from outliers.models.decoder import inference, watched_pass
from outliers.models.hooks import residual_hooks
from outliers.models.stream import AS_IT_IS, Variant, separate_layers
from outliers.quantization.linear import stored_weight
from outliers.subjects.cell import Cell
from outliers.subjects.model_cache import ModelCache
from outliers.terminal.progress import with_bar
from outliers.text.blocks import unpad
from outliers.text.tokens import visible_token

MOST_POSITIONS = 3  # listed positions with a writer's largest terms, at most

SumKey = tuple[int | None, str]  # layer, or None before all layers; and what is summed
# Writers whose sums are those of their neurons, still to be multiplied by weights.
NEURONS = ("neuron", "shared neuron", "expert neuron")
Parts = dict[SumKey, np.ndarray]


class ColumnSums(NamedTuple):
    """Sums over a text of n columns, which are features, or the terms of all pairs of a writer and a feature.

    total: (2 + chosen positions, n) float64, over positions after the first, at the first, and at each chosen one.
    magnitude: (n,) float64, sum of |x| after the first. largest: (n, `MOST_POSITIONS`) float32, the entries with the
    largest |x| after the first; at: (n, `MOST_POSITIONS`, 2) int32, their positions and token ids.
    """

    total: torch.Tensor
    magnitude: torch.Tensor
    largest: torch.Tensor
    at: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, masks: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> "ColumnSums":
        """Return the sums of a sequence, x (t, n) float32 at some positions (t,), with their masks and ids.

        masks: (2 + chosen, t) float32. ids: (t,).
        """
        later = positions > 0
        columns, positions_of_columns = x[later].T.contiguous(), positions[later]
        magnitudes = columns.abs()
        best = magnitudes.topk(min(MOST_POSITIONS, columns.shape[1]), 1).indices
        at = torch.stack([positions_of_columns[best], ids[later][best]], 2).int()
        return cls((masks @ x).double(), magnitudes.sum(1).double(), columns.gather(1, best), at)

    @classmethod
    def of_columns(cls, parts: "Sequence[ColumnSums | None]", columns: int, rows: int) -> "ColumnSums":
        """Put sums of equally many columns side by side; None stands for sums over no positions.

        Fewer than `MOST_POSITIONS` listed entries are filled up with zeros at position -1.
        """
        none = cls(
            torch.zeros(rows, columns, dtype=torch.float64),
            torch.zeros(columns, dtype=torch.float64),
            torch.zeros(columns, 0),
            torch.zeros(columns, 0, 2, dtype=torch.int32),
        )
        total, magnitude, largest, at = zip(*(part or none for part in parts), strict=True)
        largest = [nn.functional.pad(part, (0, MOST_POSITIONS - part.shape[1])) for part in largest]
        at = [nn.functional.pad(part, (0, 0, 0, MOST_POSITIONS - part.shape[1]), value=-1) for part in at]
        return cls(torch.cat(total, 1), torch.cat(magnitude), torch.cat(largest), torch.cat(at))

    def joined(self, other: "ColumnSums") -> "ColumnSums":
        """Return the sums of both texts; among equal entries those of the earlier text come first."""
        largest, at = torch.cat([self.largest, other.largest], 1), torch.cat([self.at, other.at], 1)
        best = largest.abs().sort(dim=1, descending=True, stable=True).indices[:, :MOST_POSITIONS]
        at = at.gather(1, best[..., None].expand(-1, -1, 2))
        return ColumnSums(self.total + other.total, self.magnitude + other.magnitude, largest.gather(1, best), at)

    def cpu(self) -> "ColumnSums":
        return ColumnSums(*(part.cpu() for part in self))


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
class WriterAccount:
    """Contributions to features of the residual stream over a text; accounts of parts of a text can be merged.

    features: the requested features; controls: random other features, for comparison. positions: the chosen positions.
    counts: (2 + chosen,) float64, the numbers of positions after the first, at the first, and at the chosen ones. sums:
    by layer (None before all) and by name: "state", before the layer; a kind of writers of `WRITERS_OF`; "experts",
    each as a whole; "before NORM" and "behind NORM". Their columns are features, the requested ones before the
    controls, or (writers, features). The sums of `NEURONS` are of the neurons' activations, one expert after the other;
    their products with `weights`, (features, neurons), are terms. gains: by layer and norm. names: texts of token ids,
    if known.
    """

    features: list[int]
    controls: list[int]
    positions: list[int]
    counts: torch.Tensor
    sums: dict[SumKey, ColumnSums]
    weights: dict[SumKey, torch.Tensor]
    gains: dict[tuple[int, str], Gains]
    names: dict[int, str] = field(default_factory=dict)

    def merge(self, other: "WriterAccount") -> "WriterAccount":
        """Return the account of both texts, of the same model and features."""
        sums = {key: sums_here.joined(other.sums[key]) for key, sums_here in self.sums.items()}
        counts, names = self.counts + other.counts, self.names | other.names
        return WriterAccount(
            self.features, self.controls, self.positions, counts, sums, self.weights, self.gains, names
        )

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

        Columns are `feature`, `layer`, `writer` (its kind), `index` and, of neurons of experts, `expert`; `value`,
        `first` and `magnitude`, its mean term after the first position, at the first, and its mean magnitude; `at`, its
        terms at the chosen positions.

        neurons: number of neurons of a layer that are listed, those with the largest means at some place; the others
        are one writer.
        """
        return self._table("origins.writer", neurons)

    def experts(self) -> pd.DataFrame:
        """Return one row per expert of a mixture, the sum of its neurons and bias, with the columns of `writers`."""
        return self._table("origins.expert")

    def _table(self, metric: str, neurons: int = 3) -> pd.DataFrame:
        table = pd.DataFrame(record for record in self.records(neurons) if record["metric"] == metric)
        return table.astype({name: "Int64" for name in ("layer", "index", "expert", "count") if name in table})

    def states(self) -> pd.DataFrame:
        """Return one row per feature and layer: its state before the layer.

        The state after the last layer has the number after the last.
        """
        return pd.DataFrame(record for record in self.records() if record["metric"] == "origins.state")

    def gates(self) -> pd.DataFrame:
        """Return one row per feature and norm before projections.

        Columns are `value`, its gain, with `median` and `rank` among all features; `before` and `behind` the norm the
        mean after the first position, `first_before` and `first_behind` at the first.
        """
        return pd.DataFrame(record for record in self.records() if record["metric"] == "origins.gate")

    @property
    def rest(self) -> np.ndarray:
        """The largest difference between a state and the sum of its terms, relative to the largest state, (features,).

        Both maxima are over layers, and over the means after the first position, at it, and at chosen ones.
        """
        return self._rest(self._parts())

    def records(self, neurons: int = 3) -> list[dict]:
        """Return flat dictionaries: each state, writer and gate of each feature, the controls, and the rest."""
        by_feature = [[*self._states(number), *self._gates(number)] for number in range(len(self.features))]
        for layer, kind in self._written():
            wholes = [(layer, "experts")] if kind == "expert neuron" else []
            for key in (*wholes, (layer, kind)):
                terms = self._terms(key)
                for number, records in enumerate(by_feature):
                    records += self._writers(key, terms, number, neurons)
        parts = self._parts()
        for records, rest in zip(by_feature, self._rest(parts), strict=True):
            records.append({"metric": "origins.rest", "value": float_digits(rest)})
        pairs = zip(self.features, by_feature, strict=True)
        with_features = [{**record, "feature": feature} for feature, records in pairs for record in records]
        return [*with_features, *self._typical_contributions(parts)]

    def _written(self) -> list[SumKey]:
        """Return the keys of sums of writers, in the order in which they write."""
        keys = [key for key in self.sums if key[1] in PART_OF]
        return sorted(keys, key=lambda key: (-1 if key[0] is None else key[0], [*PART_OF].index(key[1])))

    def _means(self, key: SumKey) -> np.ndarray:
        return (self.sums[key].total / self.counts[:, None]).numpy()

    def _terms(self, key: SumKey) -> Terms:
        _, kind = key
        sums, count = self.sums[key], len(self.columns)
        means, magnitudes = self._means(key), sums.magnitude.numpy() / self.counts[0].item()
        largest, at = sums.largest.numpy(), sums.at.numpy()
        if kind in NEURONS:
            weights = self.weights[key].double().numpy().T
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
            yield record | {"magnitude": float_digits(sums.magnitude[number] / self.counts[0])}

    def _gates(self, number: int) -> Iterator[dict]:
        for (layer, norm), gains in self.gains.items():
            before, behind = (self._means((layer, f"{side} {norm}"))[:, number] for side in ("before", "behind"))
            yield {
                "metric": "origins.gate",
                "layer": layer,
                "norm": norm,
                "role": "+".join(gains.reads),
                "value": float_digits(gains.gains[number]),
                "median": float_digits(gains.median),
                "rank": gains.ranks[number],
                "before": float_digits(before[0]),
                "behind": float_digits(behind[0]),
                "first_before": float_digits(before[1]),
                "first_behind": float_digits(behind[1]),
            }

    def _writers(self, key: SumKey, terms: Terms, number: int, neurons: int) -> Iterator[dict]:
        layer, kind = key
        whole = kind == "experts"  # experts are no terms of their own, but sums of others
        place = {"metric": f"origins.{'expert' if whole else 'writer'}", **({} if layer is None else {"layer": layer})}
        means = terms.means[..., number]
        indices = range(means.shape[1])
        if kind in NEURONS:
            indices = sorted({index for row in abs(means) for index in np.argsort(-row, kind="stable")[:neurons]})
        for index in indices:
            at = terms.at[index, number]
            exists = at[:, 0] >= 0  # an expert may have few tokens
            at = at[exists]
            yield {
                **place,
                "writer": "expert" if whole else kind,
                **self._index(key, int(index)),
                **self._values(means[:, index]),
                "magnitude": float_digits(terms.magnitudes[index, number]),
                "largest": [float_digits(value) for value in terms.largest[index, number][exists]],
                "largest_positions": at[:, 0].tolist(),
                "largest_tokens": [self.names.get(token, f"#{token}") for token in at[:, 1].tolist()],
            }
        if len(indices) < means.shape[1]:
            others = means.sum(1) - means[:, list(indices)].sum(1)
            yield {**place, "writer": "other neurons", "count": means.shape[1] - len(indices), **self._values(others)}

    def _index(self, key: SumKey, index: int) -> dict:
        layer, kind = key
        if kind == "expert neuron":
            each = len(self.sums[key].magnitude) // (len(self.sums[layer, "experts"].magnitude) // len(self.columns))
            return {"expert": index // each, "index": index % each}
        return {"index": index} if kind in ("head", "experts", *NEURONS) else {}

    def _values(self, means: np.ndarray) -> dict:
        chosen = {"at": [float_digits(value) for value in means[2:]]} if self.positions else {}
        return {"value": float_digits(means[0]), "first": float_digits(means[1]), **chosen}

    def _typical_contributions(self, parts: Parts) -> Iterator[dict]:
        """Yield what attention and feed-forward parts typically add to a feature, to compare the requested ones with.

        It is the median over random features of the magnitudes of means. The state before each layer is included.
        """
        states = {(layer, "state"): self._means((layer, "state")) for layer in range(self.layers + 1)}
        for (layer, part), means in (parts | states).items() if self.controls else ():
            value, first = np.median(abs(means[:2, len(self.features) :]), 1)
            place = {} if layer is None else {"layer": layer}
            yield {
                "metric": "origins.ordinary",
                **place,
                "part": part,
                "value": float_digits(value),
                "first": float_digits(first),
            }


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
) -> WriterAccount:
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
            errors appear in `WriterAccount.rest`.
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
    model = separate_layers(model)
    features, positions = list(dict.fromkeys(features)), sorted(set(positions))
    check_accountable(model.config, features_of(model), features)
    observer = _observe(model, unpad(blocks, attention_mask), features, positions, variant)
    account = observer.account()
    if tokens is not None:
        occurred = {token for sums in account.sums.values() for token in sums.at[..., 1].unique().tolist()}
        account.names = {token: visible_token(tokens, token) for token in sorted(occurred - {-1})}
    return account


def check_accountable(config, width: int, features: Iterable[int]) -> None:
    """Raise UserError if a model of this width lacks a feature, or its residual stream is not a sum of terms."""
    check_features(features, width)
    check_one_stack(config)
    if family_of(config).name_of:
        raise UserError("accounts start at the embedding of tokens; expected a model that reads text, not pictures")
    if norms_are_in_the_residual_stream(config):
        raise UserError(
            "this model's norms rescale its residual stream, which is then not the sum of its contributions; expected "
            "norms before or behind the sub-layers, as in every other architecture"
        )
    check_writers(config)


def check_writers(config) -> None:
    """Raise UserError unless each layer has one attention and one feed-forward part that write."""
    for stack in stacks_of(config):
        for kind in stack.layer_kinds:
            ffn_out, _ = _split_experts(kind)
            behind = [path for path, of in kind.norms_behind.items() if of == "ffn_out"]
            several = next((of for of in (kind.attn_out, ffn_out, behind) if len(of) > 1), None)
            if kind.recurrent or several:
                what = "mixes positions by a recurrence" if kind.recurrent else f"writes by {' and '.join(several)}"
                raise UserError(
                    f"a layer of '{config.model_type}' {what}; accounts are of layers with one attention, of heads, "
                    "and one feed-forward part, experts, or both: name other parts with --by, such as readers"
                )


def _split_experts(anatomy: Anatomy) -> tuple[list[str], list[str]]:
    """Split the output projections of a feed-forward part into those outside and those inside of experts."""
    of_experts = [path for path in anatomy.ffn_out if anatomy.experts and path.startswith(f"{anatomy.experts}.")]
    return [path for path in anatomy.ffn_out if path not in of_experts], of_experts


@inference
def _observe(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], features: list[int], chosen: list[int], variant: Variant
) -> "_OriginObserver":
    check_sums(model)
    observer = _OriginObserver(model, features, chosen)
    watched_pass(model, blocks, observer.hooks, variant, observer.begin)
    return observer


def controls_of(features: list[int], width: int) -> list[int]:
    """Return random other features, always the same ones."""
    order = torch.randperm(width, generator=torch.Generator().manual_seed(0)).tolist()
    return [feature for feature in order if feature not in features][:CONTROLS]


class _OriginObserver:
    """An accumulator of the terms of sequences, each (T,); layers may take turns."""

    def __init__(self, model: PreTrainedModel, features: list[int], chosen: list[int]):
        self.model, self.anatomy, self.features, self.chosen = model, anatomy_of(model.config), features, chosen
        self.width = features_of(model)
        self.controls = controls_of(features, self.width)
        self.columns = [*features, *self.controls]
        self.sequences, self.counts = 0, torch.zeros(2 + len(chosen), dtype=torch.float64)
        self.sums: dict[tuple, ColumnSums] = {}
        self.weights: dict[SumKey, torch.Tensor] = {}
        self.of_experts: dict[tuple[int, int], ColumnSums] = {}  # of the neurons of each expert, by layer and number
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
                        if getattr(decoder_layer.anatomy, role):  # a part may be absent
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

        for root in {model, self.model} if positions else ():  # a streamed model embeds before a variant is applied
            stack.callback(root.get_submodule(positions).register_forward_hook(see_positions).remove)
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

    def add(self, key: SumKey, x: torch.Tensor) -> None:
        """Add the values (T, n) of n features or neurons in this sequence to the `ColumnSums` of a key."""
        masks, ids = self.masks.to(x.device), self.ids.to(x.device)
        _join(self.sums, key, ColumnSums.of(x, masks, ids, torch.arange(len(x), device=x.device)))

    def add_expert(self, layer: int, number: int, x: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add the neurons (t, n) of an expert at the positions (t,) that chose it to the sums."""
        masks, ids = self.masks.to(x.device)[:, tokens], self.ids.to(x.device)[tokens]
        _join(self.of_experts, (layer, number), ColumnSums.of(x, masks, ids, tokens))

    def account(self) -> WriterAccount:
        if not self.sequences:
            raise UserError("no blocks to account for; expected at least one")
        for position, count in zip(self.chosen, self.counts[2:], strict=True):
            if not count:
                raise UserError(f"position {position} is in none of the blocks; expected one that begins at 0")
        sums = {key: sums_of_key.cpu() for key, sums_of_key in self.sums.items()}
        for layer, kind in self.weights:
            if kind == "expert neuron":
                experts = len(sums[layer, "experts"].magnitude) // len(self.columns)
                parts = [self.of_experts.get((layer, number)) for number in range(experts)]
                units = self.weights[layer, kind].shape[1] // experts
                sums[layer, kind] = ColumnSums.of_columns(
                    [part and part.cpu() for part in parts], units, len(self.counts)
                )
        return WriterAccount(self.features, self.controls, self.chosen, self.counts, sums, self.weights, self.gains)


def _join(sums: dict, key: tuple[int | None, str] | tuple[int, int], more: ColumnSums) -> None:
    sums[key] = sums[key].joined(more) if key in sums else more


class _ExpertTerms(NamedTuple):
    """Terms of an expert at the positions (t,) that chose it.

    number: of the expert. units: (t, units), times the factor of the router. added: terms of the whole expert,
    (t, columns). bias: terms of its bias, (t, columns), if it has one.
    """

    number: int
    positions: torch.Tensor
    units: torch.Tensor
    added: torch.Tensor
    bias: torch.Tensor | None


class _SubLayer:
    """An observer of the terms of the attention or the feed-forward part of a layer.

    A term is a row of the output projection times its input. It is multiplied by the scale of the residual stream, by
    the factor of a router or gate, and, if a norm follows, by the norm's gain and a factor for each position, which is
    known once the norm has seen the output.
    """

    def __init__(self, observer: _OriginObserver, layer: Layer, role: str):
        self.observer, self.layer, self.part, self.written = observer, layer.number, WRITTEN[role], {}
        self.of_experts: list[_ExpertTerms] = []
        self.outputs: dict[str, torch.Tensor] = {}  # of experts and of the projection beside them
        anatomy, config, block = layer.anatomy, observer.model.config, layer.module
        behind = [path for path, of in anatomy.norms_behind.items() if of == role]
        self.norm = block.get_submodule(behind[0]) if behind else None
        self.centred = isinstance(self.norm, nn.LayerNorm)
        self.scale = getattr(config, anatomy.residual_scale) if anatomy.residual_scale else 1.0
        self.gain = None if self.norm is None else gain_of(self.norm, anatomy.norm_offset, observer.width)
        self.heads = heads_of(layer, config_of_stack(config, anatomy))
        names, of_experts = _split_experts(anatomy) if role == "ffn_out" else (anatomy.attn_out, [])
        self.experts = block.get_submodule(anatomy.experts) if of_experts else None
        norm = self.experts.post_expert_norm if of_experts and self.experts.has_post_expert_norm else None
        self.gain_of_experts = None if norm is None else gain_of(norm, anatomy.norm_offset, observer.width)[:, None]
        self.kind = "head" if role == "attn_out" else "shared neuron" if of_experts else "neuron"
        self.projection = self.sum = None
        if names:
            projection = reader_at(layer, role, names[0])
            self.projection, (self.rows, self.bias) = projection.module, self._read(projection)
            self._keep(self.kind, self.rows)
        if of_experts:
            each = [self._read(reader_at(layer, role, name)) for name in of_experts]
            self.biases = [bias for _, bias in each]
            self._keep("expert neuron", torch.cat([rows for rows, _ in each], 1))
        if names and of_experts:
            above = _common(names[0], anatomy.experts)
            self.sum = block.get_submodule(above) if above else None  # else the layer itself adds both unchanged

    def _read(self, projection: Projection) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the required rows of a weight, and the bias."""
        plain = getattr(projection.module, "projection", projection.module)  # under a scheme
        check_plain(projection._replace(module=plain))
        weight, bias = stored_weight(plain), parameter_of(plain, "bias")
        if isinstance(plain, ExpertProjection):
            bias = plain.bias
            if self.gain_of_experts is not None:
                weight, bias = (
                    weight * self.gain_of_experts,
                    None if bias is None else bias * self.gain_of_experts[:, 0],
                )
        return self.in_stream(weight), None if bias is None else self.in_stream(bias[:, None])[:, 0]

    def _keep(self, kind: str, rows: torch.Tensor) -> None:
        if kind in NEURONS:
            self.observer.weights.setdefault((self.layer, kind), rows.cpu())

    def in_stream(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return what outputs (features, n) add to the residual stream at the columns, (columns, n).

        The factor of a following norm for each position is left out.
        """
        rows = self.scale * outputs[self.observer.columns].float()
        if self.centred:
            rows -= self.scale * outputs.float().mean(0)
        return rows if self.gain is None else rows * self.gain[self.observer.columns, None]

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as stack:
            for number in range(0 if self.experts is None else expert_count(self.experts)):
                expert = self.experts.get_submodule(str(number))
                *_, last = expert.children()
                calls: list[tuple[torch.Tensor, torch.Tensor]] = []
                stack.callback(last.register_forward_hook(partial(_see_call, calls)).remove)
                see = partial(self._see_expert, number, calls)
                stack.callback(expert.register_forward_hook(see).remove)
            for module, see in (
                (self.experts, self._see_experts),
                (self.projection, self._see_projection),
                (self.sum, self._see_sum),
                (self.norm, self._see_norm),
            ):
                if module is not None:
                    stack.callback(module.register_forward_hook(see).remove)
            yield

    def _see_projection(self, _module, inputs: tuple, output: torch.Tensor) -> None:
        x = inputs[0].flatten(0, -2).float()
        if self.kind == "head":
            by_head, rows = (tensor.unflatten(1, (self.heads, -1)) for tensor in (x, self.rows))
            x = torch.einsum("thd,fhd->thf", by_head, rows).flatten(1)
        self.written[self.kind] = x
        if self.bias is not None:
            self.written[f"{self.part} bias"] = self.bias.expand(len(x), -1)
        self._keep_output("projection", output)
        self._end(self.sum is None and self.norm is None)

    def _see_expert(self, number: int, calls: list, _expert: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        """Keep the terms of an expert, times the factor between its last projection and its output at each position."""
        x, y = calls.pop()
        factor = _factor(output.float(), y.float() * (1 if self.gain_of_experts is None else self.gain_of_experts.T))
        bias = None if self.biases[number] is None else factor * self.biases[number]
        self.of_experts.append(_ExpertTerms(number, inputs[1], factor * x.float(), self.in_stream(output.T).T, bias))

    def _see_experts(self, experts: nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
        tokens, columns = len(self.observer.ids), len(self.observer.columns)
        terms = torch.zeros(tokens, expert_count(experts), columns, device=output.device)
        biases = None if self.biases[0] is None else torch.zeros(tokens, columns, device=output.device)
        for expert in self.of_experts:
            terms[expert.positions, expert.number] = expert.added
            if biases is not None:
                biases[expert.positions] += expert.bias
        self.written["experts"] = terms.flatten(1)
        if biases is not None:
            self.written["expert bias"] = biases
        self._keep_output("experts", output)
        self._end(self.sum is None and self.norm is None)

    def _keep_output(self, name: str, output: torch.Tensor) -> None:
        """Keep an output (T, features) that the model adds to another one; batched experts have one each."""
        if self.sum is not None:  # a copy, because a model may add the other in place
            self.outputs[name] = output.reshape(-1, len(self.observer.ids), output.shape[-1]).double().sum(0)

    def _see_sum(self, _module, _inputs: tuple, output) -> None:
        """Multiply the terms by the factors with which the experts and the projection beside them are added."""
        total = (output[0] if isinstance(output, tuple) else output).flatten(0, -2).double()
        both = torch.stack([self.outputs.pop(name) for name in ("experts", "projection")], 2)
        solved = torch.linalg.pinv(both.mT @ both, hermitian=True) @ (both.mT @ total[..., None])
        of_experts, of_projection = solved.float().unbind(1)
        apart = {self.kind, f"{self.part} bias"}
        self._scale({kind: of_projection if kind in apart else of_experts for kind in self.written}, of_experts)
        self._end(self.norm is None)

    def _see_norm(self, _module, inputs: tuple, output: torch.Tensor) -> None:
        """Multiply the terms by the norm's factor at each position, found from its input and output."""
        y, normed = inputs[0].flatten(0, -2).float(), output.flatten(0, -2).float()
        bias = parameter_of(self.norm, "bias")
        if bias is not None:
            normed = normed - bias.float()
        factor = _factor(normed, (y - y.mean(1, keepdim=True) if self.centred else y) * self.gain)
        self._scale(dict.fromkeys(self.written, factor), factor)
        if bias is not None:
            self.written[f"{self.part} norm"] = (self.scale * bias[self.observer.columns].float()).expand(len(y), -1)
        self._end(True)

    def _scale(self, factors: dict[str, torch.Tensor], of_experts: torch.Tensor) -> None:
        """Multiply terms by factors for each position, (T, 1), by their kind, and those of experts' neurons."""
        self.written = {kind: factors[kind] * terms for kind, terms in self.written.items()}
        self.of_experts = [part._replace(units=of_experts[part.positions] * part.units) for part in self.of_experts]

    def _end(self, last: bool) -> None:
        """Add all terms to the sums if no further factor of them follows."""
        if not last:
            return
        for kind, terms in self.written.items():
            self.observer.add((self.layer, kind), terms)
        for expert in self.of_experts:
            self.observer.add_expert(self.layer, expert.number, expert.units, expert.positions)
        self.written, self.of_experts = {}, []


def _common(*paths: str) -> str:
    """Return the path of the innermost module that holds all of some modules; empty if it is the root."""
    parts = takewhile(lambda names: len(set(names)) == 1, zip(*(path.split(".") for path in paths), strict=False))
    return ".".join(names[0] for names in parts)


def _see_call(calls: list, _module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
    calls.append((inputs[0], output))


def _factor(outputs: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the factors (t, 1) between inputs and outputs (t, features) that are proportional in each row."""
    return (outputs * inputs).sum(1, keepdim=True) / inputs.square().sum(1, keepdim=True).clamp(min=1e-30)


def gain_of(norm: nn.Module, offset: float, width: int) -> torch.Tensor:
    """Return the gain of a norm, float32 (features,); 1 if it has no weight."""
    weight = parameter_of(norm)
    return torch.ones(width) if weight is None else offset + weight.float()


class OriginsMeasurement(CellMeasurement):
    """The measurement of accounts, in one pass per cell."""

    cost = 1.5

    def check(self, cell: Cell) -> None:
        metric, block = cell.metric, cell.subject.experiment.block
        if not metric.features:
            raise UserError("no feature is given; expected features of the residual stream, such as --features 3,17")
        check_accountable(cell.subject.config, width_of(cell.subject.config), metric.features)
        for position in metric.positions:
            if position >= block:
                raise UserError(f"position {position} in blocks of {block} tokens; expected 0 to {block - 1}")

    def provenance(self, cell: Cell, _model_cache: ModelCache) -> dict:
        return {"controls": controls_of(cell.metric.features, cell.subject.width)}

    def measure_cell(
        self, model_cache: ModelCache, cell: Cell, model: PreTrainedModel, blocks: Iterable, variant: Variant
    ) -> WriterAccount:
        metric = cell.metric
        return origins(model, blocks, metric.features, metric.positions, variant, cell.subject.preprocessor)

    def values(self, cell: Cell, results: list[WriterAccount]) -> list[dict]:
        return [value | {"unit": "1"} for value in reduce(WriterAccount.merge, results).records(cell.metric.neurons)]


MEASUREMENT = OriginsMeasurement()
