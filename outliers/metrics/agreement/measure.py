"""Distance of the predictions of a model under a variant from those of the unquantized one."""

import math
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outliers.metrics.measurement import Seen
from outliers.metrics.perplexity.measure import logits_by_parts
from outliers.models.anatomy import family_of, stacks_of
from outliers.models.anatomy.examples import Block
from outliers.variants.draw import scattered


class Agreeing(NamedTuple):
    """Of a block: summed KL(p ‖ p_q) in nats; at how many positions, of all, the most probable token is the same."""

    kl: float
    agreeing: int
    tokens: int


def _distance(
    exact: tuple[PreTrainedModel, torch.Tensor], changed: tuple[PreTrainedModel, torch.Tensor]
) -> tuple[float, int]:
    """Summed divergence and how many most probable tokens agree; of models, each with its last hidden states
    (T, features), for another model may have a head of its own.

    With logits a and b, their largest values and the sums of their exponentials known so far, a part of the vocabulary
    after the other: KL = Σ p (a − b) − log Σ exp a + log Σ exp b.
    """
    model, _ = changed
    place = stacks_of(model.config)[-1].output(model)[0].device
    parts = (logits_by_parts(side, states.to(place)) for side, states in (exact, changed))
    a_sums, b_sums, weighted = None, None, 0.0
    for (start, a), (_, b) in zip(*parts, strict=True):
        a_sums, scale, exponentials = _Sums.after(a_sums, start, a)
        weighted = weighted * scale + (exponentials * (a - b)).sum(1, dtype=torch.float64)
        b_sums, *_ = _Sums.after(b_sums, start, b)
    divergence = weighted / a_sums.exponentials - a_sums.log_normalizer + b_sums.log_normalizer
    return divergence.sum().item(), int((a_sums.token == b_sums.token).sum())


class _Sums(NamedTuple):
    """Of the logits at each position so far: the largest, whose token it is, and the sum of exp(logit − largest)."""

    largest: torch.Tensor
    token: torch.Tensor
    exponentials: torch.Tensor

    @property
    def log_normalizer(self) -> torch.Tensor:
        """log Σ exp logit, float64."""
        return self.largest + self.exponentials.log()

    @classmethod
    def after(
        cls, before: "_Sums | None", start: int, logits: torch.Tensor
    ) -> tuple["_Sums", torch.Tensor, torch.Tensor]:
        """With the logits (T, tokens) of further tokens, from `start` on; by what sums from before are multiplied; and
        exp(logit − largest) of these logits."""
        largest, token = logits.max(1)
        largest, token = largest.double(), token + start
        if before is not None:
            token = torch.where(largest > before.largest, token, before.token)
            largest = torch.maximum(largest, before.largest)
        exponentials = (logits - largest.to(logits.dtype)[:, None]).exp_()
        total = exponentials.sum(1, dtype=torch.float64)
        if before is None:
            return cls(largest, token, total), torch.ones_like(total), exponentials
        scale = (before.largest - largest).exp()
        return cls(largest, token, before.exponentials * scale + total), scale, exponentials


def agreeing(
    model: PreTrainedModel, block: Block, states: torch.Tensor, exact: tuple[PreTrainedModel, torch.Tensor]
) -> Agreeing:
    """Agreement of a model with last hidden states (T, features) of a block with the unquantized one with its own."""
    predicted, (unquantized, before) = family_of(model.config).predicted, exact
    (before, targets), (after, _) = (predicted(block, side) for side in (before, states))
    return Agreeing(*_distance((unquantized, before), (model, after)), len(targets))


def values_of(draws: list[list[Agreeing]]) -> list[dict]:
    """Divergence and agreement, of what is seen of all blocks, draw by draw."""
    tokens = [sum(block.tokens for block in blocks) for blocks in draws]
    kl = [math.fsum(block.kl for block in blocks) / count for blocks, count in zip(draws, tokens, strict=True)]
    same = [sum(block.agreeing for block in blocks) / count for blocks, count in zip(draws, tokens, strict=True)]
    return [
        {"metric": "damage.kl", **scattered(kl), "unit": "nat"},
        {"metric": "damage.top1_agreement", **scattered(same), "unit": "1"},
    ]


SEEN = Seen(agreeing, values_of, compares=True)
