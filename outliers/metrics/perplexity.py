"""Perplexity over blocks of tokens."""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from typing import NamedTuple

import torch
from outlier_kernels import dispatch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outliers.criterion import LOG_PERPLEXITY, RESIDUAL
from outliers.errors import BrokenModel, UserError, not_finite
from outliers.metrics.measurement import LogitsComputation, LogitsReader, by_seed
from outliers.models.anatomy import family_of, state_readers
from outliers.models.anatomy.examples import IGNORED, Block
from outliers.models.decoder import inference, map_blocks, run_decoder, watched_pass
from outliers.models.head import Head
from outliers.models.hooks import input_hooks, residual_hooks
from outliers.models.stream import AS_IT_IS, Variant, is_streamed
from outliers.quantization.convert import make_codes
from outliers.show import units
from outliers.subjects.cell import Subject
from outliers.terminal.progress import expect_passes, with_bar
from outliers.text.blocks import COLUMN, cut_text, unpad
from outliers.text.given import Text
from outliers.variants.draw import value_over_draws
from outliers.variants.written import variant

LARGEST_LOSS = math.log(sys.float_info.max)  # nats: 709.8


class Loss(NamedTuple):
    """The summed negative log-likelihood of a block, in nats, and its number of predicted tokens."""

    total: float
    tokens: int


class PendingLoss(NamedTuple):
    """A loss that a GPU may not have computed yet.

    total: float64 (). tokens: number of predicted tokens. model, block: the model and the block that the loss is of.
    """

    total: torch.Tensor
    tokens: int
    model: PreTrainedModel
    block: Block

    def read(self, total: float) -> Loss:
        """Return the loss, given its total as a number; the model must still be under the same variant."""
        if not math.isfinite(total):  # a single loss that is not finite makes the total so
            raise broken_at(self.model, self.block)
        return Loss(total, self.tokens)


@with_bar
def perplexity(
    model: PreTrainedModel,
    blocks: Iterable[Block],
    attention_mask: Iterable[torch.Tensor] | None = None,
    *,
    progress: bool | None = None,
) -> float:
    """Return the perplexity: exp of the mean negative log-likelihood over all predicted tokens.

    Each block passes through the model separately: schemes with one scale or one outlier set for a whole batch would
    otherwise depend on the batch size. The loss is summed over tokens in float64.

    Args:
        model: a causal language model, quantized or not.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,), such as a progress bar over them; sequences may
            have any lengths; each predicted token counts alike.
        attention_mask: 1 where there is a token and 0 where there is padding, of the shape of `blocks`, as tokenizers
            return it; padding is cut off, see `outliers.text.blocks.sequences`.
        progress: whether to show a bar after two seconds; by default on a terminal and in a notebook.

    Raises:
        UserError: there is no block; one is longer than the model's context or holds ids outside its vocabulary; hidden
            states or logits are NaN or inf; the loss is too large to have an exponential; or the mask does not fit.

    Example:
        >>> 1 < outliers.perplexity(model, blocks) < model.config.vocab_size
        True
    """
    return perplexity_of(losses(model, unpad(blocks, attention_mask)))


@with_bar
def perplexities(
    model: PreTrainedModel,
    blocks: Iterable[Block],
    variants: Sequence[Variant | str],
    attention_mask: Iterable[torch.Tensor] | None = None,
    *,
    progress: bool | None = None,
) -> list[float]:
    """Return the perplexity of a model under each variant; a streamed model reads each layer once for all of them.

    Args:
        model, blocks, attention_mask: as for `perplexity`.
        variants: changes of the model, or their names as for `outliers.variant`.
        progress: whether to show a bar after two seconds; by default on a terminal and in a notebook.

    Raises:
        UserError: as `perplexity` and `outliers.variant`.

    Example:
        >>> len(outliers.perplexities(model, blocks, ["fp32", "absmax"]))
        2
    """
    changes = [variant(change) if isinstance(change, str) else change for change in variants]
    losses = variant_losses(model, unpad(blocks, attention_mask), changes)
    return [perplexity_of(losses_under) for losses_under in losses]


@with_bar
def bits_per_byte(
    model: PreTrainedModel,
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    block: int,
    blocks: int | None = None,
    bos: bool = False,
    column: str = COLUMN,
    *,
    progress: bool | None = None,
) -> float:
    """Return the total loss in bits divided by the UTF-8 bytes of the text that the predicted tokens represent.

    Unlike perplexity, it is comparable between models with different vocabularies.

    Args:
        model: a causal language model, quantized or not.
        text, tokenizer, block, blocks, bos, column: as for `outliers.load_text`.
        progress: whether to show a bar after two seconds; by default on a terminal and in a notebook.

    Raises:
        UserError: as `outliers.load_text` and `perplexity`; or the text of the tokens is unknown, because the text is
            token ids, or the tokenizer is a slow one that does not report it.

    Example:
        >>> 0 < outliers.bits_per_byte(model, "sample", tokenizer, block=64, blocks=2) < 8
        True
    """
    cut = cut_text(text, tokenizer, block, blocks, bos, column)
    if cut.predicted_bytes is None:
        raise UserError(
            "bits per byte of token ids, or by a tokenizer that does not say which characters a token is of; expected "
            "a text and a fast tokenizer: perplexity needs neither"
        )
    return sum(loss.total for loss in losses(model, cut.ids)) / math.log(2) / int(cut.predicted_bytes.sum())


