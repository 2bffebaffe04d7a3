"""Magnitudes of the inputs of projections on a text, for remedies that have to know them."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from outliers.errors import UserError, not_finite
from outliers.models.anatomy import Projection, family_of, projections
from outliers.models.anatomy.examples import Block, read_ids
from outliers.models.decoder import inference, run_decoder, under
from outliers.models.hooks import input_hooks
from outliers.models.stream import AS_IT_IS, Watched
from outliers.quantization.caches import watched_keys
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import stored_weight
from outliers.quantization.schemes import Scheme, get_scheme
from outliers.quantization.transforms import COSTLY, STATISTICS, Magnitudes
from outliers.text.blocks import tokens_hash

OUTLIER_ROLE, OUTLIER_TOKEN = "ffn_out", 64  # a token whose largest |x| there exceeds so many medians of all tokens'


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

    def lacks(self, scheme: Scheme) -> list[str]:
        """The statistics that a scheme needs and that were not kept, see `Magnitudes`."""
        known = self.magnitudes.values()
        return [need for need in scheme.needs if any(getattr(magnitudes, need) is None for magnitudes in known)]

    def of(self, projection: Projection) -> Magnitudes:
        """Those of the input of a projection.

        Raises:
            UserError: there are none, or of another width.
        """
        place, width = (projection.layer, projection.role), stored_weight(projection.module).shape[1]
        magnitudes = self.magnitudes.get(place)
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


@inference
def calibrate(
    model: PreTrainedModel,
    blocks: Iterable[Block],
    schemes: Collection[str | Scheme] = (),
    keys: bool = False,
) -> Calibration:
    """Return the largest |x| of every feature that a model's projections read on some blocks.

    Blocks that are measured afterwards would make the result better than it is: take others. Two calibrations of parts
    of a text can be merged.

    Args:
        model: a causal language model with exact weights, resident or streamed; it is left as it was.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,); or examples of another family.
        schemes: those that it is for; some have to know more of the inputs: see `Magnitudes`.
        keys: whether to keep how large keys are too, for caches that smooth or reorder them. Their attention is
            exchanged for that, whose sums may differ by rounding.

    Raises:
        UserError: there is no block, one is longer than the model's context, of another length than the first, or holds
            ids outside its vocabulary; an input holds NaN or inf; only codes are left of the model's weights.

    Example:
        >>> calibration = outliers.calibrate(model, blocks, ["absmax+smoothing"])
        >>> smoothed = outliers.quantize(model, "absmax+smoothing", calibration=calibration)
    """
    blocks = list(blocks)
    ids = list(map(read_ids, blocks))
    if not blocks:
        raise UserError("no blocks to calibrate on; expected at least one")
    if len(set(map(len, ids))) > 1:
        raise UserError("blocks of several lengths to calibrate on; expected one length")
    weights: dict[tuple[int, str], torch.Tensor] = {}
    magnitudes: dict[tuple[int, str], Magnitudes] = {}
    needed = {need for scheme in schemes for need in get_scheme(scheme).needs}
    statistics = {name: statistic for name, statistic in STATISTICS.items() if name in needed or name not in COSTLY}
    outlier_tokens = defaultdict(list)  # by layer, of each block
    largest_keys: dict[int, torch.Tensor] = {}
    causal = family_of(model.config).name == "causal"

    @contextmanager
    def hooks(model: PreTrainedModel, layer: int | None) -> Iterator[None]:
        there = [projection for projection in projections(model) if layer in (None, projection.layer)]
        for projection in there:
            place, largest = (projection.layer, projection.role), _largest_weights(projection)
            weights[place] = torch.maximum(weights.get(place, largest), largest)
        with input_hooks(there, see), watched_keys(model, see_keys, layer) if keys else nullcontext():
            yield

    def see_keys(layer: int, states: torch.Tensor) -> None:
        largest = states.abs().amax((0, 2)).float().cpu()
        largest_keys[layer] = torch.maximum(largest_keys.get(layer, largest), largest)

    def see(layer: int, role: str, x: torch.Tensor) -> None:
        place = layer, role
        statistics_of_block = {
            name: statistic.of(x.float(), len(blocks)).cpu() for name, statistic in statistics.items()
        }
        finite = statistics_of_block["inputs"].isfinite()
        if not finite.all():
            feature = int((~finite).nonzero()[0])
            raise not_finite(f"in the hidden states of layer {layer}, role {role}, feature {feature}")
        seen = Magnitudes(weights=weights[place], **statistics_of_block)
        magnitudes[place] = magnitudes[place].merge(seen) if place in magnitudes else seen
        if causal and role == OUTLIER_ROLE:
            largest = x.abs().amax(1)
            outlier_tokens[layer].append((largest > OUTLIER_TOKEN * largest.median()).cpu())

    with under(model, Watched(AS_IT_IS, hooks)) as (watched, left):
        for _ in run_decoder(watched, blocks, variant=left):
            pass
    read = torch.stack(ids).cpu()
    by_layer = [torch.zeros(0, *read.shape, dtype=torch.bool)]  # none where experts alone have the role
    by_layer += [torch.stack(tokens)[None] for tokens in outlier_tokens.values()]
    return Calibration(read, magnitudes, torch.cat(by_layer), largest_keys)


def _largest_weights(projection: Projection) -> torch.Tensor:
    if isinstance(projection.module, Int8Linear):
        raise UserError("this model keeps only int8 codes of its weights; calibrate the original model")
    return stored_weight(projection.module).detach().abs().amax(0).float().cpu()


def neutral(model: PreTrainedModel) -> Calibration:
    """As if all magnitudes of a model, whose values are not known, were 1; of no text."""
    magnitudes = {}
    for projection in projections(model):
        ones = torch.ones(stored_weight(projection.module).shape[1])
        unknown = torch.empty(2 * ones.shape, device="meta")
        magnitudes[projection.layer, projection.role] = Magnitudes(ones, ones, ones, unknown, unknown)
    return Calibration(torch.empty(0, 0, dtype=torch.int64), magnitudes, torch.empty(0, 0, 0, dtype=torch.bool))
