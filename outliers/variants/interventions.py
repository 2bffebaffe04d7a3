"""What can be put in the place of a feature's values."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from outliers.models.anatomy import Projection
from outliers.models.hooks import input_hooks

Means = dict[tuple[int, str], torch.Tensor]


def _zero(values, _mean, _generator):
    return torch.zeros_like(values)


def _mean(values, mean, _generator):
    return mean.to(values).expand_as(values)


def _shuffle(values, _mean, generator):
    order = torch.rand(values.shape, generator=generator).argsort(0)
    return values.gather(0, order.to(values.device))


# Method: (values (T, features), their means over the text (features,), generator) to values.
METHODS = {"zero": _zero, "mean": _mean, "shuffle": _shuffle}


@dataclass(frozen=True)
class Intervention:
    """Features whose values are replaced in the inputs of projections.

    method: "zero" (the paper's), "mean", their mean over the text, or "shuffle", their values permuted over the
    positions of the sequence, each feature by itself. means: mean of every feature by layer and role, for "mean".
    """

    features: tuple[int, ...]
    method: str = "zero"
    seed: int = 0
    means: Means = field(default_factory=dict, repr=False)

    @contextmanager
    def on(self, projections: list[Projection]) -> Iterator[None]:
        """Replace the features in the inputs of these projections; what is shuffled is a function of the seed."""
        if not self.features:
            yield
            return
        generator = torch.Generator().manual_seed(self.seed)
        columns = list(self.features)

        def replaced(layer: int, role: str, x: torch.Tensor) -> torch.Tensor:
            mean = self.means[layer, role][columns] if self.means else None
            changed = x.clone()
            changed[:, columns] = METHODS[self.method](x[:, columns], mean, generator)
            return changed

        with input_hooks(projections, replaced):
            yield
