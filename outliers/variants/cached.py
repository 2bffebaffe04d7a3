"""Quantized caches and prefixes (PrefixQuant) as variants."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outliers.errors import UserError
from outliers.models.variant import AS_IT_IS, Variant
from outliers.quantization.cache_formats import Formats
from outliers.variants.term import PREFIX

if TYPE_CHECKING:  # parsing a variant does not import torch
    from transformers import PreTrainedModel

    from outliers.quantization.magnitudes import Calibration

_WRITTEN = re.compile(r"prefix(?:=(?P<count>[1-9][0-9]{0,2})|\((?P<tokens>[0-9]{1,9}(?:,[0-9]{1,9})*)\))?")


@dataclass(frozen=True)
class Cached(Variant):
    """A quantized KV cache, simulated in passes of whole sequences: keys and values are quantized and dequantized.

    Those of a query's own position are quantized too.

    calibration: for formats that require the magnitudes of the channels of keys.
    """

    formats: Formats
    calibration: "Calibration | None" = None

    @classmethod
    def read(cls, written: str) -> "Cached":
        """Parse `kv=int4`, or several such terms joined by +; see `Formats.read`."""
        return cls(Formats.read(written))

    @property
    def name(self) -> str:
        return str(self.formats)

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        fields = {name: str(format) for name, format in self.formats._asdict().items() if format}
        if self.calibration is not None and self.formats.needs_calibration:
            fields["calibration_hash"] = self.calibration.tokens_hash
        return fields

    @property
    def cache(self) -> Formats:
        return self.formats

    @property
    def without_cache(self) -> Variant:
        return AS_IT_IS

    @property
    def needs_keys(self) -> bool:
        return self.needs_calibration

    @property
    def needs_calibration(self) -> bool:
        return self.formats.needs_calibration and not (self.calibration and self.calibration.keys)

    def calibrated(self, calibration: "Calibration") -> "Cached":
        return Cached(self.formats, calibration)

    def first_layer(self, _model: "PreTrainedModel") -> int:
        return min(
            min(layers.start for layers in format.layers) if format.layers else 0 for format in self.formats if format
        )

    @property
    def place_kinds(self) -> tuple[str, ...]:
        return "role", "layer", "head"

    @property
    def is_limited(self) -> bool:
        return any(format.layers or format.heads for format in self.formats if format)

    def places(self, model: "PreTrainedModel", field: str) -> dict[str | int, tuple[Formats, Formats | None]]:
        """Return the places of a kind, each with the formats that quantize only it, and those that quantize all but it.

        Places are keys and values (field "role"), layers ("layer"), or heads of a layer ("head"); a head has None as
        second formats.
        """
        from outliers.quantization.caches import heads_of_keys

        if field == "role":
            keys, values = self.formats
            parts = {"keys": (Formats(keys=keys), Formats(values=values))} if keys else {}
            return parts | ({"values": (Formats(values=values), Formats(keys=keys))} if values else {})
        heads = heads_of_keys(model)
        count, layers = 1 + max(heads), {layer: range(layer, layer + 1) for layer in heads}
        if field == "head":
            return {
                f"layers.{layer}.heads.{head}": (self._at(layers=(only,), heads=(range(head, head + 1),)), None)
                for layer, only in layers.items()
                for head in range(heads[layer])
            }
        others = {layer: tuple(filter(None, (range(layer), range(layer + 1, count)))) for layer in layers}
        return {layer: (self._at(layers=(only,)), self._at(layers=others[layer])) for layer, only in layers.items()}

    def _at(self, **places: tuple[range, ...]) -> Formats:
        return Formats(*(format and replace(format, **places) for format in self.formats))

    def only_at(self, place: tuple[Formats, Formats | None]) -> "Cached":
        return replace(self, formats=place[0])

    def except_at(self, place: tuple[Formats, Formats | None]) -> "Cached":
        return replace(self, formats=place[1])

    def check(self, model: "PreTrainedModel") -> None:
        from outliers.quantization.caches import check_cache_formats

        check_cache_formats(model, self.formats)

    @contextmanager
    def on(self, model: "PreTrainedModel", layer: int | None = None) -> "Iterator[PreTrainedModel]":
        from outliers.quantization.caches import quantized_states

        self.check(model)
        if self.needs_calibration:
            raise UserError(
                f"'{self.name}' needs the magnitudes of keys; expected a calibration: "
                "variant.calibrated(outliers.calibrate(model, blocks, keys=True)), or measure it in a run"
            )
        with quantized_states(model, self.formats, layer, self.calibration and self.calibration.keys):
            yield model


@dataclass(frozen=True)
class Prefixed(Variant):
    """Tokens before every sequence, whose keys and values stay exact.

    tokens: their ids; None for the most frequent outlier tokens of a calibration text, see `Calibration.prefix`. count:
    how many of those; None for the average number per sequence.
    """

    tokens: tuple[int, ...] | None = None
    count: int | None = None
    in_memory = is_prefix = True

    @classmethod
    def read(cls, written: str) -> "Prefixed":
        """Parse `prefix`, `prefix=COUNT` or `prefix(TOKEN,TOKEN)`; raise UserError if the text is malformed."""
        match = _WRITTEN.fullmatch(written.replace(" ", ""))
        if not match:
            raise UserError(
                f"'{written}' is not a prefix; expected prefix, prefix=2 or the ids of tokens, prefix(30,198)"
            )
        tokens, count = match["tokens"], match["count"]
        return cls(tuple(map(int, tokens.split(","))) if tokens else None, int(count) if count else None)

    @property
    def name(self) -> str:
        if self.tokens:
            return f"{PREFIX}({','.join(map(str, self.tokens))})"
        return f"{PREFIX}={self.count}" if self.count else PREFIX

    @property
    def needs_calibration(self) -> bool:
        return self.tokens is None

    def calibrated(self, calibration: "Calibration") -> "Prefixed":
        return Prefixed(calibration.prefix(self.count))

    def fields(self, _model: "PreTrainedModel | None" = None) -> dict:
        return {"prefix": list(self.tokens)} if self.tokens else {}

    def check(self, model: "PreTrainedModel") -> None:
        from outliers.quantization.caches import check_prefix

        check_prefix(model, self.tokens or ())

    @contextmanager
    def on(self, model: "PreTrainedModel", _layer: int | None = None) -> "Iterator[PreTrainedModel]":
        from outliers.models.stream import is_streamed
        from outliers.quantization.caches import behind_prefix

        if self.needs_calibration:
            raise UserError(
                f"'{self.name}' needs the outlier tokens; expected their ids, as in prefix(30), or "
                "variant.calibrated(outliers.calibrate(model, blocks))"
            )
        self.check(model)
        if is_streamed(model):
            raise UserError(f"{self.name} in a streamed model; expected one in memory")
        with behind_prefix(model, self.tokens):
            yield model
