"""The assignment of a format to the projections of a model, and their names, written short."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from outliers.models.anatomy import Projection


@dataclass(frozen=True)
class Assigned:
    """A plan in the words of a format.

    groups: what the format says of a scheme, with the projections that are under it; that of the plan's own scheme is
    first, if any has it. exact: the projections that no scheme quantizes.
    """

    model: PreTrainedModel
    groups: list[tuple[object, list[Projection]]]
    exact: list[Projection]

    @property
    def exact_paths(self) -> list[str]:
        """The full paths of the projections that stay exact."""
        return [part.path for part in self.exact]

    @property
    def paths(self) -> list[str]:
        """The full paths of all projections."""
        return [*self.exact_paths, *(part.path for _, parts in self.groups for part in parts)]

    def outside(self, kinds: tuple[type[nn.Module], ...]) -> list[str]:
        """Full paths of the layers of these kinds that are no projections, such as the head; no scheme quantizes them,
        and a library that takes every layer of a kind would."""
        inside = set(self.paths)
        return [path for path, module in self.model.named_modules() if isinstance(module, kinds) and path not in inside]


def patterns(paths: Iterable[str]) -> list[str]:
    """Paths as compressed-tensors matches them: those that differ in the number of their layer by one expression."""
    layers = defaultdict(list)
    for path in paths:
        before, number, after = re.fullmatch(r"(.*?)(?:(?<=\.)(\d+)(?=\.)(.*))?", path).groups()
        layers[before, after].append(number)
    return [
        before if after is None else f"re:{re.escape(before)}({'|'.join(numbers)}){re.escape(after)}$"
        for (before, after), numbers in layers.items()
    ]
