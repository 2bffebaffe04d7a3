"""The assignment of a format's expressions to the projections of a model, and short patterns for their paths."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedModel

from outliers.models.anatomy import Projection
from outliers.models.anatomy.experts import ExpertProjection


@dataclass(frozen=True)
class Assigned:
    """A plan expressed in another library's format.

    groups: the object or text that stands for each scheme in the format, with the projections under it; that of the
    plan's own scheme comes first, if any projection has it. exact: the unquantized projections.
    """

    model: PreTrainedModel
    groups: list[tuple[object, list[Projection]]]
    exact: list[Projection]

    def renamed(self, names: Callable[[Projection], Iterable[str]]) -> "Assigned":
        """Return the assignment with each projection under its names in another library, which may be none."""

        def of(parts: list[Projection]) -> list[Projection]:
            return [part._replace(path=path) for part in parts for path in names(part)]

        return replace(self, groups=[(words, of(parts)) for words, parts in self.groups], exact=of(self.exact))

    @property
    def exact_paths(self) -> list[str]:
        return [part.path for part in self.exact]

    @property
    def paths(self) -> list[str]:
        """Paths of all projections: the exact ones, then those of each group."""
        return [*self.exact_paths, *(part.path for _, parts in self.groups for part in parts)]

    def outside(self, kinds: tuple[type[nn.Module], ...]) -> list[str]:
        """Return the full paths of the layers of these kinds that are not projections, such as the head.

        No scheme of ours quantizes them, but a library that selects layers by kind would.
        """
        inside = set(self.paths)
        modules = ((path, module) for path, module in self.model.named_modules() if path not in inside)
        others = {path: module for path, module in modules if not isinstance(module, ExpertProjection)}
        return [path for path, module in others.items() if isinstance(module, kinds)]


def patterns(paths: Iterable[str]) -> list[str]:
    """Return patterns of paths for compressed-tensors: one expression for paths that differ only in the numbers of the
    layer and the expert."""
    split = [re.split(r"(?<=\.)(\d+)(?=\.)", path) for path in paths]  # numbers at odd places
    for place in range(max(map(len, split), default=0) - 2, 0, -2):
        alike = defaultdict(list)
        for pieces in split:
            alike[tuple(pieces[:place]), tuple(pieces[place + 1 :])].extend(pieces[place : place + 1])
        split = [
            [*before, *(["|".join(numbers)] if numbers else []), *after] for (before, after), numbers in alike.items()
        ]
    return [
        pieces[0]
        if len(pieces) == 1
        else f"re:{''.join(f'({piece})' if place % 2 else re.escape(piece) for place, piece in enumerate(pieces))}$"
        for pieces in split
    ]
