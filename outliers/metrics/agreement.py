"""The divergence of a variant's predictions from those of the unquantized model."""

import math
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outliers.metrics.measurement import LogitsComputation
from outliers.metrics.perplexity import broken_at, predicted
from outliers.models.anatomy.examples import Block
from outliers.show import units
from outliers.variants.draw import value_over_draws


class Agreeing(NamedTuple):
    """The agreement on a block.

    kl: the summed KL(p ‖ p_q), in nats. agreeing: number of positions with the same most probable token. tokens: number
    of all positions.
    """

    kl: float
    agreeing: int
    tokens: int


class _LogitSums(NamedTuple):
    """Running sums over the logits at each position: the largest, its token, and the sum of exp(logit − largest)."""

    largest: torch.Tensor
    token: torch.Tensor
    exponentials: torch.Tensor

    @property
    def log_normalizer(self) -> torch.Tensor:
        """log Σ exp logit, float64."""
        return self.largest + self.exponentials.log()

    @classmethod
    def after(
        cls, before: "_LogitSums | None", start: int, logits: torch.Tensor
    ) -> tuple["_LogitSums", torch.Tensor, torch.Tensor]:
        """Return the sums with the logits (T, tokens) of further tokens, from `start` on, added.

        Also return the factors by which earlier sums have to be multiplied, and exp(logit − largest) of these logits.
        """
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


class AgreementReader:
    """A reader of KL divergence from the running largest values and sums of exponentials of two models' logits.

    With logits a of the unquantized model and b of the variant, KL = Σ p (a − b) − log Σ exp a + log Σ exp b.
    """

    compares = True

    def __init__(self, model: PreTrainedModel, block: Block, targets: torch.Tensor):
        self.model, self.block = model, block
        self.predictions, self.weighted = len(targets), 0.0
        self.exact: _LogitSums | None = None
        self.changed: _LogitSums | None = None

    def add(self, start: int, logits: torch.Tensor, exact: torch.Tensor) -> None:
        self.exact, scale, exponentials = _LogitSums.after(self.exact, start, exact)
        self.weighted = self.weighted * scale + (exponentials * (exact - logits)).sum(1, dtype=torch.float64)
        self.changed, *_ = _LogitSums.after(self.changed, start, logits)

    def result(self) -> Agreeing:
        """Return the summed divergence and the number of agreeing tokens; raise BrokenModel if it is NaN or inf."""
        divergence = self.weighted / self.exact.exponentials - self.exact.log_normalizer + self.changed.log_normalizer
        if not divergence.isfinite().all():
            raise broken_at(self.model, self.block)
        agreeing = int((self.exact.token == self.changed.token).sum())
        return Agreeing(divergence.sum().item(), agreeing, self.predictions)


def values_of(draws: list[list[Agreeing]]) -> list[dict]:
    """Return divergence and agreement as values of a row, from the results of all blocks, by draw."""
    tokens = [predicted(block.tokens for block in blocks) for blocks in draws]
    kl = [math.fsum(block.kl for block in blocks) / count for blocks, count in zip(draws, tokens, strict=True)]
    same = [sum(block.agreeing for block in blocks) / count for blocks, count in zip(draws, tokens, strict=True)]
    of_kl = units.fields([(block.kl, block.tokens) for block in blocks] for blocks in draws)
    of_same = units.fields([(block.agreeing, block.tokens) for block in blocks] for blocks in draws)
    return [
        {"metric": "damage.kl", **value_over_draws(kl), "unit": "nat", **of_kl},
        {"metric": "damage.top1_agreement", **value_over_draws(same), "unit": "1", **of_same},
    ]


COMPUTATION = LogitsComputation(AgreementReader, values_of)
