"""Planted outlier features as a variant, see `outliers.variants.plant`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outliers.criterion import check_threshold
from outliers.errors import UserError
from outliers.models.variant import Variant
from outliers.variants.term import Term

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Planted(Variant):
    """An enlargement of features of the norms' outputs by a factor, compensated in the weights that read them.

    Example:
        >>> outliers.Planted((3,), factor=8).name
        'plant(3,factor=8)'
    """

    features: tuple[int, ...]
    factor: float

    @classmethod
    def read(cls, term: Term) -> "Planted":
        """Parse `plant(FEATURE,FEATURE,factor=FACTOR)`.

        Raises:
            UserError: there is another option or a place, or the factor is missing or not a positive number.
        """
        term.check_options(["factor"])
        if term.places or not term.options:
            raise UserError(
                f"'{term}' has no factor, or has a place; expected features and a factor: plant(3,factor=8)"
            )
        return cls(term.features, check_threshold(f"the factor of '{term}'", term.options["factor"]))

    @property
    def name(self) -> str:
        return str(Term("plant", self.features, options={"factor": self.factor}))

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        return {"planted": list(self.features), "factor": self.factor}

    @contextmanager
    def on(self, model: "PreTrainedModel", _layer: int | None = None) -> "Iterator[PreTrainedModel]":
        from outliers.variants.plant import plant

        yield plant(model, self.features, self.factor)