@inference
def losses(model: PreTrainedModel, blocks: Iterable[torch.Tensor]) -> list[Loss]:
    """Return the loss of each block; the lists of the parts of a text can be concatenated."""
    if is_streamed(model):
        return [loss_of(model, ids, states) for _, ids, states in run_decoder(model, blocks)]

    def loss(_number: int, block: torch.Tensor) -> Loss | PendingLoss:
        ((_, ids, states),) = run_decoder(model, [block])
        return loss_of(model, ids, states)

    return finite_losses(list(map_blocks(make_codes(model), loss, blocks)))


@inference
def variant_losses(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], variants: Sequence[Variant]
) -> list[list[Loss]]:
    """Return the losses of each block under each variant; a streamed model reads each layer once for all variants."""
    if not is_streamed(model):
        blocks = list(blocks) if isinstance(blocks, Iterator) else blocks
        expect_passes(len(variants) * (len(blocks) if isinstance(blocks, Sized) else 1))
        return [_losses_under(model, blocks, variant) for variant in variants]
    losses = [[] for _ in variants]
    for number, ids, states in model.stream.run(model, blocks, variants, lambda *_turn: None):
        losses[number].append(loss_of(model, ids, states))
    return losses


def _losses_under(model: PreTrainedModel, blocks: Iterable[torch.Tensor], variant: Variant) -> list[Loss]:
    with variant.on(model) as changed:
        return losses(changed, blocks)


def perplexity_of(losses: list[Loss]) -> float:
    """Return exp of the mean loss over all predicted tokens; raise UserError if there is none or it is too large."""
    mean = mean_loss(losses)
    if not mean < LARGEST_LOSS:
        raise too_large(mean)
    return math.exp(mean)


def too_large(mean: float) -> BrokenModel:
    """Return the error for a mean loss in nats whose exponential is larger than any number."""
    return BrokenModel(
        f"the loss is {mean:,.0f} nats a token, whose exponential, the perplexity, is larger than any "
        f"number (from {LARGEST_LOSS:.0f} on); expected a model that predicts: check its weights and dtype"
    )


def perplexity_value(metric: str, draws: Iterable[list[Loss]]) -> dict:
    """Return the perplexity over draws as a value of a row, or `log_perplexity` if it overflows."""
    draws = list(draws)
    means = list(map(mean_loss, draws))
    if max(means) + math.log(len(means)) < LARGEST_LOSS:
        value = {"metric": metric, **value_over_draws(list(map(math.exp, means))), "unit": "1"}
        return value | units.fields(draws, value["value"])
    value = {"metric": metric.replace("perplexity", LOG_PERPLEXITY), **value_over_draws(means), "unit": "nats"}
    return value | units.fields(draws)


def mean_loss(losses: list[Loss]) -> float:
    """Return the mean loss over all predicted tokens in nats; raise UserError if there is none."""
    if not losses:
        raise UserError("no blocks to evaluate; expected at least one")
    return sum(loss.total for loss in losses) / predicted(loss.tokens for loss in losses)


def predicted(tokens: Iterable[int]) -> int:
    """Return the number of predicted tokens of all blocks; raise UserError if there is none."""
    if count := sum(tokens):
        return count
    raise UserError(
        "nothing is predicted; expected blocks of at least 2 tokens, or pictures by class of a model that has them"
    )


def loss_of(model: PreTrainedModel, block: Block, states: torch.Tensor) -> Loss | PendingLoss:
    """Return the loss of a block from its last hidden states (T, features)."""
    ((loss,),) = read_logits(block, [(model, states)], [LossReader])
    return loss


def finite_losses(results: Sequence) -> list:
    """Return results of blocks with all losses as numbers, waiting once for a GPU; raise BrokenModel for NaN or inf."""
    totals = [result.total for result in results if isinstance(result, PendingLoss)]
    read = iter(torch.stack(totals).tolist() if totals else ())
    return [result.read(next(read)) if isinstance(result, PendingLoss) else result for result in results]


class LossReader:
    """A reader of the summed negative log-likelihood of targets, with a running log-sum-exp in float64."""

    compares = False
    reads_16_bits = True

    def __init__(self, model: PreTrainedModel, block: Block, targets: torch.Tensor):
        self.model, self.block, self.targets = model, block, targets[:, None]
        self.log_normalizer = torch.full_like(self.targets, -torch.inf, dtype=torch.float64)
        self.target_logits = torch.empty_like(self.log_normalizer)

    def add(self, start: int, logits: torch.Tensor, _exact: None) -> None:
        dispatch.add_logits(logits, start, self.targets, self.log_normalizer, self.target_logits)

    def losses(self) -> torch.Tensor:
        """Return the loss of each prediction, float64 (predictions,); raise BrokenModel if one is NaN or inf."""
        losses = (self.log_normalizer - self.target_logits)[:, 0]
        if not losses.isfinite().all():
            raise broken_at(self.model, self.block)
        return losses

    def result(self) -> Loss | PendingLoss:
        """Return the loss: as a number on a CPU, and for streamed models, which are under another variant later."""
        if _is_empty(self.block, self.targets):
            return Loss(0.0, 0)
        total = (self.log_normalizer - self.target_logits)[:, 0].sum()
        later = PendingLoss(total, len(self.targets), self.model, self.block)
        return later.read(later.total.item()) if later.total.is_cpu or is_streamed(self.model) else later


