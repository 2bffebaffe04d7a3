"""A model in memory with token blocks, as the Python functions take them."""

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from outliers.config.experiment import Experiment
from outliers.errors import UserError
from outliers.models.stream import is_streamed, separate_layers
from outliers.subjects.cell import Cell, Subject
from outliers.subjects.model_cache import ModelCache


class Given(Subject):
    """A model, resident or streamed, with token blocks (T,) of any lengths; its variants are calibrated already."""

    revision, takes_variants = None, True

    def __init__(self, model: PreTrainedModel, blocks: Sequence[torch.Tensor]):
        if not len(blocks):
            raise UserError("no blocks to evaluate; expected at least one")
        self.loaded, self.blocks, self.config = separate_layers(model), blocks, model.config
        self.model = self.name = model.config.name_or_path or type(model).__name__
        dtype = str(model.dtype).removeprefix("torch.")
        self.experiment = Experiment.model_construct(stream=is_streamed(model), dtype=dtype)
        self.request = {"model": self.model}

    def load(self, model_cache: ModelCache, provenance: dict | None = None) -> PreTrainedModel:
        return model_cache.fetch(self, "given", lambda: (self.loaded, {}), provenance)[0]

    def provenance(self, model_cache: ModelCache, cell: Cell) -> dict:
        return {"given": id(self), **cell.variant.fields()}  # a plan may have several texts of one model
