"""How far the predictions of a model under a variant are from those of the unquantized one."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outliers.measurements.damage.errors import EXACT
from outliers.metrics.measurement import Seen
from outliers.metrics.perplexity.measure import Loss, finite_loss, logits_by_parts
from outliers.models.decoder import inference, run_decoder
from outliers.models.stream import Variant, is_streamed
from outliers.variants.draw import scattered

States = Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


class Distance(NamedTuple):
    """Of a block, over its predicted positions.

    loss: of the model under the variant. kl: summed KL(p ‖ p_q) in nats, p of the unquantized model. agreeing: at how
    many positions both find the same token most probable.
    """

    loss: Loss
    kl: float
    agreeing: int


@inference
def distances(model: PreTrainedModel, blocks: Iterable[torch.Tensor], variant: Variant) -> list[Distance]:
    """Of each block the distance between a model under a variant and the unquantized one.

    Args:
        model: a causal language model, quantized or not, resident or streamed.
        blocks: token ids, int64 (blocks, T), or any iterable of (T,); those of a resident model are read twice.
        variant: what is compared, such as a scheme.

    Raises:
        UserError: as `outliers.perplexity`.
    """
    pairs = _streamed if is_streamed(model) else _resident
    return [
        Distance(finite_loss(model, ids, states), *_distance(model, exact, states))
        for ids, exact, states in pairs(model, blocks, variant)
    ]


def _resident(model: PreTrainedModel, blocks: Iterable[torch.Tensor], variant: Variant) -> States:
    """Ids (T,) and last hidden states (T, features), without and under the variant, block by block."""
    blocks = list(blocks) if isinstance(blocks, Iterator) else blocks
    with EXACT.on(model) as exact, variant.on(model) as changed:
        for (_, ids, states), (_, _, others) in zip(
            run_decoder(exact, blocks), run_decoder(changed, blocks), strict=True
        ):
            yield ids, states, others


def _streamed(model: PreTrainedModel, blocks: Iterable[torch.Tensor], variant: Variant) -> States:
    """The same; last hidden states of all blocks, without the variant, are kept until those under it come."""
    kept = []
    for of_variant, ids, states in model.stream.run(model, blocks, [EXACT, variant], lambda *_turn: None):
        if of_variant == 0:
            kept.append(states.cpu())
        else:
            yield ids, kept.pop(0).to(states.device), states


def _distance(model: PreTrainedModel, exact: torch.Tensor, changed: torch.Tensor) -> tuple[float, int]:
    """Summed divergence and how many most probable tokens agree; of last hidden states (T, features).

    With logits a and b, their largest values and the sums of their exponentials known so far, a part of the vocabulary
    after the other: KL = Σ p (a − b) − log Σ exp a + log Σ exp b.
    """
    place = model.get_output_embeddings().weight.device
    parts = (logits_by_parts(model, states[:-1].to(place)) for states in (exact, changed))
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


class Agreeing(NamedTuple):
    """Of a block: summed KL(p ‖ p_q) in nats; at how many positions, of all, the most probable token is the same."""

    kl: float
    agreeing: int
    tokens: int


def _see(model: PreTrainedModel, ids: torch.Tensor, states: torch.Tensor, exact: torch.Tensor) -> Agreeing:
    return Agreeing(*_distance(model, exact, states), len(ids) - 1)


def _values(draws: list[list[Agreeing]]) -> list[dict]:
    tokens = [sum(block.tokens for block in blocks) for blocks in draws]
    kl = [math.fsum(block.kl for block in blocks) / count for blocks, count in zip(draws, tokens, strict=True)]
    same = [sum(block.agreeing for block in blocks) / count for blocks, count in zip(draws, tokens, strict=True)]
    return [
        {"metric": "damage.kl", **scattered(kl), "unit": "nat"},
        {"metric": "damage.top1_agreement", **scattered(same), "unit": "1"},
    ]


SEEN = Seen(_see, _values, compares=True)