def read_logits(
    block: Block,
    changed: Iterable[tuple[PreTrainedModel, torch.Tensor]],
    readers: Sequence[type[LogitsReader]],
    exact: tuple | None = None,
) -> list[list]:
    """Return the results of all readers for each of some models, given the last hidden states (T, features) of a block.

    The vocabulary is passed once in parts: the logits of a part are computed once for all readers of a model, and those
    of the unquantized model once for all models.

    changed: models, or one under several variants, with their last hidden states. exact: if a reader compares, the
    unquantized model, its last hidden states and, optionally, a cache of its logits.
    """
    heads, of_models, unquantized = [], [], None
    compares = any(reader.compares for reader in readers)
    as_made = all(getattr(reader, "reads_16_bits", False) for reader in readers)
    for model, states in changed:
        states, targets = family_of(model.config).predicted(block, states)
        if compares or not _is_empty(block, targets):  # else it may have no head
            heads.append(Head(model, states))
            targets = targets.to(heads[-1].device)
        of_models.append([reader(model, block, targets) for reader in readers])
    if compares:
        model, states, *kept = exact
        unquantized = Head(model, family_of(model.config).predicted(block, states)[0], *kept)
    for part in heads[0].parts if heads else ():
        before = None if unquantized is None else unquantized.kept_logits(part).to(heads[0].device)
        for head, of_model in zip(heads, of_models, strict=True):
            logits = head.logits(part, as_made)
            for reader in of_model:
                reader.add(part.start, logits, before)
    return [[reader.result() for reader in of_model] for of_model in of_models]


def _is_empty(block: Block, targets: torch.Tensor) -> bool:
    """Return whether nothing is predicted, as for pictures without classes or a single token."""
    return not len(targets) if isinstance(block, torch.Tensor) else bool((targets == IGNORED).all())


def broken_at(model: PreTrainedModel, block: Block) -> BrokenModel:
    """Return the error for a block with NaN or inf in its logits, whose place another pass of the block finds.

    model: under the variant under which the block was measured; a streamed one uses its last variant.
    """
    places = []

    def look_at(layer: int, role: str, x: torch.Tensor) -> None:
        bad = ~torch.isfinite(x).all(0)
        if not places and bad.any():
            places.append(f"layer {layer}, role {role}, feature {int(bad.nonzero()[0])}")

    @contextmanager
    def hooks(watched: PreTrainedModel, layer: int | None) -> Iterator[None]:
        outputs = residual_hooks(watched, lambda number, x: look_at(number, RESIDUAL, x), layer)
        with input_hooks(state_readers(watched, layer), look_at), outputs:
            yield

    variant = model.stream.last if is_streamed(model) else AS_IT_IS
    ((_, _, states),) = watched_pass(model, [block], hooks, variant)
    if places:
        return not_finite(f"first in the hidden states of {places[0]}")
    return not_finite("in the logits" if states.isfinite().all() else "in the output of the final norm")


def _values(draws: list[list[Loss]], subject: Subject) -> list[dict]:
    if draws[0] and not any(loss.tokens for loss in draws[0]):  # pictures without classes
        return [{"metric": "predicted.count", "value": 0.0, "unit": "1"}]
    value = perplexity_value("perplexity", draws)
    return [value | _bits_per_byte(draws, getattr(subject, "sizes", None), subject.seed_count)]


def _bits_per_byte(draws: list[list[Loss]], sizes: torch.Tensor | None, seeds: int) -> dict:
    """Return bits per byte, with the scatter over draws, as fields of the perplexity's value; none without text."""
    if sizes is None or not sizes.sum():
        return {}
    totals = [sum(of_seed) for of_seed in by_seed(sizes.tolist(), seeds)]  # the seeds of a draw follow each other
    bits = [sum(loss.total for loss in losses) / math.log(2) for losses in draws]
    shares = value_over_draws([total / of_seed for total, of_seed in zip(bits, itertools.cycle(totals))])
    names = {"value": "bits_per_byte", "standard_deviation": "bits_per_byte_deviation"}
    of_units = [sum(of_unit) / seeds for of_unit in zip(*by_seed(sizes.tolist(), seeds), strict=True)]
    fields = {names[name]: number for name, number in shares.items()}
    return fields | {"bytes": sum(totals), "unit_bytes": list(map(units.row_digits, of_units))}


COMPUTATION = LogitsComputation(LossReader, _values, of_subject=True)
