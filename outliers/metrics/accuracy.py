"""The accuracy of image classification, and the cross-entropy of the classes."""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.metrics.measurement import LogitsComputation
from outliers.metrics.perplexity import LossReader, finite_losses
from outliers.models.anatomy.examples import Block
from outliers.show import units
from outliers.variants.draw import value_over_draws


class AccuracySums(NamedTuple):
    """The summed cross-entropy of a block in nats, and its numbers of correct and of all predictions."""

    total: float
    correct: int
    predicted: int


class AccuracyReader(LossReader):
    """A reader of the loss that also counts targets with the largest logit."""

    def __init__(self, model: PreTrainedModel, block: Block, targets: torch.Tensor):
        super().__init__(model, block, targets)
        self.largest = torch.full_like(self.log_normalizer, -torch.inf)
        self.token = torch.zeros_like(self.targets)

    def add(self, start: int, logits: torch.Tensor, exact: None) -> None:
        super().add(start, logits, exact)
        largest, token = logits.max(1, keepdim=True)
        self.token = torch.where(largest > self.largest, token + start, self.token)
        self.largest = torch.maximum(largest, self.largest)

    def result(self) -> AccuracySums:
        (loss,) = finite_losses([super().result()])
        if not loss.tokens:
            raise UserError("pictures without a class have no accuracy; give them by class, or measure the agreement")
        return AccuracySums(loss.total, int((self.token == self.targets).sum()), loss.tokens)


def _values(draws: list[list[AccuracySums]]) -> list[dict]:
    sums = [[sum(counts) for counts in zip(*blocks, strict=True)] for blocks in draws]
    right, loss = (
        units.fields([(block[part], block.predicted) for block in blocks] for blocks in draws) for part in (1, 0)
    )
    return [
        {"metric": "accuracy", **value_over_draws([right / count for _, right, count in sums]), "unit": "1", **right},
        {
            "metric": "accuracy.loss",
            **value_over_draws([total / count for total, _, count in sums]),
            "unit": "nat",
            **loss,
        },
    ]


COMPUTATION = LogitsComputation(AccuracyReader, _values)
