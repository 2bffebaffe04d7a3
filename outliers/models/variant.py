"""The interface of variants, changes of a model before it is measured; without torch, so that names are parsed
quickly."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Variant(Protocol):
    """A change of a model while blocks pass, such as a scheme or an ablation; see `outliers.variants`.

    Example:
        >>> outliers.trace(model, blocks, variant=outliers.variant("llm.int8")).alpha
        6.0
    """

    @property
    def needs_trace(self) -> bool:
        """Whether the variant needs a trace of the text first; `knowing(trace)` then returns the complete variant."""
        return False

    @property
    def needs_calibration(self) -> bool:
        """Whether the variant needs a calibration first; `calibrated(calibration)` then returns the complete
        variant."""
        return False

    @property
    def has_errors(self) -> bool:
        """Whether projections put out other values under the variant, from the inputs that they have without it."""
        return False

    @property
    def has_codes(self) -> bool:
        """Whether a model that is served under the variant keeps codes in place of its weights."""
        return False

    @property
    def place_kinds(self) -> tuple[str, ...]:
        """The kinds of places of which a single one can be under the variant, or all but one: "role", "layer", "stack",
        "head" or "expert"."""
        return ()

    @property
    def is_of_places(self) -> bool:
        """Whether the variant is limited to some places."""
        return False

    @property
    def in_memory(self) -> bool:
        """Whether the whole model must be in memory."""
        return False

    @property
    def name(self) -> str:
        """The name in rows and messages; `outliers.variant` parses those of this project's variants."""

    def fields(self, model: "PreTrainedModel | None" = None, /) -> dict:
        """Return the fields that identify the variant in a row; with a model also those that depend on it, such as
        kernels."""

    def first_layer(self, model: "PreTrainedModel", /) -> int:
        """Return the first decoder layer that changes: 0 if unknown, the number of layers if none does."""
        return 0

    def layers(self, model: "PreTrainedModel", /) -> tuple[frozenset, ...]:
        """Return the changes to each decoder layer, in order, as far as they can be compared between variants."""
        return (frozenset(),) * self.first_layer(model)

    def on(self, model: "PreTrainedModel", layer: int | None = None, /) -> "AbstractContextManager[PreTrainedModel]":
        """Return a context with the changed model; layer: the only layer that is needed and has its weights, or
        None."""


@dataclass(frozen=True)
class AsItIs(Variant):
    """The variant that changes nothing."""

    name = "fp32"

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        return {}

    def first_layer(self, model: "PreTrainedModel") -> int:
        from outliers.models.anatomy import decoder_layers

        return len(decoder_layers(model))

    @contextmanager
    def on(self, model: "PreTrainedModel", _layer: int | None = None) -> "Iterator[PreTrainedModel]":
        yield model


AS_IT_IS = AsItIs()
