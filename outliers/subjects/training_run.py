"""A training run: a recipe with a seed, and the text that the trained model is measured on."""

import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from outliers.config.experiment import Experiment
from outliers.config.fields import text_label
from outliers.config.recipe import Recipe
from outliers.subjects.cell import Cell, Subject

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

    from outliers.subjects.model_cache import ModelCache
    from outliers.trainer.corpus import Corpus


class TrainingRun(Subject):
    """A training run of a recipe with a seed.

    label: name of the recipe in the experiment. experiment: the experiment, with the texts, the folder of checkpoints,
    and where it runs.
    """

    needs = ("trained_on",)

    def __init__(self, label: str, recipe: Recipe, seed: int, experiment: Experiment):
        self.label, self.recipe, self.seed, self.experiment = label, recipe, seed, experiment
        self.name = f"{label}, seed {seed}"

    @property
    def request(self) -> dict:
        experiment = self.experiment
        measured_on = {"text": text_label(experiment.text), "dtype": experiment.dtype}
        measured_on |= {"block": experiment.block, "blocks": experiment.blocks}
        return {"run": self.label, "seed": self.seed, **self.recipe.in_rows, **measured_on, **experiment.non_default()}

    @property
    def blocks(self) -> "torch.Tensor":
        """Held-out token ids to measure on, int64 (blocks, T)."""
        return self._held_out_text_and_digest[0]

    @property
    def trained_on(self) -> str:
        """Hash of the training text, in its order."""
        return self._held_out_text_and_digest[1]

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints, named by a hash of all that determines the weights but the code."""
        written = json.dumps([self.recipe.model_dump(), self.seed, self.trained_on], sort_keys=True)
        return Path(self.experiment.work) / hashlib.sha256(written.encode()).hexdigest()[:12]

    def prepare(self) -> None:
        from outliers.subjects.model_cache import check_machine

        check_machine(self.experiment)
        self.experiment.check()
        _ = self._held_out_text_and_digest

    def provenance(self, _model_cache: "ModelCache", _cell: Cell) -> dict:
        """Return the hashes of the training text and of the text that is measured on."""
        from outliers.subjects.model_cache import protocol_of
        from outliers.text.blocks import tokens_hash

        protocol = protocol_of(self.experiment)
        return {"trained_on": self.trained_on, "tokens_hash": tokens_hash(self.blocks), "protocol": protocol}

    def training_blocks(self) -> "np.ndarray":
        """Return the training text in its order: ids (steps · batch, T)."""
        import numpy as np

        from outliers.text.blocks import load_text
        from outliers.trainer.corpus import blocks_in_order

        recipe, experiment = self.recipe, self.experiment
        if recipe.from_nothing:
            return blocks_in_order(self._corpus.ids, recipe.steps, recipe.batch, self.seed)
        count = recipe.steps * recipe.batch
        blocks = load_text(experiment.wikitext, self._tokenizer, experiment.block, count).numpy()
        return np.random.default_rng(self.seed).permutation(blocks)

    @functools.cached_property
    def _held_out_text_and_digest(self) -> "tuple[torch.Tensor, str]":
        """The token ids of the held-out text (blocks, T), and a hash of the training text."""
        from outliers.text.blocks import load_text

        experiment = self.experiment
        held_out = load_text(experiment.text, self._tokenizer, experiment.block, experiment.blocks)
        return held_out, hashlib.sha256(self.training_blocks().tobytes()).hexdigest()[:12]

    @property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        from outliers.models.load import load_tokenizer

        return load_tokenizer(str(self._corpus.folder) if self.recipe.from_nothing else self.recipe.start)

    @property
    def _corpus(self) -> "Corpus":
        experiment = self.experiment
        return _cached_corpus(experiment.c4, experiment.wikitext, experiment.work)


@functools.cache
def _cached_corpus(c4: str, wikitext: str, work: str) -> "Corpus":
    from outliers.trainer.corpus import prepare_corpus

    return prepare_corpus(Path(c4), Path(wikitext), Path(work))
