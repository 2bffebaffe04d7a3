"""Several variants, each on what the one before it made: an ablation under a scheme."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outliers.models.variant import Variant
from outliers.quantization.schemes import BASELINE
from outliers.variants.cached import Cached
from outliers.variants.peer import Against
from outliers.variants.quantized import Quantized

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outliers.quantization.cache_formats import Formats
    from outliers.quantization.magnitudes import Calibration
    from outliers.tracing.result import Trace


@dataclass(frozen=True)
class Together(Variant):
    """Variants in the order in which they act.

    Example:
        >>> outliers.Together((outliers.variant("zero(3)"), outliers.variant("absmax"))).name
        'zero(3)+absmax'
    """

    variants: "tuple[Variant, ...]"

    @property
    def name(self) -> str:
        """All names but of what does nothing."""
        return "+".join(variant.name for variant in self.variants if variant.name != BASELINE) or BASELINE

    def fields(self, model: "PreTrainedModel | None" = None) -> dict:
        """Those of all."""
        return {field: value for variant in self.variants for field, value in variant.fields(model).items()}

    @property
    def needs_trace(self) -> bool:
        """Whether one of them does."""
        return any(variant.needs_trace for variant in self.variants)

    def knowing(self, *traces: "Trace") -> "Together":
        """The same with what those need that need a trace."""
        return Together(
            tuple(variant.knowing(*traces) if variant.needs_trace else variant for variant in self.variants)
        )

    @property
    def needs_calibration(self) -> bool:
        """Whether one of them does."""
        return any(variant.needs_calibration for variant in self.variants)

    def calibrated(self, calibration: "Calibration") -> "Together":
        """The same with those calibrated that need it."""
        return Together(
            tuple(
                variant.calibrated(calibration) if variant.needs_calibration else variant for variant in self.variants
            )
        )

    def first_layer(self, model: "PreTrainedModel") -> int:
        """From which decoder layer on one of them changes anything."""
        from outliers.models.anatomy import decoder_layers

        return min((variant.first_layer(model) for variant in self.variants), default=len(decoder_layers(model)))

    @contextmanager
    def on(self, model: "PreTrainedModel", layer: int | None = None) -> "Iterator[PreTrainedModel]":
        """The model that the last one makes."""
        with ExitStack() as stack:
            for variant in self.variants:
                model = stack.enter_context(variant.on(model, layer))
            yield model


def parts_of(variant: "Variant") -> "tuple[Variant, ...]":
    """The variants that it consists of, in the order in which they act."""
    return variant.variants if isinstance(variant, Together) else (variant,)


def schemes_of(variant: "Variant") -> list[Quantized]:
    """Those that put projections under a scheme."""
    return [part for part in parts_of(variant) if isinstance(part, Quantized)]


def others_of(variant: "Variant") -> list[Against]:
    """Those that are models of others."""
    return [part for part in parts_of(variant) if isinstance(part, Against)]


def apart_from_cache(variant: "Variant") -> "tuple[Variant, Formats | None]":
    """A variant without its cache, and the formats of the cache; None where it has none."""
    *others, last = parts_of(variant)
    if not isinstance(last, Cached):
        return variant, None
    return others[0] if len(others) == 1 else Together(tuple(others)), last.formats
