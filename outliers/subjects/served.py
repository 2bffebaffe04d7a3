"""A causal language model as it generates: under a scheme its int8 weights alone are in memory."""

import functools
import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outliers.quantization.schemes import BASELINE, Scheme
from outliers.subjects.causal import Causal, Pretrained
from outliers.subjects.cell import Cell
from outliers.variants.peer import Peer
from outliers.variants.quantized import Quantized
from outliers.variants.together import schemes_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from outliers.models.stream import Variant
    from outliers.subjects.bench import Bench


class Served(Causal):
    """A model under one variant, with a text whose beginnings are prompts; a metric says how long they are."""

    of_one_variant = True

    @functools.cached_property
    def config(self) -> "PretrainedConfig":
        """Its configuration, without the text, which a metric may find too short or too long first."""
        from outliers.models.load import load_config

        return load_config(self.model, self.revision)

    def prepare(self) -> None:
        """Read the configuration; prompts are read when it is known how long they are."""
        _ = self.config

    @property
    def asked(self) -> dict:
        """What rows say of it."""
        return {name: value for name, value in super().asked.items() if name not in ("block", "blocks")}

    def check(self, cells: Iterable[Cell]) -> None:
        """As of a causal model; and see that schemes can do without exact weights."""
        from outliers.quantization.convert import check_kept

        cells = list(cells)
        for cell in cells:
            for one in schemes_of(cell.variant):
                check_kept(one.scheme)
        super().check(cells)

    def check_calibration(self, scheme: Scheme) -> None:
        """Raise UserError, for nothing is calibrated without exact weights."""
        Pretrained.check_calibration(self, scheme)

    @contextmanager
    def under(self, bench: "Bench", variant: "Variant", facts: dict) -> "Iterator[PreTrainedModel]":
        """The model under a variant; it has the weights that the facts say."""
        model, _ = self._loaded(bench, variant, facts)
        if isinstance(variant, Quantized | Peer):
            yield model
        else:
            with variant.on(model) as changed:
                yield changed

    def facts(self, bench: "Bench", cell: Cell) -> dict:
        """Hashes, sizes and kernels of the model that is served; its text is said by metrics."""
        _, fields = self._loaded(bench, cell.variant)
        return {name: value for name, value in fields.items() if name not in self.asked}

    def _loaded(self, bench: "Bench", variant: "Variant", like: dict | None = None) -> tuple["PreTrainedModel", dict]:
        def load() -> tuple["PreTrainedModel", dict]:
            model = self._in_form(variant)
            return model, self._fields(model, variant)

        return bench.keep(self.job, f"{self.settings.model_dump_json()} {variant.name}", load, like)

    def _in_form(self, variant: "Variant") -> "PreTrainedModel":
        """The model with all of a scheme that stands in the place of weights."""
        from outliers.models.load import load_model
        from outliers.quantization.convert import quantize
        from outliers.quantization.peers import with_bitsandbytes
        from outliers.quantization.store import load_int8

        place = self.settings.dtype, self.settings.device, self.revision
        if isinstance(variant, Quantized) and variant.scheme.quantizes_projections and not variant.only:
            return load_int8(self.model, variant.scheme, *place, skip=variant.skip)
        model = load_model(self.model, *place)
        if isinstance(variant, Quantized) and variant.scheme.quantizes:
            return quantize(model, variant.scheme, skip=variant.skip, only=variant.only)
        return with_bitsandbytes(model, variant.alpha) if isinstance(variant, Peer) else model

    def _fields(self, model: "PreTrainedModel", variant: "Variant") -> dict:
        """What rows of the model under a variant have in common."""
        from outliers.models.anatomy import projections
        from outliers.quantization.int8 import Int8Linear
        from outliers.subjects.bench import describe, left_fields, protocol_of

        fields = describe(self.job, model, self.settings)
        small = [module for *_, module in projections(model) if isinstance(module, Int8Linear)]
        buffers = [buffer for layer in small for buffer in layer.buffers()]  # codes and scales
        if small:
            digest = hashlib.sha256(fields["weights_hash"].encode())
            for buffer in buffers:
                digest.update(buffer.cpu().numpy())
            fields["weights_hash"] = digest.hexdigest()[:16]
            fields["parameters"] += sum(layer.codes.numel() for layer in small)
        fields["weights_bytes"] = sum(weight.nbytes for weight in [*model.parameters(), *buffers])
        quantized = small or isinstance(variant, Peer)
        left = left_fields(model, fields["parameters"]) if quantized else {}
        return fields | {"protocol": protocol_of(self.settings), "scheme": BASELINE} | variant.fields(model) | left
