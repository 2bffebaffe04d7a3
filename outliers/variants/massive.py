"""Massive activations of the residual stream replaced by a constant."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outliers.errors import UserError
from outliers.models.variant import Variant
from outliers.variants.edges import Place
from outliers.variants.term import Term

if TYPE_CHECKING:  # parsing a variant does not import torch
    import torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Massive(Variant):
    """A replacement of the entries of features in a layer's output whose magnitude exceeds `above` by `value`.

    If the value is the mean of such entries over a text, they become a constant (Sun et al., 2024, section 3); 0
    removes them.
    """

    features: tuple[int, ...]
    layer: int
    value: float
    above: float

    @classmethod
    def read(cls, term: Term) -> "Massive":
        """Parse `massive(FEATURE@layers.LAYER,value=VALUE,above=MAGNITUDE)`.

        Raises:
            UserError: an option is missing or unknown, the place is no layer, or a number is not finite.
        """
        options = ("value", "above")
        term.check_options(options)
        place = Place.read(term.places[0]) if len(term.places) == 1 else None
        layer = place.layers[0] if place and place.layers else None
        if layer is None or term.places[0] != f"layers.{layer}" or len(term.options) < len(options):
            raise UserError(
                f"'{term}' lacks a layer, a value or a magnitude; expected "
                "massive(FEATURE@layers.LAYER,value=0,above=100)"
            )
        value, above = (float(term.options[name]) for name in options)
        if not (abs(value) < float("inf") and 0 <= above < float("inf")):
            raise UserError(f"'{term}' has {value} and {above}; expected a finite value and a magnitude from 0 on")
        return cls(term.features, layer, value, above)

    @property
    def name(self) -> str:
        options = {"value": self.value, "above": self.above}
        return str(Term("massive", self.features, (f"layers.{self.layer}",), options))

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        massive = {"massive_features": list(self.features), "massive_layer": self.layer}
        return massive | {"massive_value": self.value + 0, "massive_above": self.above + 0}  # −0 as 0, as in names

    def first_layer(self, _model: "PreTrainedModel") -> int:
        return self.layer

    def check(self, model: "PreTrainedModel") -> None:
        from outliers.models.anatomy import check_features, features_of

        check_features(self.features, features_of(model))
        Place.read(f"layers.{self.layer}").check(model)

    @contextmanager
    def on(self, model: "PreTrainedModel", layer: int | None = None) -> "Iterator[PreTrainedModel]":
        from outliers.models.hooks import independent, residual_hooks

        columns = list(self.features)

        @independent
        def changed(_layer: int, x: "torch.Tensor") -> "torch.Tensor":
            state, entries = x.clone(), x[:, columns]
            state[:, columns] = entries.masked_fill(entries.abs() > self.above, self.value)
            return state

        self.check(model)
        if layer not in (None, self.layer):
            yield model
            return
        with residual_hooks(model, changed, self.layer):
            yield model
