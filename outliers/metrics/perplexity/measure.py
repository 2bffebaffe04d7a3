"""Perplexity over token blocks."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from outliers.errors import BrokenModel, UserError
from outliers.metrics.measurement import Seen
from outliers.models.anatomy import config_of_stack, family_of, readers, stacks_of
from outliers.models.anatomy.examples import IGNORED, Block
from outliers.models.decoder import inference, run_decoder
from outliers.models.hooks import input_hooks
from outliers.models.stream import Variant, is_streamed
from outliers.text.blocks import sequences
from outliers.variants.draw import scattered

LARGEST_LOSS = math.log(sys.float_info.max)  # nats: 709.8
HEAD_OUTPUTS = 4096  # logits of 512 tokens are then 8 MB, which stay in a CPU's cache


class Loss(NamedTuple):
    """Of a block: the summed negative log-likelihood, and of how many predicted tokens."""

    total: float
    tokens: int


def perplexity(
    model: PreTrainedModel, blocks: Iterable[Block], attention_mask: Iterable[torch.Tensor] | None = None
) -> float:
    """Return the perplexity: exp of the mean negative log-likelihood over all predicted tokens.

    Blocks go through the model one at a time: schemes with one scale or one outlier set for a whole batch would
    otherwise depend on the batch size. The loss is summed over tokens in float64.

    Args:
        model: a causal language model, quantized or not.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,), such as a progress bar over them; sequences of
            any lengths, in which each predicted token counts alike.
        attention_mask: 1 where there is a token and 0 where there is padding, of the shape of `blocks`, as tokenizers
            return it; padding is cut off, see `outliers.text.blocks.sequences`.

    Raises:
        UserError: there is no block; one is longer than the model's context or holds ids outside its vocabulary;
            hidden states or logits are NaN or inf; the loss is too large to have an exponential; or the mask does not
            fit.
    """
    return perplexity_of(losses(model, sequences(blocks, attention_mask)))


def perplexities(
    model: PreTrainedModel,
    blocks: Iterable[Block],
    variants: Sequence[Variant],
    attention_mask: Iterable[torch.Tensor] | None = None,
) -> list[float]:
    """Return the perplexity of a model under each variant; a streamed model reads each layer once for all of them.

    Args:
        model, blocks, attention_mask: as for `perplexity`.
        variants: what the model is under, see `outliers.variants`.

    Raises:
        UserError: as `perplexity`.
    """
    losses = variant_losses(model, sequences(blocks, attention_mask), variants)
    return [perplexity_of(losses_under) for losses_under in losses]


@inference
def losses(model: PreTrainedModel, blocks: Iterable[torch.Tensor]) -> list[Loss]:
    """The loss of each block, of which perplexity is made; those of the parts of a text can be put together."""
    return [finite_loss(model, ids, states) for _, ids, states in run_decoder(model, blocks)]


@inference
def variant_losses(
    model: PreTrainedModel, blocks: Iterable[torch.Tensor], variants: Sequence[Variant]
) -> list[list[Loss]]:
    """The same under each of some variants; of a streamed model each layer is read once for all of them."""
    if not is_streamed(model):
        blocks = list(blocks) if isinstance(blocks, Iterator) else blocks
        return [_losses_under(model, blocks, variant) for variant in variants]
    losses = [[] for _ in variants]
    for variant, ids, states in model.stream.run(model, blocks, variants, lambda *_turn: None):
        losses[variant].append(finite_loss(model, ids, states))
    return losses


def _losses_under(model: PreTrainedModel, blocks: Iterable[torch.Tensor], variant: Variant) -> list[Loss]:
    with variant.on(model) as changed:
        return losses(changed, blocks)


def perplexity_of(losses: list[Loss]) -> float:
    """exp of the mean over all predicted tokens.

    Raises UserError where there is no block, or the mean is too large or no number, as of a broken model.
    """
    if not losses:
        raise UserError("no blocks to evaluate; expected at least one")
    tokens = sum(loss.tokens for loss in losses)
    if not tokens:
        raise UserError(
            "nothing is predicted; expected blocks of at least 2 tokens, or pictures by class of a model that has them"
        )
    mean = sum(loss.total for loss in losses) / tokens
    if not mean < LARGEST_LOSS:
        raise BrokenModel(
            f"the loss is {mean:,.0f} nats a token, whose exponential, the perplexity, is larger than any "
            f"number (from {LARGEST_LOSS:.0f} on); expected a model that predicts: check its weights and dtype"
        )
    return math.exp(mean)


def finite_loss(model: PreTrainedModel, block: Block, states: torch.Tensor) -> Loss:
    """The loss of a block, of which these are the last hidden states (T, features); refuses NaN and inf."""
    hidden_states, targets = family_of(model.config).predicted(block, states)
    if (targets == IGNORED).all():  # also of no target
        return Loss(0.0, 0)
    loss = _loss(model, hidden_states, targets)
    if not torch.isfinite(loss):
        raise BrokenModel(_where_not_finite(model, block))
    return Loss(loss.item(), len(targets))


def logits_by_parts(model: PreTrainedModel, states: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Of hidden states (T, features), for a part of the vocabulary at a time: the id of its first token, and its logits
    (T, tokens of the part), in float32 or better, which may be overwritten.

    All logits of a block, (T, vocabulary), are by far the largest tensor of an evaluation, and making them costs more
    than using them.
    """
    stack = stacks_of(model.config)[-1]
    states, (weight, bias) = stack.head(model, states), stack.output(model)
    config = config_of_stack(model.config, stack)
    added = bias if stack.logits_bias is None else model.get_buffer(stack.logits_bias)[0]
    for start in range(0, len(weight), HEAD_OUTPUTS):
        part = slice(start, start + HEAD_OUTPUTS)
        bias = None if added is None else added[part]
        logits = functional.linear(states, weight[part], bias)
        yield start, stack.logits(logits.to(torch.promote_types(logits.dtype, torch.float32)), config)


