"""Experts of a mixture whose output is removed."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outliers.errors import UserError
from outliers.models.variant import Variant
from outliers.variants.term import Term

if TYPE_CHECKING:  # parsing a variant does not import torch
    from torch import nn
    from transformers import PreTrainedModel

_EXPERT = re.compile(r"layers\.(?P<layer>[0-9]{1,9})\.experts\.(?P<expert>[0-9]{1,9})")


@dataclass(frozen=True)
class Dropped(Variant):
    """Experts that are chosen by the router as before and add nothing to the residual stream.

    experts: the layer and the number of each.
    """

    experts: tuple[tuple[int, int], ...]

    @classmethod
    def read(cls, term: Term) -> "Dropped":
        """Parse `drop(layers.2.experts.7/layers.3.experts.1)`; raise UserError if a place is no expert."""
        term.check_options(())
        matches = [_EXPERT.fullmatch(place) for place in term.places]
        if None in matches:
            wrong = term.places[matches.index(None)]
            raise UserError(f"'{term}' has the place '{wrong}'; expected experts, as in drop(layers.2.experts.7)")
        return cls(tuple((int(match["layer"]), int(match["expert"])) for match in matches))

    @property
    def name(self) -> str:
        return str(Term("drop", places=tuple(self.places)))

    @property
    def places(self) -> list[str]:
        return [f"layers.{layer}.experts.{expert}" for layer, expert in self.experts]

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        return {"dropped": self.places}

    def first_layer(self, _model: "PreTrainedModel") -> int:
        return min(layer for layer, _ in self.experts)

    def check(self, model: "PreTrainedModel") -> "dict[tuple[int, int], nn.Module]":
        """Return the experts of a model, which may be on the meta device; raise UserError if it lacks one."""
        from outliers.models.anatomy import experts_of
        from outliers.models.anatomy.experts import expert_count

        mixtures, found = experts_of(model), {}
        for layer, expert in self.experts:
            if layer not in mixtures or expert >= expert_count(mixtures[layer]):
                counts = {expert_count(experts) for experts in mixtures.values()}
                held = f"layers {', '.join(map(str, mixtures))} have {' or '.join(map(str, counts))} experts"
                expected = held if mixtures else "a mixture of experts"
                raise UserError(f"no expert {expert} in layer {layer} of this model; expected one of it: {expected}")
            found[layer, expert] = mixtures[layer].get_submodule(str(expert))
        return found

    @contextmanager
    def on(self, model: "PreTrainedModel", layer: int | None = None) -> "Iterator[PreTrainedModel]":
        from outliers.models.hooks import attached

        experts = {place: module for place, module in self.check(model).items() if layer in (None, place[0])}
        with attached(module.register_forward_hook(_nothing) for module in experts.values()):
            yield model


def _nothing(_module: "nn.Module", _inputs: tuple, output):
    return output.new_zeros(output.shape)
