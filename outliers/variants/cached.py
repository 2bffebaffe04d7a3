"""Keys and values as attention meets them out of a cache in a number format."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outliers.quantization.cache_formats import Formats

if TYPE_CHECKING:  # to read a variant takes no torch
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Cached:
    """Keys and values of all positions quantized, their own ones too: what a query meets is what a later one would."""

    formats: Formats
    needs_trace = needs_calibration = False

    @property
    def name(self) -> str:
        """Their formats, as `Formats.read` takes them."""
        return str(self.formats)

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        """Their formats."""
        return {name: str(one) for name, one in self.formats._asdict().items() if one}

    def first_layer(self, _model: "PreTrainedModel") -> int:
        """The first layer that attends to codes."""
        return min(one.layers[0] if one.layers else 0 for one in self.formats if one)

    def check(self, model: "PreTrainedModel") -> None:
        """Raise UserError if keys or values of a model, which may be on the meta device, cannot be kept so."""
        from outliers.quantization.caches import check_cache

        check_cache(model, self.formats)

    @contextmanager
    def on(self, model: "PreTrainedModel", layer: int | None = None) -> "Iterator[PreTrainedModel]":
        """The model itself, with its attention exchanged."""
        from outliers.quantization.caches import quantized_states

        self.check(model)
        with quantized_states(model, self.formats, layer):
            yield model
