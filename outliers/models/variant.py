"""Variants, changes to a model before it is measured; without torch, so that names of variants are read at once."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Variant(Protocol):
    """A change to a model while blocks pass, such as a scheme or an ablation; see `outliers.variants`.

    Example:
        >>> outliers.trace(model, blocks, variant=outliers.variant("llm.int8")).alpha
        6.0
    """

    @property
    def needs_trace(self) -> bool:
        """Whether something must be known of the text first; `knowing(trace)` is then the variant that knows it."""
        return False

    @property
    def needs_calibration(self) -> bool:
        """Whether it must know how large inputs are; `calibrated(calibration)` is then the variant that knows it."""
        return False

    @property
    def name(self) -> str:
        """Its name in rows and messages; `outliers.variant` reads those of this project's variants."""

    def fields(self, model: "PreTrainedModel | None" = None, /) -> dict:
        """The fields that identify it in a row; with a model also those that it decides, such as which kernels run."""

    def first_layer(self, model: "PreTrainedModel", /) -> int:
        """From which decoder layer on it changes anything; 0 where that is not known, their number where nothing."""
        return 0

    def layers(self, model: "PreTrainedModel", /) -> tuple[frozenset, ...]:
        """Its changes to each decoder layer, in order, as far as they can be compared with those of other variants."""
        return (frozenset(),) * self.first_layer(model)

    def on(self, model: "PreTrainedModel", layer: int | None = None, /) -> "AbstractContextManager[PreTrainedModel]":
        """A context with the model under it; layer: the only one that is asked for and has its weights, or None."""


@dataclass(frozen=True)
class AsItIs(Variant):
    """The variant that changes nothing."""

    name = "fp32"

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        """Nothing."""
        return {}

    def first_layer(self, model: "PreTrainedModel") -> int:
        """After the last one."""
        from outliers.models.anatomy import decoder_layers

        return len(decoder_layers(model))

    @contextmanager
    def on(self, model: "PreTrainedModel", _layer: int | None = None) -> "Iterator[PreTrainedModel]":
        """The model itself."""
        yield model


AS_IT_IS = AsItIs()
