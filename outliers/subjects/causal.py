"""Models by their names: alone, or with blocks of a text and their loss; and how causal models read a text."""

import functools
import logging
import math
from collections.abc import Iterable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from outliers.config.experiment import Experiment
from outliers.config.fields import text_label
from outliers.errors import UserError
from outliers.quantization.schemes import BASELINE
from outliers.subjects.cell import Cell, Subject

if TYPE_CHECKING:
    import torch
    from transformers import BaseImageProcessor, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from outliers.models.anatomy.examples import Examples
    from outliers.models.source import Source
    from outliers.models.variant import Variant
    from outliers.subjects.model_cache import ModelCache
    from outliers.text.blocks import Cut

logger = logging.getLogger(__name__)

READS_TEXT = True
REFUSED = {  # options that do not apply to this family, and why
    "mask_seed": "predicts the next token and has no masks",
    "mask_seeds": "predicts the next token and has no masks",
    "objective": "predicts the next token",
}


def read(subject: "ModelWithText", text: str, blocks: int, _seed: int) -> "Cut":
    """Return the first blocks of a text of causal models; a `Cut` knows where the documents in them begin."""
    from outliers.text.blocks import cut_text

    experiment = subject.experiment
    return cut_text(text, subject.preprocessor, experiment.block, blocks, experiment.bos)


class Pretrained(Subject):
    """A model by its name, without a text; nothing is read before `prepare`.

    experiment: dtype and device, and stream and memory, which change no row. families: accepted model families; empty
    for any.
    """

    needs = ("architecture", "parameters", "scheme")
    families: tuple[str, ...] = ("causal",)
    takes_variants = True

    def __init__(self, model: str, revision: str | None, experiment: Experiment):
        self.model, self.revision, self.experiment = model, revision, experiment

    @property
    def name(self) -> str:
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    @property
    def request(self) -> dict:
        checkpoint = {} if self.revision is None else {"checkpoint": self.revision}
        return {"model": self.model, **checkpoint, "dtype": self.experiment.dtype, **self.experiment.non_default()}

    @functools.cached_property
    def source(self) -> "Source":
        """Where the model is on this machine, or on the hub."""
        from outliers.models.source import find_model

        return find_model(self.model, self.revision)

    @functools.cached_property
    def config(self) -> "PretrainedConfig":
        from outliers.models.load import read_config  # late, for it imports torch

        return read_config(self.source, self.model)

    @functools.cached_property
    def preprocessor(self) -> "PreTrainedTokenizerBase | BaseImageProcessor":
        """The tokenizer of the model, or its image processor if it reads pictures."""
        from outliers.models.anatomy import family_of
        from outliers.models.load import read_processor, read_tokenizer

        return (read_processor if family_of(self.config).name_of else read_tokenizer)(self.source, self.model)

    def __getstate__(self) -> dict:
        # Without what is elsewhere on other machines, and without the preprocessor, which tasks there seldom need: a
        # large vocabulary takes megabytes.
        return {name: value for name, value in vars(self).items() if name not in ("source", "preprocessor")}

    @property
    def width(self) -> int:
        from outliers.models.anatomy import width_of

        return width_of(self.config)

    def prepare(self) -> None:
        """Read the configuration, the tokenizer, and the text if there is one, so that mistakes show now.

        Raises:
            UserError: the model, its revision, the device or the text is unknown, or they do not fit together.
        """
        from outliers.models.anatomy import family_of
        from outliers.models.stream import check_one_device
        from outliers.subjects.model_cache import check_machine

        check_machine(self.experiment)
        if self.experiment.stream:
            check_one_device(self.experiment.device)
        if (family := family_of(self.config).name) not in self.families and self.families:
            raise UserError(
                f"'{self.model}' is of the family '{family}'; expected a causal language model, which generates text"
            )
        _ = self.source.files  # missing ones are refused
        _ = self.preprocessor

    def check(self, cells: Iterable[Cell]) -> None:
        from outliers.models.skeleton import skeleton
        from outliers.subjects.model_cache import check_scheme
        from outliers.variants.draw import check_draws

        cells = list(cells)
        for cell in cells:
            check_draws(getattr(cell.metric, "draws", 1), self.experiment.dtype)
        parts = [part for cell in cells for part in cell.variant.parts]
        with_places = {part.name: part for part in parts if hasattr(part, "check")}
        model = skeleton(self.config) if with_places else None
        for part in with_places.values():
            part.check(model)
        if self.experiment.stream:
            for part in parts:
                if part.in_memory:
                    raise UserError(f"{part.name} in a streamed model; expected one in memory: leave --stream out")
        if any(part.package for part in parts):
            from outliers.quantization.peers import has_bitsandbytes

            if not has_bitsandbytes():
                raise UserError("variant 'bitsandbytes' needs bitsandbytes; pip install 'outliers[peers]'")
        for part in parts:
            if part.needs_calibration:
                self.check_calibration(part)
        # each scheme once, though many cells may have it
        schemes = [scheme for part in parts for scheme in part.schemes]
        quantized = dict.fromkeys((variant.scheme, variant.skip, variant.only, variant.instead) for variant in schemes)
        for scheme, *places in quantized:
            check_scheme(self.config, scheme, *places)

    def check_calibration(self, variant: "Variant") -> None:
        """Raise UserError for a variant that needs calibration: there is no text to calibrate it on."""
        raise UserError(
            f"'{variant.name}' needs the magnitudes of the inputs, and nothing is calibrated here; expected one "
            "that need not know"
        )

    def load(self, model_cache: "ModelCache", provenance: dict | None = None) -> "PreTrainedModel":
        return model_cache.load(self, provenance)[0]

    def weights(self, model_cache: "ModelCache") -> dict:
        return model_cache.weights()

    def provenance(self, model_cache: "ModelCache", cell: Cell) -> dict:
        """Return hashes, sizes and kernels; a streamed model's weights have no hash yet, see `ModelCache.weights`."""
        from outliers.variants.draw import DRAWN

        model, fields = model_cache.load(self)
        provenance = fields | {"scheme": BASELINE} | cell.variant.fields(model)
        if getattr(cell.metric, "draws", 1) > 1:
            provenance["drawn"] = DRAWN
        return provenance


