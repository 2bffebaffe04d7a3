"""Statistics of the inputs of projections on a calibration text, for remedies that require them."""

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

SAMPLE = 512  # least number of input rows that a calibration keeps
PlainLinear = nn.Linear | Conv1D  # the Conv1D of GPT-2 stores its weight transposed


class InputSummary(NamedTuple):
    """Calibration statistics of the projections that share an input, float32.

    inputs: the largest |x| of each feature (features,). weights: the largest |w| by which each feature is multiplied in
    any of these projections (features,). sums: sum of |x| over all tokens (features,). gram: XᵀX (features, features).
    rows: evenly spaced inputs (tokens, features). gram and rows are None unless a scheme needs them; inputs, weights
    and sums are None for features that a transform mixes. learned: what a transform has learned for these projections
    with the whole model, in a shape of its own.
    """

    inputs: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    sums: torch.Tensor | None = None
    gram: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    learned: torch.Tensor | None = None

    def merge(self, other: "InputSummary") -> "InputSummary":
        """Return the statistics of two texts together, without learned ones and those that one of the texts lacks."""
        both = {name: (getattr(self, name), getattr(other, name)) for name in STATISTICS}
        known = {name: pair for name, pair in both.items() if not any(value is None for value in pair)}
        merged = {name: STATISTICS[name].merge(*pair) for name, pair in known.items()}
        return InputSummary(weights=self.weights.maximum(other.weights), **merged)

    def transform(self, remedy: Remedy, fitted: torch.Tensor) -> "InputSummary":
        """Return the statistics of inputs after a remedy has transformed them with what it fitted, without statistics
        by feature if it mixes features."""

        def change(rows: torch.Tensor) -> torch.Tensor:
            return remedy.call("hidden_states", rows.to(fitted.device), fitted)

        by_feature = remedy.kind.by_feature
        changed = {
            name: statistic.transform(getattr(self, name), change)
            for name, statistic in STATISTICS.items()
            if getattr(self, name) is not None and (by_feature or not statistic.by_feature)
        }
        if by_feature:
            changed["weights"] = remedy.call("weight", self.weights[None].to(fitted.device), fitted)[0].abs()
        return InputSummary(learned=self.learned, **changed)


class Statistic(NamedTuple):
    """A calibration statistic of the inputs of projections.

    compute: function of the inputs of a block, float32 (tokens, features), and the number of blocks. merge: function
    that joins the statistics of two texts. transform: function of a statistic and a change of rows, which returns the
    statistic of changed inputs. by_feature: whether the statistic is undefined once features are mixed.
    """

    compute: Callable
    merge: Callable
    transform: Callable
    by_feature: bool = False


