"""The assignment of a format's expressions to the projections of a model, and short patterns for their paths."""

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from outliers.models.anatomy import Projection
from outliers.models.anatomy.experts import ExpertProjection


@dataclass(frozen=True)
class Assigned:
    """A plan expressed in another library's format.

    groups: the format's expression of each scheme with the projections under it; that of the plan's own scheme comes
    first, if any projection has it. exact: the unquantized projections.
    """

    model: PreTrainedModel
    groups: list[tuple[object, list[Projection]]]
    exact: list[Projection]

    @property
    def exact_paths(self) -> list[str]:
        return [part.path for part in self.exact]

    @property
    def paths(self) -> list[str]:
        """Paths of all projections: the exact ones, then those of each group."""
        return [*self.exact_paths, *(part.path for _, parts in self.groups for part in parts)]

    def outside(self, kinds: tuple[type[nn.Module], ...]) -> list[str]:
        """Return the full paths of the layers of these kinds that are no projections, such as the head.

        No scheme of ours quantizes them, but a library that selects layers by kind would.
        """
        inside = set(self.paths)
        modules = ((path, module) for path, module in self.model.named_modules() if path not in inside)
        there = {path: module for path, module in modules if not isinstance(module, ExpertProjection)}
        return [path for path, module in there.items() if isinstance(module, kinds)]


def patterns(paths: Iterable[str]) -> list[str]:
    """Return paths as compressed-tensors matches them: one expression for paths that differ only in the number of
    the layer."""
    layers = defaultdict(list)
    for path in paths:
        before, number, after = re.fullmatch(r"(.*?)(?:(?<=\.)(\d+)(?=\.)(.*))?", path).groups()
        layers[before, after].append(number)
    return [
        before if after is None else f"re:{re.escape(before)}({'|'.join(numbers)}){re.escape(after)}$"
        for (before, after), numbers in layers.items()
    ]