class ModelWithText(Pretrained):
    """A model of any family with its text or pictures.

    experiment: as for `Pretrained`, with text, block, blocks, bos and documents, and how schemes are calibrated.
    with_classes: whether pictures need classes if perplexity is measured.
    """

    families = ()
    experiment: Experiment
    with_classes = True

    @property
    def request(self) -> dict:
        text = {"text": text_label(self.experiment.text), "block": self.experiment.block}
        return super().request | text | {"blocks": self.experiment.blocks}

    @functools.cached_property
    def _text(self) -> "Cut | Examples | torch.Tensor":
        """The text as the model's family reads it: a `Cut` of causal models, `Examples` of others, else token ids.

        Of masked models the same text comes once for each seed of the masks.
        """
        from outliers.models.anatomy.examples import Examples
        from outliers.text.blocks import Cut

        experiment, (first, count) = self.experiment, self.span
        if experiment.stride or experiment.scored:
            return self._windows(first + count)[first:]
        texts = [self._read(experiment.text, first + count, number) for number in range(experiment.mask_seeds)]
        if self._by_document:
            if not isinstance(texts[0], Cut):
                raise UserError(f"'{self.model}' reads no documents by themselves; leave --documents out")
            texts[0].check_packed()
        texts = [text[first:] for text in texts]
        return texts[0] if len(texts) == 1 else Examples.joined(texts)

    def _windows(self, count: int) -> "Examples":
        """Return the first blocks of the text, which advance by a stride."""
        experiment = self.experiment
        if self._by_document:
            raise UserError("documents by themselves in blocks that a stride cuts; leave --documents or --stride out")
        length = experiment.block - experiment.bos
        advance = min(experiment.stride or length, length)
        text = self._read(experiment.text, math.ceil((length + (count - 1) * advance) / length))
        return text.windows(experiment.stride, experiment.scored)[:count]

    @functools.cached_property
    def _blocks_and_sizes(self) -> tuple:
        """The values of the properties `blocks` and `sizes`."""
        from outliers.text.blocks import Cut

        text = self._text
        if not isinstance(text, Cut):
            return text, getattr(text, "sizes", None)
        return text.documents if self._by_document else (text.ids, text.predicted_bytes)

    @property
    def blocks(self) -> "torch.Tensor | list[torch.Tensor] | Examples":
        """Token ids, int64 (blocks, T), or of each document (T,); or `Examples`, for all seeds one after the other."""
        return self._blocks_and_sizes[0]

    @property
    def sizes(self) -> "torch.Tensor | None":
        """Bytes of UTF-8 text that the predicted tokens of each block encode, int64 (blocks,); None if unknown."""
        return self._blocks_and_sizes[1]

    @property
    def span(self) -> tuple[int, int]:
        """Index of the first block in the text, and the number of blocks."""
        return 0, self.experiment.blocks

    @property
    def _by_document(self) -> bool:
        return self.experiment.documents

    @functools.cached_property
    def bos_left_out(self) -> str | None:
        """The token that the tokenizer itself puts before a text, if the blocks lack it and `bos` would add it."""
        from outliers.models.anatomy.examples import input_ids

        if "bos" in self._family_module.REFUSED:
            return None
        tokenizer = self.preprocessor
        first = next(iter(tokenizer("a")["input_ids"]), None)  # a tokenizer without a vocabulary returns none
        begins = first is not None and first == tokenizer.bos_token_id
        left_out = begins and any(input_ids(block)[0] != first for block in self.blocks)
        return tokenizer.convert_ids_to_tokens(first) if left_out else None

    @property
    def seed_count(self) -> int:
        return getattr(self.blocks, "seeds", 1)

    def check(self, cells: Iterable[Cell]) -> None:
        """Check cells as `Pretrained`, and for perplexity that the blocks have something to predict."""
        cells = list(cells)
        if self.with_classes and any(cell.metric.name == "perplexity" for cell in cells):
            self.check_predicted()
        super().check(cells)

    def check_predicted(self) -> None:
        """Raise UserError if the blocks are pictures without classes, so that nothing is predicted."""
        from outliers.models.anatomy.examples import IGNORED

        labels = getattr(self.blocks, "labels", None)
        if labels is not None and (labels == IGNORED).all():
            raise UserError(
                f"'{self.experiment.text}' has no classes that '{self.model}' predicts; expected a folder of pictures "
                "for each: without them there are outliers trace, outliers sweep, and the metrics agreement and top1"
            )

    @functools.cached_property
    def calibration(self) -> "torch.Tensor":
        """Blocks to calibrate schemes on; raises UserError if one of them is also measured."""
        from outliers.models.anatomy.examples import input_ids
        from outliers.text.blocks import Cut

        experiment = self.experiment
        text, count = experiment.calibration, experiment.calibration_blocks
        first = experiment.blocks if text is None else 0
        try:
            later = self._read(experiment.text if text is None else text, first + count)[first:]
        except UserError as error:
            raise UserError(f"no {count} blocks to calibrate on: {error}") from None
        blocks, of_text = (part.ids if isinstance(part, Cut) else part for part in (later, self._text))
        measured = {input_ids(block).numpy().tobytes(): number for number, block in enumerate(of_text, 1)}
        for number, block in enumerate(blocks, 1):
            if same := measured.get(input_ids(block).numpy().tobytes()):
                raise UserError(
                    f"block {number} to calibrate on is block {same} of what is measured, which would look better than "
                    "it is; choose another text with --calibration"
                )
        return blocks

    @property
    def _family_module(self) -> ModuleType:
        """The module that reads texts for the model's family."""
        from outliers.models.anatomy import family_of

        family = family_of(self.config)
        return family.subject or import_module(f"outliers.subjects.{family.name}")

    def _read(self, text: str, blocks: int, number: int = 0) -> "Cut | Examples | torch.Tensor":
        """Return the first blocks of a text, after checking that options and token ids fit the model.

        Args:
            number: of the mask seed, from 0.
        """
        from outliers.models.anatomy import check_block

        family_module, experiment = self._family_module, self.experiment
        for option, reason in family_module.REFUSED.items():
            if experiment.non_default(option):
                raise UserError(f"'{self.model}' {reason}; leave --{option.replace('_', '-')} out")
        if family_module.READS_TEXT:
            check_block(self.config, experiment.block)
        cut = family_module.read(self, text, blocks, experiment.mask_seed + number)
        if family_module.READS_TEXT:
            check_block(self.config, experiment.block, int(getattr(cut, "ids", cut).max()))
        return cut

    def prepare(self) -> None:
        super().prepare()
        _ = self.blocks
        if self.bos_left_out:
            logger.info(
                f"the tokenizer of '{self.name}' puts {self.bos_left_out} before a text and blocks lack it; "
                "--bos begins each block with it"
            )

    def check_calibration(self, variant: "Variant") -> None:
        """Raise UserError if there is no text for calibration, or too little of it."""
        _ = self.calibration

    def provenance(self, model_cache: "ModelCache", cell: Cell) -> dict:
        """Return the provenance of `Pretrained`, with that of the text, and the bits per value of a quantized cache.

        The latter depend on the length of the text, because a cache is quantized in groups.
        """
        from outliers.subjects.model_cache import protocol_of
        from outliers.text.blocks import tokens_hash

        provenance = {"tokens_hash": tokens_hash(self.blocks), "protocol": protocol_of(self.experiment, self.blocks)}
        if cell.variant.needs_calibration:
            provenance["calibration_hash"] = tokens_hash(self.calibration)
        if self.bos_left_out:
            provenance["bos_left_out"] = self.bos_left_out
        if not self._by_document and (packed := getattr(self._text, "packed_blocks", 0)):
            provenance["packed_blocks"] = packed
        if formats := cell.variant.cache:
            from outliers.quantization.caches import cache_bits

            lengths = map(len, self.blocks) if self._by_document else [self.experiment.block]
            provenance["cache_bits"] = cache_bits(model_cache.load(self)[0], formats, *lengths)
        return super().provenance(model_cache, cell) | provenance


class MaybeUnlabelled(ModelWithText):
    """A model with a text, or with pictures that may lack classes and then have no perplexity."""

    with_classes = False
