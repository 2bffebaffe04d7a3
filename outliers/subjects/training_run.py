"""A training run: a recipe with a seed, and the text that the trained model is measured on."""

import functools
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from outliers.specification.fields import text_label
from outliers.specification.kinds import Spread
from outliers.specification.recipe import Recipe
from outliers.subjects.cell import Cell, Subject, non_default

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PreTrainedTokenizerBase

    from outliers.subjects.model_cache import ModelCache
    from outliers.trainer.corpus import Corpus


class TrainingRun(Subject):
    """A training run of a recipe with a seed.

    label: name of the recipe in the experiment. settings: the experiment, with the texts, the folder of checkpoints,
    and where it runs.
    """

    needs = ("trained_on",)

    def __init__(self, label: str, recipe: Recipe, seed: int, settings: Spread):
        self.label, self.recipe, self.seed, self.settings = label, recipe, seed, settings
        self.name = f"{label}, seed {seed}"

    @property
    def request(self) -> dict:
        settings = self.settings
        measured_on = {"text": text_label(settings.text), **settings.model_dump(include={"block", "blocks", "dtype"})}
        return {
            "run": self.label,
            "seed": self.seed,
            **self.recipe.in_rows,
            **measured_on,
            **non_default(dict(settings)),
        }

    @property
    def blocks(self) -> "torch.Tensor":
        """Held-out token ids to measure on, int64 (blocks, T)."""
        return self._read[0]

    @property
    def trained_on(self) -> str:
        """Hash of the training text, in its order."""
        return self._read[1]

    @property
    def folder(self) -> Path:
        """The folder of the checkpoints, named by a hash of all that determines the weights but the code."""
        written = json.dumps([self.recipe.model_dump(), self.seed, self.trained_on], sort_keys=True)
        return Path(self.settings.work) / hashlib.sha256(written.encode()).hexdigest()[:12]

    def prepare(self) -> None:
        from outliers.subjects.model_cache import check_machine

        check_machine(self.settings)
        self.settings.check()
        _ = self._read

    def provenance(self, _model_cache: "ModelCache", _cell: Cell) -> dict:
        """Return the hashes of the training text and of the text that is measured on."""
        from outliers.subjects.model_cache import protocol_of
        from outliers.text.blocks import tokens_hash

        protocol = protocol_of(self.settings)
        return {"trained_on": self.trained_on, "tokens_hash": tokens_hash(self.blocks), "protocol": protocol}

    def training_blocks(self) -> "np.ndarray":
        """Return the training text in its order: ids (steps · batch, T)."""
        import numpy as np

        from outliers.text.blocks import load_text
        from outliers.trainer.corpus import blocks_in_order

        recipe, settings = self.recipe, self.settings
        if recipe.from_nothing:
            return blocks_in_order(self._corpus.ids, recipe.steps, recipe.batch, self.seed)
        count = recipe.steps * recipe.batch
        blocks = load_text(settings.wikitext, self._tokenizer, settings.block, count).numpy()
        return np.random.default_rng(self.seed).permutation(blocks)

    @functools.cached_property
    def _read(self) -> "tuple[torch.Tensor, str]":
        from outliers.text.blocks import load_text

        settings = self.settings
        held_out = load_text(settings.text, self._tokenizer, settings.block, settings.blocks)
        return held_out, hashlib.sha256(self.training_blocks().tobytes()).hexdigest()[:12]

    @property
    def _tokenizer(self) -> "PreTrainedTokenizerBase":
        from outliers.models.load import load_tokenizer

        return load_tokenizer(str(self._corpus.reader) if self.recipe.from_nothing else self.recipe.start)

    @property
    def _corpus(self) -> "Corpus":
        settings = self.settings
        return _prepared(settings.c4, settings.wikitext, settings.work)


@functools.cache
def _prepared(c4: str, wikitext: str, work: str) -> "Corpus":
    from outliers.trainer.corpus import prepare

    return prepare(Path(c4), Path(wikitext), Path(work))
