"""The calibration of projections: statistics of their inputs on a text, for remedies that require them."""

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import product

import torch
from torch import nn
from transformers import PreTrainedModel

from outliers.errors import UserError, not_finite
from outliers.models.anatomy import Projection, check_plain, experts_of, family_of, projections, state_readers
from outliers.models.anatomy.examples import Block, input_ids
from outliers.models.anatomy.experts import expert_count
from outliers.models.decoder import inference, watched_pass
from outliers.models.hooks import attached, input_hooks
from outliers.quantization.caches import watched_keys
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.magnitudes import STATISTICS, Calibration, InputSummary, stored_weight
from outliers.quantization.remedies import COSTLY
from outliers.quantization.remedies.learning import learn
from outliers.quantization.schemes import Scheme, get_scheme
from outliers.terminal.progress import with_bar

FEW = 32  # an expert with fewer calibration tokens is calibrated on all tokens of its layer
logger = logging.getLogger(__name__)
OUTLIER_ROLE, OUTLIER_TOKEN = "ffn_out", 64  # an outlier token's largest |x| exceeds this many medians over tokens


@with_bar
def calibrate(
    model: PreTrainedModel,
    blocks: Iterable[Block],
    schemes: Collection[str | Scheme] = (),
    keys: bool = False,
    *,
    progress: bool | None = None,
) -> Calibration:
    """Return the statistics of the inputs of a model's projections on some blocks: the largest |x| of every feature,
    and what the schemes need beside it.

    Use other blocks than those to measure afterwards, which would make results look better than they are. Calibrations
    of parts of a text can be merged.

    Args:
        model: a causal language model with exact weights, resident or streamed; it is not changed.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,); or examples of another family.
        schemes: schemes to calibrate for; some require further statistics, see `InputSummary`, and `rotation` is
            learned on these blocks.
        keys: whether to record the magnitudes of keys too, for caches that smooth or reorder them. The attention is
            replaced for that, whose sums may differ by rounding.
        progress: whether to show a bar after two seconds; by default on a terminal and in a notebook.

    Raises:
        UserError: there is no block, one is longer than the model's context, of another length than the first, or holds
            ids outside its vocabulary; an input has NaN or inf; the model has only codes of its weights; a scheme
            learns, and the model is not a causal one with all weights in memory, or its loss is not finite.

    Example:
        >>> calibration = outliers.calibrate(model, blocks, ["absmax+smoothing"])
        >>> smoothed = outliers.quantize(model, "absmax+smoothing", calibration=calibration)
    """
    schemes = [get_scheme(scheme) for scheme in schemes]
    found = collect(model, blocks, {need for scheme in schemes for need in scheme.needs}, keys)
    for scheme in schemes:
        learn(model, scheme, found)
    return found


