"""A model of which only the configuration is read."""

import functools
from typing import TYPE_CHECKING

from outliers.config.experiment import Experiment
from outliers.subjects.cell import Cell, Subject

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from outliers.subjects.model_cache import ModelCache


class Configured(Subject):
    """A model by its configuration, whether or not its weights are on this machine."""

    needs = ("architecture",)
    experiment = Experiment.model_construct(device="meta")

    def __init__(self, model: str, _revision: str | None = None, _experiment: Experiment | None = None):
        self.name = model

    @property
    def request(self) -> dict:
        return {"model": self.name}

    @functools.cached_property
    def config(self) -> "PretrainedConfig":
        from outliers.models.load import find_config  # late, for it imports transformers

        return find_config(self.name)

    def prepare(self) -> None:
        _ = self.config

    def provenance(self, _model_cache: "ModelCache", _cell: Cell) -> dict:
        return {"architecture": self.config.model_type}
