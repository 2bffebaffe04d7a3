"""Several variants, each applied to the result of the one before it, such as an ablation under a scheme."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outliers.models.variant import Variant
from outliers.quantization.schemes import BASELINE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outliers.quantization.cache_formats import Formats
    from outliers.quantization.magnitudes import Calibration
    from outliers.tracing.result import Trace
    from outliers.variants.peer import Against
    from outliers.variants.quantized import Quantized


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
        return Together(
            tuple(variant.knowing(*traces) if variant.needs_trace else variant for variant in self.variants)
        )

    @property
    def needs_calibration(self) -> bool:
        return any(variant.needs_calibration for variant in self.variants)

    def calibrated(self, calibration: "Calibration") -> "Together":
        return Together(
            tuple(
                variant.calibrated(calibration) if variant.needs_calibration else variant for variant in self.variants
            )
        )

    @property
    def parts(self) -> tuple[Variant, ...]:
        return self.variants

    @property
    def schemes(self) -> "tuple[Quantized, ...]":
        return tuple(scheme for variant in self.variants for scheme in variant.schemes)

    @property
    def swaps(self) -> "tuple[Against, ...]":
        return tuple(other for variant in self.variants for other in variant.swaps)

    @property
    def cache(self) -> "Formats | None":
        return self.variants[-1].cache

    @property
    def without_cache(self) -> Variant:
        *variants, last = self.variants
        if last.cache is None:
            return self
        return variants[0] if len(variants) == 1 else Together(tuple(variants))

    @property
    def needs_keys(self) -> bool:
        return any(variant.needs_keys for variant in self.variants)

    @property
    def change_terms(self) -> list[str]:
        return [change for variant in self.variants for change in variant.change_terms]

    def first_layer(self, model: "PreTrainedModel") -> int:
        from outliers.models.anatomy import decoder_layers

        return min((variant.first_layer(model) for variant in self.variants), default=len(decoder_layers(model)))

    @contextmanager
    def on(self, model: "PreTrainedModel", layer: int | None = None) -> "Iterator[PreTrainedModel]":
        with ExitStack() as stack:
            for variant in self.variants:
                model = stack.enter_context(variant.on(model, layer))
            yield model
