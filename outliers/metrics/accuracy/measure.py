"""Share of pictures that a model puts into their own class, and the cross-entropy of the classes."""

from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.metrics.measurement import Seen
from outliers.metrics.perplexity.measure import finite_loss, logits_by_parts
from outliers.models.anatomy import family_of
from outliers.models.anatomy.examples import Block
from outliers.variants.draw import scattered


class Right(NamedTuple):
    """Of a block: the summed cross-entropy in nats, and of how many predictions how many are right."""

    total: float
    right: int
    predicted: int


def _see(model: PreTrainedModel, block: Block, states: torch.Tensor, _exact: None) -> Right:
    loss = finite_loss(model, block, states)
    if not loss.tokens:
        raise UserError("pictures without a class have no accuracy; give them by class, or measure the agreement")
    pooled, targets = family_of(model.config).predicted(block, states)
    logits = torch.cat([part.clone() for _, part in logits_by_parts(model, pooled)], 1)
    return Right(loss.total, int((logits.argmax(1) == targets.to(logits.device)).sum()), loss.tokens)


def _values(draws: list[list[Right]]) -> list[dict]:
    sums = [[sum(counts) for counts in zip(*blocks, strict=True)] for blocks in draws]
    return [
        {"metric": "accuracy", **scattered([right / count for _, right, count in sums]), "unit": "1"},
        {"metric": "accuracy.loss", **scattered([total / count for total, _, count in sums]), "unit": "nat"},
    ]


SEEN = Seen(_see, _values)