@inference
def collect(model: PreTrainedModel, blocks: Iterable[Block], needed: Collection[str], keys: bool) -> Calibration:
    """Return a calibration without learned transforms; needed: the required `COSTLY` statistics."""
    blocks = list(blocks)
    ids = list(map(input_ids, blocks))
    if not blocks:
        raise UserError("no blocks to calibrate on; expected at least one")
    if len(set(map(len, ids))) > 1:
        raise UserError("blocks of several lengths to calibrate on; expected one length")
    weights: dict[tuple[int, str], torch.Tensor] = {}
    magnitudes: dict[tuple[int, str], InputSummary] = {}
    statistics = {name: statistic for name, statistic in STATISTICS.items() if name in needed or name not in COSTLY}
    outlier_tokens = defaultdict(list)  # by layer: a mask for each block
    largest_keys: dict[int, torch.Tensor] = {}
    causal = family_of(model.config).name == "causal"
    tokens: Counter = Counter()  # by place of the input

    @contextmanager
    def hooks(model: PreTrainedModel, layer: int | None) -> Iterator[None]:
        for projection in projections(model, layer):
            for place in {projection.layer_state, projection.expert_state}:
                largest = _largest_weights(projection)
                weights[place] = torch.maximum(weights.get(place, largest), largest)
        # the states of all tokens, and those that each expert reads
        whole = [one for one in state_readers(model, layer) if one.layer_state in weights and one.expert is None]
        by_expert = [one for one in projections(model, layer) if one.expert is not None]
        by_expert = [one._replace(role=one.expert_state[1], state=0, expert=None) for one in by_expert]
        with (
            input_hooks(whole, see),
            input_hooks(by_expert, see),
            watched_keys(model, see_keys, layer) if keys else nullcontext(),
        ):
            yield

    @contextmanager
    def all_tokens(model: PreTrainedModel, layer: int | None) -> Iterator[None]:
        """Let experts with few tokens read all tokens of their layer within this context."""

        def hook(layer: int, few: list[int], experts: nn.Module, inputs: tuple) -> None:
            x = inputs[0][inputs[0].any(1)] if few else inputs[0]  # without the zeros of tokens that no expert got
            for number in few:
                see(layer, f"ffn_in of expert {number}", x)
                units = experts.get_submodule(str(number)).units(x, experts)
                see(layer, f"ffn_out of expert {number}", units)

        with attached(
            experts.register_forward_pre_hook(partial(hook, number, few[number]))
            for number, experts in experts_of(model).items()
            if layer in (None, number) and number in few
        ):
            yield

    def see_keys(layer: int, states: torch.Tensor) -> None:
        largest = states.abs().amax((0, 2)).float().cpu()
        largest_keys[layer] = torch.maximum(largest_keys.get(layer, largest), largest)

    def see(layer: int, role: str, x: torch.Tensor) -> None:
        place = layer, role
        tokens[place] += len(x)
        values = {name: statistic.compute(x.float(), len(blocks)).cpu() for name, statistic in statistics.items()}
        finite = values["inputs"].isfinite()
        if not finite.all():
            feature = int((~finite).nonzero()[0])
            raise not_finite(f"in the hidden states of layer {layer}, role {role}, feature {feature}")
        known = InputSummary(weights=weights[place], **values)
        magnitudes[place] = magnitudes[place].merge(known) if place in magnitudes else known
        if causal and role == OUTLIER_ROLE:
            largest = x.abs().amax(1)
            outlier_tokens[layer].append((largest > OUTLIER_TOKEN * largest.median()).cpu())

    watched_pass(model, blocks, hooks)
    few: dict[int, list[int]] = {}  # by layer, the experts with few tokens
    for layer, experts in experts_of(model).items():
        few[layer] = [
            number for number in range(expert_count(experts)) if tokens[layer, f"ffn_in of expert {number}"] < FEW
        ]
        for number, role in product(few[layer], ("ffn_in", "ffn_out")):
            magnitudes.pop((layer, f"{role} of expert {number}"), None)
    if count := sum(map(len, few.values())):
        logger.info(
            f"{count} of {sum(map(expert_count, experts_of(model).values()))} experts got fewer than {FEW} tokens of "
            "the calibration text; all tokens of their layers count for these"
        )
        watched_pass(model, blocks, all_tokens)
    token_ids = torch.stack(ids).cpu()
    by_layer = [torch.zeros(0, *token_ids.shape, dtype=torch.bool)]  # none if only experts have the role
    by_layer += [torch.stack(tokens)[None] for tokens in outlier_tokens.values()]
    return Calibration(token_ids, magnitudes, torch.cat(by_layer), largest_keys)


def _largest_weights(projection: Projection) -> torch.Tensor:
    if isinstance(projection.module, Int8Linear):
        raise UserError("this model keeps only int8 codes of its weights; calibrate the original model")
    if (weight := stored_weight(projection.module)) is None:
        check_plain(projection)
    return weight.detach().abs().amax(0).float().cpu()


def neutral(model: PreTrainedModel, scheme: Scheme) -> Calibration:
    """Return a calibration in which all magnitudes are 1, for a model whose values are unknown; nothing is learned."""
    magnitudes = {}
    for projection in projections(model):
        ones = torch.ones(stored_weight(projection.module).shape[1])
        unknown = torch.empty(2 * ones.shape, device="meta")
        for place in {projection.layer_state, projection.expert_state}:
            magnitudes[place] = InputSummary(ones, ones, ones, unknown, unknown)
    found = Calibration(torch.empty(0, 0, dtype=torch.int64), magnitudes, torch.empty(0, 0, 0, dtype=torch.bool))
    learn(model, scheme, found)
    return found
