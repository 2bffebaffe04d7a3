"""Statistics of the inputs of projections on a calibration text, for remedies that have to know them."""

import math
import operator
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from outliers.errors import UserError
from outliers.models.anatomy import Projection
from outliers.models.anatomy.weights import parameter_of
from outliers.quantization.remedies import COSTLY, Remedy
from outliers.quantization.schemes import Scheme
from outliers.text.blocks import tokens_hash

SAMPLE = 512  # rows of a text that a calibration keeps, at least


class Magnitudes(NamedTuple):
    """Statistics of a calibration of projections that share an input, float32.

    inputs: the largest |x| of each feature (features,). weights: the largest |w| that it is multiplied with in any of
    them. sums: of |x| over all tokens. gram: XᵀX (features, features). rows: some of the inputs (tokens, features),
    evenly spaced. These two are None unless a scheme needs them, and the first three of features that are mixed.
    learned: of another shape, what a transform has learned for them with the whole model, if it did.
    """

    inputs: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    gram: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    learned: torch.Tensor | None = None

    def merge(self, other: "Magnitudes") -> "Magnitudes":
        """Those of two texts; None of what is known of one alone, or learned."""
        both = {name: (getattr(self, name), getattr(other, name)) for name in STATISTICS}
        known = {name: pair for name, pair in both.items() if not any(value is None for value in pair)}
        merged = {name: STATISTICS[name].merge(*pair) for name, pair in known.items()}
        return Magnitudes(weights=self.weights.maximum(other.weights), **merged)

    def behind(self, transform: Remedy, fitted: torch.Tensor) -> "Magnitudes":
        """Those behind a transform; None of features that it mixes."""

        def change(rows: torch.Tensor) -> torch.Tensor:
            return transform.do("hidden_states", rows.to(fitted.device), fitted)

        by_feature = transform.kind.by_feature
        changed = {
            name: statistic.under(getattr(self, name), change)
            for name, statistic in STATISTICS.items()
            if getattr(self, name) is not None and (by_feature or not statistic.by_feature)
        }
        if by_feature:
            changed["weights"] = transform.do("weight", self.weights[None].to(fitted.device), fitted)[0].abs()
        return Magnitudes(learned=self.learned, **changed)


class Statistic(NamedTuple):
    """A statistic of a calibration on the inputs of projections.

    of: the inputs of a block, float32 (tokens, features), and how many blocks there are. merge: that of two texts.
    under: that of changed inputs, from the function that changes rows. by_feature: whether features must not be mixed.
    """

    of: Callable
    merge: Callable
    under: Callable
    by_feature: bool = False


