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
    def has_output_errors(self) -> bool:
        """Whether a projection that is given its inputs in the unchanged model has other outputs, so that output errors
        can be measured."""
        return False

    @property
    def has_codes(self) -> bool:
        """Whether a model that is loaded to generate under the variant holds codes, the integers of quantized weights,
        instead of weights."""
        return False

    @property
    def place_kinds(self) -> tuple[str, ...]:
        """The kinds of places to which the variant can be limited, or which it can leave out: "role", "layer", "stack",
        "head" or "expert"."""
        return ()

    @property
    def is_limited(self) -> bool:
        """Whether the variant is limited to some places of the model, such as ffn_out or layers.0:6."""
        return False

    @property
    def in_memory(self) -> bool:
        """Whether the whole model must be in memory."""
        return False

    @property
    def is_exact(self) -> bool:
        """Whether the model is unchanged, whatever the options."""
        return False

    @property
    def is_prefix(self) -> bool:
        """Whether the variant puts tokens before every sequence."""
        return False

    @property
    def package(self) -> str | None:
        """The library that the variant needs, if it does not come with this one."""
        return None

    @property
    def keeps_weights(self) -> bool:
        """Whether the variant leaves the weights of projections as they are, so that codes made of them serve with and
        without it."""
        return False

    @property
    def parts(self) -> "tuple[Variant, ...]":
        """The variants of which this one consists, in the order in which they are applied."""
        return (self,)

    @property
    def schemes(self) -> "tuple[Variant, ...]":
        """The parts that are schemes of ours, `outliers.Quantized`."""
        return ()

    @property
    def swaps(self) -> "tuple[Variant, ...]":
        """The parts that run another model, or projections of it, instead of this one:
        `outliers.variants.peer.Against`."""
        return ()

    @property
    def cache(self) -> tuple | None:
        """The formats of a quantized cache, `outliers.quantization.cache_formats.Formats`."""
        return None

    @property
    def without_cache(self) -> "Variant":
        """The variant without its quantized cache."""
        return self

    @property
    def needs_keys(self) -> bool:
        """Whether the calibration must have the magnitudes of keys."""
        return False

    @property
    def change_terms(self) -> list[str]:
        """The terms of the name beside a scheme's format and threshold, such as "hadamard" of "w4a4+hadamard"."""
        return [self.name]

    @property
    def attention_ablation(self) -> "Variant | None":
        """The ablation of the inputs of q, k and v that stands for the variant where a metric changes the attention of
        one layer at a time; None if there is none."""
        return None

    @property
    def name(self) -> str:
        """The name in rows and messages, which `outliers.variant` parses if the variant is one of this project's."""

    def fields(self, model: "PreTrainedModel | None" = None, /) -> dict:
        """Return the fields that identify the variant in a row; with a model also those that depend on it, such as
        kernels."""

    def first_layer(self, model: "PreTrainedModel", /) -> int:
        """Return the first decoder layer that changes: 0 if unknown, the number of layers if none does."""
        return 0

    def layers(self, model: "PreTrainedModel", /) -> tuple[frozenset, ...]:
        """Return a set of changes for each decoder layer, in order. Leading layers with equal sets in two variants have
        equal outputs, which are computed once; the tuple ends where changes cannot be compared."""
        return (frozenset(),) * self.first_layer(model)

    def on(self, model: "PreTrainedModel", layer: int | None = None, /) -> "AbstractContextManager[PreTrainedModel]":
        """Return a context with the changed model; layer: the only layer that is needed and has its weights, or
        None."""


@dataclass(frozen=True)
class AsItIs(Variant):
    """The variant that changes nothing."""

    name = "fp32"
    is_exact = True

    @property
    def change_terms(self) -> list[str]:
        return []

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        return {}

    def first_layer(self, model: "PreTrainedModel") -> int:
        from outliers.models.anatomy import decoder_layers

        return len(decoder_layers(model))

    @contextmanager
    def on(self, model: "PreTrainedModel", _layer: int | None = None) -> "Iterator[PreTrainedModel]":
        yield model


AS_IT_IS = AsItIs()