def _sample(x: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return evenly spaced rows of a block, including the first one, where massive activations occur."""
    count = min(len(x), math.ceil(SAMPLE / blocks))
    return x[[number * len(x) // count for number in range(count)]]


def _change_features(values: torch.Tensor, change: Callable) -> torch.Tensor:
    return change(values[None])[0].abs()


STATISTICS = {
    "inputs": Statistic(lambda x, _: x.abs().amax(0), lambda a, b: a.maximum(b), _change_features, True),
    "sums": Statistic(lambda x, _: x.abs().sum(0), operator.add, _change_features, True),
    "gram": Statistic(lambda x, _: x.T @ x, operator.add, lambda gram, change: change(change(gram).T)),
    "rows": Statistic(_sample, lambda *rows: torch.cat(rows), lambda rows, change: change(rows)),
}


def stored_weight(projection: PlainLinear) -> torch.Tensor:
    """Return the weight of a projection as (outputs, features), sharing memory unless it is offloaded."""
    weight = parameter_of(projection)
    return weight.T if isinstance(projection, Conv1D) else weight


@dataclass(frozen=True, eq=False)
class Calibration:
    """The statistics of a calibration text that remedies and caches need, as `calibrate` returns them.

    blocks: the token ids that the model has read, int64 (blocks, T). magnitudes: statistics by (layer, role) of the
    inputs of projections, and of the weights that multiply these. outlier_tokens: bool (layers, blocks, T), which
    tokens were outliers (`OUTLIER_TOKEN`) in the layers with `OUTLIER_ROLE`, for causal language models only. keys: by
    layer the largest |keys| after the rotary embedding, float32 (heads, features), if they were recorded. learned: by
    scheme, this calibration with the transforms that the scheme has learned on these blocks.

    Example:
        >>> outliers.calibrate(model, blocks).blocks.shape
        torch.Size([2, 64])
    """

    blocks: torch.Tensor
    magnitudes: dict[tuple[int, str], InputSummary]
    outlier_tokens: torch.Tensor
    keys: dict[int, torch.Tensor] = field(default_factory=dict)
    learned: "dict[Scheme, Calibration]" = field(default_factory=dict)

    @property
    def tokens_hash(self) -> str:
        """Hash of the blocks, as in rows."""
        return tokens_hash(self.blocks)

    @property
    def statistics(self) -> set[str]:
        """The names of those statistics of `COSTLY` that all inputs have."""
        known = self.magnitudes.values()
        return {name for name in COSTLY if all(getattr(magnitudes, name) is not None for magnitudes in known)}

    def lacks(self, scheme: Scheme) -> list[str]:
        """Return the names of the statistics and learned transforms that a scheme needs and this calibration lacks."""
        lacking = [need for need in scheme.needs if need not in self.statistics]
        return lacking + ["learned transforms"] * (scheme.learns and scheme.learning not in self.learned)

    def under(self, scheme: Scheme) -> "Calibration":
        """Return the calibration with the transforms that a scheme learns."""
        return self.learned[scheme.learning] if scheme.learns else self

    def of(self, projection: Projection) -> InputSummary:
        """Return the statistics of the input of a projection.

        Raises:
            UserError: there are none, or they have another width.
        """
        width = stored_weight(projection.module).shape[1]
        magnitudes = self.magnitudes.get(projection.expert_state)
        if shared := self.magnitudes.get(projection.layer_state) if projection.expert is not None else None:
            magnitudes = magnitudes._replace(inputs=shared.inputs, weights=shared.weights, learned=shared.learned)
        if magnitudes is None or len(magnitudes.inputs) != width:
            raise UserError(f"the calibration lacks {width} features of '{projection.path}'; calibrate this model")
        return magnitudes

    def prefix(self, count: int | None = None) -> tuple[int, ...]:
        """Return the most frequent outlier tokens, which PrefixQuant puts before every sequence (Chen et al., 2024).

        Of tokens that are as often outliers, the most frequent ones in the text come first.

        Args:
            count: how many; None for the average number of outliers per block in the layer with the most of them,
                rounded up.

        Raises:
            UserError: there are fewer outlier tokens.
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
        """Return the calibration on the blocks of both.

        Raises:
            UserError: they are of different models, or have blocks of different lengths.
        """
        widths = {place: len(magnitudes.inputs) for place, magnitudes in self.magnitudes.items()}
        if widths != {place: len(magnitudes.inputs) for place, magnitudes in other.magnitudes.items()}:
            raise UserError("cannot merge calibrations of different models; calibrate one model with both")
        if self.blocks.shape[1] != other.blocks.shape[1]:
            lengths = f"{self.blocks.shape[1]} and {other.blocks.shape[1]}"
            raise UserError(f"cannot merge calibrations of blocks of {lengths} tokens; expected one length")
        both = {place: magnitudes.merge(other.magnitudes[place]) for place, magnitudes in self.magnitudes.items()}
        outlier_tokens = torch.cat([self.outlier_tokens, other.outlier_tokens], 1)
        both_keys = self.keys.keys() & other.keys.keys()
        keys = {layer: torch.maximum(self.keys[layer], other.keys[layer]) for layer in sorted(both_keys)}
        return Calibration(torch.cat([self.blocks, other.blocks]), both, outlier_tokens, keys)