def _sample(x: torch.Tensor, blocks: int) -> torch.Tensor:
    """Rows of a block, evenly spaced and the first among them, where massive activations stand."""
    count = min(len(x), math.ceil(SAMPLE / blocks))
    return x[[number * len(x) // count for number in range(count)]]


def _of_features(values: torch.Tensor, change: Callable) -> torch.Tensor:
    return change(values[None])[0].abs()


STATISTICS = {
    "inputs": Statistic(lambda x, _: x.abs().amax(0), lambda a, b: a.maximum(b), _of_features, True),
    "sums": Statistic(lambda x, _: x.abs().sum(0), operator.add, _of_features, True),
    "gram": Statistic(lambda x, _: x.T @ x, operator.add, lambda gram, change: change(change(gram).T)),
    "rows": Statistic(_sample, lambda *rows: torch.cat(rows), lambda rows, change: change(rows)),
}


def stored_weight(projection: nn.Linear | Conv1D) -> torch.Tensor:
    """The weight as (outputs, features), sharing memory unless it is offloaded."""
    weight = parameter_of(projection)
    return weight.T if isinstance(projection, Conv1D) else weight


@dataclass(frozen=True, eq=False)
class Calibration:
    """The statistics of a calibration text that remedies and caches need, as `calibrate` returns them.

    blocks: what the model has read, int64 (blocks, T). magnitudes: of the inputs of a layer's projections by the role
    that they have in common, and of the weights that these meet. outlier_tokens: bool (layers, blocks, T), which tokens
    were outliers (`OUTLIER_TOKEN`) in the layers that have this role, of causal language models alone. keys: by layer
    the largest |keys| behind the rotation of positions, float32 (heads, features), where they were watched. learned:
    the same with what schemes have learned on these blocks.

    Example:
        >>> outliers.calibrate(model, blocks).blocks.shape
        torch.Size([2, 64])
    """

    blocks: torch.Tensor
    magnitudes: dict[tuple[int, str], Magnitudes]
    outlier_tokens: torch.Tensor
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    learned: "dict[Scheme, Calibration]" = field(default_factory=dict)

    @property
    def tokens_hash(self) -> str:
        """Of the blocks, as rows say it."""
        return tokens_hash(self.blocks)

    @property
    def kept(self) -> set[str]:
        """The `COSTLY` statistics that are known of all inputs."""
        known = self.magnitudes.values()
        return {name for name in COSTLY if all(getattr(magnitudes, name) is not None for magnitudes in known)}

    def lacks(self, scheme: Scheme) -> list[str]:
        """The statistics that a scheme needs and that were not kept, see `Magnitudes`, or what it has not learned."""
        lacking = [need for need in scheme.needs if need not in self.kept]
        return lacking + ["learned transforms"] * (scheme.learns and scheme.learning not in self.learned)

    def under(self, scheme: Scheme) -> "Calibration":
        """The same with what a scheme learns."""
        return self.learned[scheme.learning] if scheme.learns else self

    def of(self, projection: Projection) -> Magnitudes:
        """Those of the input of a projection.

        Raises:
            UserError: there are none, or of another width.
        """
        width = stored_weight(projection.module).shape[1]
        magnitudes = self.magnitudes.get(projection.own_place)
        if shared := self.magnitudes.get(projection.place) if projection.expert is not None else None:
            magnitudes = magnitudes._replace(inputs=shared.inputs, weights=shared.weights, learned=shared.learned)
        if magnitudes is None or len(magnitudes.inputs) != width:
            raise UserError(f"the calibration lacks {width} features of '{projection.path}'; calibrate this model")
        return magnitudes

    def prefix(self, count: int | None = None) -> tuple[int, ...]:
        """The most frequent outlier tokens, those that stand before every sequence in PrefixQuant (Chen et al., 2024).

        Of those that were outliers equally often, the ones that are more frequent in the text come first.

        Args:
            count: how many; None for as many as a block has on average in the layer with the most of them, rounded up.

        Raises:
            UserError: there are none, or fewer.
        """
        by_layer = self.outlier_tokens.sum((1, 2)).tolist()
        count = count or max(1, math.ceil(max(by_layer, default=0) / len(self.blocks)))
        outliers = Counter(self.blocks[self.outlier_tokens.any(0)].tolist())
        frequency = Counter(self.blocks.flatten().tolist())
        if len(outliers) < count:
            raise UserError(
                f"{len(outliers)} outlier tokens in {len(self.blocks)} blocks of calibration text; expected {count}: "
                "give their ids, as in prefix(30), or more blocks"
            )
        return tuple(sorted(outliers, key=lambda token: (-outliers[token], -frequency[token], token))[:count])

    def merge(self, other: "Calibration") -> "Calibration":
        """That of the blocks of both.

        Raises:
            UserError: they are of different models, or of blocks of different lengths.
        """
        alike = {place: len(magnitudes.inputs) for place, magnitudes in self.magnitudes.items()}
        if alike != {place: len(magnitudes.inputs) for place, magnitudes in other.magnitudes.items()}:
            raise UserError("cannot merge calibrations of different models; calibrate one model with both")
        if self.blocks.shape[1] != other.blocks.shape[1]:
            lengths = f"{self.blocks.shape[1]} and {other.blocks.shape[1]}"
            raise UserError(f"cannot merge calibrations of blocks of {lengths} tokens; expected one length")
        both = {place: magnitudes.merge(other.magnitudes[place]) for place, magnitudes in self.magnitudes.items()}
        outlier_tokens = torch.cat([self.outlier_tokens, other.outlier_tokens], 1)
        both_keys = self.keys.keys() & other.keys.keys()
        keys = {layer: torch.maximum(self.keys[layer], other.keys[layer]) for layer in sorted(both_keys)}
        return Calibration(torch.cat([self.blocks, other.blocks]), both, outlier_tokens, keys)
