"""Several variants, each applied to the result of the one before it, such as an ablation under a scheme."""

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
    """Variants in the order in which they are applied.

    Example:
        >>> outliers.Together((outliers.variant("zero(3)"), outliers.variant("absmax"))).name
        'zero(3)+absmax'
    """

    variants: "tuple[Variant, ...]"

    @property
    def name(self) -> str:
        """The names of all variants except the baseline."""
        return "+".join(variant.name for variant in self.variants if variant.name != BASELINE) or BASELINE

    def fields(self, model: "PreTrainedModel | None" = None) -> dict:
        return {field: value for variant in self.variants for field, value in variant.fields(model).items()}

    @property
    def needs_trace(self) -> bool:
        return any(variant.needs_trace for variant in self.variants)

    def knowing(self, *traces: "Trace") -> "Together":
        """Return the variants with traces given to those that need one."""
        return Together(
            tuple(variant.knowing(*traces) if variant.needs_trace else variant for variant in self.variants)
        )

    @property
    def needs_calibration(self) -> bool:
        return any(variant.needs_calibration for variant in self.variants)

    def calibrated(self, calibration: "Calibration") -> "Together":
        """Return the variants with the calibration given to those that need one."""
        return Together(
            tuple(
                variant.calibrated(calibration) if variant.needs_calibration else variant for variant in self.variants
            )
        )

    def first_layer(self, model: "PreTrainedModel") -> int:
        from outliers.models.anatomy import decoder_layers

        return min((variant.first_layer(model) for variant in self.variants), default=len(decoder_layers(model)))

    @contextmanager
    def on(self, model: "PreTrainedModel", layer: int | None = None) -> "Iterator[PreTrainedModel]":
        with ExitStack() as stack:
            for variant in self.variants:
                model = stack.enter_context(variant.on(model, layer))
            yield model


def parts_of(variant: "Variant") -> "tuple[Variant, ...]":
    """Return the variants that a variant consists of, in the order in which they are applied."""
    return variant.variants if isinstance(variant, Together) else (variant,)


def schemes_of(variant: "Variant") -> list[Quantized]:
    return [part for part in parts_of(variant) if isinstance(part, Quantized)]


def others_of(variant: "Variant") -> list[Against]:
    """Return the parts of a variant that are other models."""
    return [part for part in parts_of(variant) if isinstance(part, Against)]


def apart_from_cache(variant: "Variant") -> "tuple[Variant, Formats | None]":
    """Return a variant without its cache, and the formats of the cache; None if there is none."""
    *others, last = parts_of(variant)
    if not isinstance(last, Cached):
        return variant, None
    return others[0] if len(others) == 1 else Together(tuple(others)), last.formats