def _loss(model: PreTrainedModel, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed negative log-likelihood, float64, of ids (T,), which last hidden states (T, features) are to predict."""
    place = stacks_of(model.config)[-1].output(model)[0].device
    hidden_states, targets = states.to(place), targets[:, None].to(place)
    log_normalizer = torch.full_like(targets, -torch.inf, dtype=torch.float64)
    target_logits = torch.empty_like(log_normalizer)
    for start, logits in logits_by_parts(model, hidden_states):
        inside = (targets >= start) & (targets < start + logits.shape[1])
        candidates = logits.gather(1, (targets - start).clamp(0, logits.shape[1] - 1))
        target_logits = torch.where(inside, candidates, target_logits)
        largest = logits.amax(1, keepdim=True)
        log_sum = largest.double() + logits.sub_(largest).exp_().sum(1, keepdim=True).double().log()
        log_normalizer = torch.logaddexp(log_normalizer, log_sum)
    return (log_normalizer - target_logits).sum().cpu()


def _where_not_finite(model: PreTrainedModel, block: Block) -> str:
    """Run the block again with hooks and say at which projection's input NaN or inf comes first."""
    expected = "expected finite numbers: try another dtype (float32, bfloat16) or check the weights"
    if is_streamed(model):  # its layers are gone
        return f"NaN or inf in the last hidden states or the logits; {expected}"
    places = []

    def look_at(layer, role, x):
        bad = ~torch.isfinite(x).all(0)
        if bad.any():
            places.append(f"layer {layer}, role {role}, feature {int(bad.nonzero()[0])}")

    with input_hooks(readers(model), look_at):
        for _ in run_decoder(model, [block]):
            pass
    where = f"first in the hidden states of {places[0]}" if places else "in the logits"
    return f"NaN or inf {where}; {expected}"


def _see(model: PreTrainedModel, ids: torch.Tensor, states: torch.Tensor, _exact: None) -> Loss:
    return finite_loss(model, ids, states)


def _values(draws: list[list[Loss]]) -> list[dict]:
    if draws[0] and not any(loss.tokens for loss in draws[0]):  # pictures without classes
        return [{"metric": "predicted.count", "value": 0.0, "unit": "1"}]
    return [{"metric": "perplexity", **scattered(list(map(perplexity_of, draws))), "unit": "1"}]


SEEN = Seen(_see, _values)
