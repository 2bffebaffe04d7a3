"""A model as it is served, to generate or encode: under a scheme only its int8 weights are in memory."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outliers.errors import UserError
from outliers.quantization.schemes import BASELINE
from outliers.subjects.causal import ModelWithText, Pretrained
from outliers.subjects.cell import Cell

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from outliers.models.variant import Variant
    from outliers.subjects.model_cache import ModelCache


class Served(ModelWithText):
    """A model under one variant, with a text whose beginnings are prompts; the metric sets the length of prompts."""

    families = ("causal", "masked", "seq2seq", "vision")
    has_one_variant = True

    def prepare(self) -> None:
        """Read all but the text, because the length of prompts is not known yet."""
        Pretrained.prepare(self)

    @property
    def request(self) -> dict:
        return {name: value for name, value in super().request.items() if name not in ("block", "blocks")}

    def check(self, cells: Iterable[Cell]) -> None:
        """Check cells as `ModelWithText`, and that schemes work without exact weights, and caches without a prefix."""
        from outliers.quantization.convert import check_kept

        cells = list(cells)
        for cell in cells:
            for quantized in cell.variant.schemes:
                check_kept(quantized.scheme)
            formats = cell.variant.cache
            if formats and any(part.is_prefix for part in cell.variant.parts):
                raise UserError(f"'{cell.variant.name}' generates behind a prefix in {formats}; expected one alone")
        super().check(cells)

    def check_calibration(self, variant: "Variant") -> None:
        """Raise UserError as `Pretrained`: nothing is calibrated, for the text is that of prompts."""
        Pretrained.check_calibration(self, variant)

    @contextmanager
    def under(self, model_cache: "ModelCache", variant: "Variant", provenance: dict) -> "Iterator[PreTrainedModel]":
        """Provide the model under a variant without its quantized KV cache, after checking its weights."""
        model, _ = self._loaded(model_cache, variant, provenance)
        variant = variant.without_cache
        if hasattr(variant, "served"):
            yield model
        else:
            with variant.on(model) as changed:
                yield changed

    def provenance(self, model_cache: "ModelCache", cell: Cell) -> dict:
        """Return hashes, sizes and kernels of the served model; metrics add the provenance of its text."""
        return self._loaded(model_cache, cell.variant)[1]

    def _loaded(
        self, model_cache: "ModelCache", variant: "Variant", expected: dict | None = None
    ) -> tuple["PreTrainedModel", dict]:
        from outliers.models.load import load_model

        experiment = self.experiment
        place = self.model, experiment.dtype, experiment.device, self.revision

        def load() -> tuple["PreTrainedModel", dict]:
            served = variant.without_cache
            model = served.served(*place) if hasattr(served, "served") else load_model(*place)
            return model, self._fields(model, variant)

        return model_cache.fetch(self, (experiment.dtype, experiment.device, variant.name), load, expected)

    def _fields(self, model: "PreTrainedModel", variant: "Variant") -> dict:
        from outliers.models.anatomy import projections
        from outliers.quantization.int8 import Int8Linear
        from outliers.subjects.model_cache import describe, protocol_of

        fields = describe(self, model)
        small = [projection.module for projection in projections(model) if isinstance(projection.module, Int8Linear)]
        buffers = [buffer for layer in small for buffer in layer.buffers()]  # codes and scales
        if small:
            digest = hashlib.sha256(fields["weights_hash"].encode())
            for buffer in buffers:
                digest.update(buffer.cpu().numpy())
            fields["weights_hash"] = digest.hexdigest()[:16]
            fields["parameters"] += sum(layer.codes.numel() for layer in small)
        weights = [*model.parameters(), *buffers]
        fields["weights_bytes"] = sum(weight.nbytes for weight in weights)
        text = {"protocol": protocol_of(self.experiment, self.blocks), "scheme": BASELINE}
        return fields | text | variant.fields(model)
