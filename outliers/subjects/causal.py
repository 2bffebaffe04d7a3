"""Causal language models: alone, with blocks of a text and their loss, and as they are served."""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from outliers.errors import UserError
from outliers.quantization.schemes import BASELINE, Scheme
from outliers.specification.kinds import Calibrated, Settings, Spread, said_of_text
from outliers.subjects.cell import Cell
from outliers.variants.ablated import Ablated
from outliers.variants.peer import Peer
from outliers.variants.together import parts_of, schemes_of
from outliers.variants.weights import Scaled

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from outliers.subjects.bench import Bench, Job

USUAL = {"device": "cpu", "bos": False}  # of which rows say what is not so


class Pretrained:
    """A causal language model without a text; nothing of it is read before `prepare`.

    settings: dtype, device; stream and memory, which change no row.
    """

    needs = ("architecture", "parameters", "scheme")
    blocks = range(1)  # there is no text: it is measured at once
    of_one_variant = False  # whether each variant is a subject of its own, alone in memory

    def __init__(self, model: str, revision: str | None, settings: Spread):
        self.model, self.revision, self.settings = model, revision, settings

    @property
    def name(self) -> str:
        """The model with its revision, if it has one."""
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    @property
    def asked(self) -> dict:
        """What rows say of it."""
        checkpoint = {} if self.revision is None else {"checkpoint": self.revision}
        options = {
            field: value for field, usual in USUAL.items() if (value := getattr(self.settings, field, usual)) != usual
        }
        return {"model": self.model, **checkpoint, "dtype": self.settings.dtype, **options}

    @functools.cached_property
    def job(self) -> "Job":
        """The model with its configuration and, where it has a text, token blocks."""
        from outliers.subjects.bench import Job  # which imports torch, as what follows

        return Job.of_model(self.model, self.revision, self.settings)

    @property
    def config(self) -> "PretrainedConfig":
        """Its configuration."""
        return self.job.config

    def prepare(self) -> None:
        """Read the configuration, the tokenizer and the text."""
        _ = self.job

    def check(self, cells: Iterable[Cell]) -> None:
        """See that variants and metrics fit the model.

        Raises:
            UserError: one does not.
        """
        from outliers.subjects.bench import check_parts, check_schemes, say_what_is_left
        from outliers.variants.draw import check_draws

        cells = list(cells)
        parts = {part.name: part for cell in cells for part in parts_of(cell.variant)}.values()
        check_parts(self.config, [part for part in parts if isinstance(part, Ablated | Scaled)])
        quantized: dict[tuple, Scheme | None] = {}  # each once, though many metrics are asked of it
        for cell in cells:
            check_draws(getattr(cell.metric, "draws", 1), self.settings.dtype)
            quantized |= {(one.scheme, one.skip, one.only): one.scheme for one in schemes_of(cell.variant)}
            if any(isinstance(part, Peer) for part in parts_of(cell.variant)):
                self.check_peer()
                quantized[None, (), ()] = None
        for scheme, *places in quantized:
            if scheme and scheme.needs_calibration:
                self.check_calibration(scheme)
            check_schemes(self.config, [scheme], *places)
        say_what_is_left(self.name, self.config, list(quantized.values()))

    def check_calibration(self, scheme: Scheme) -> None:
        """Raise UserError where a scheme cannot be calibrated."""
        from outliers.quantization.convert import check_calibrated

        check_calibrated(scheme, None)

    def check_peer(self) -> None:
        """Raise UserError where the layers of bitsandbytes cannot be had."""
        from outliers.quantization.peers import has_bitsandbytes

        if not has_bitsandbytes():
            raise UserError("variant 'bitsandbytes' needs bitsandbytes; pip install 'outliers[peers]'")
        if getattr(self.settings, "stream", False):
            raise UserError("bitsandbytes in a streamed model; expected one in memory: leave --stream out")

    def check_unchanged(self) -> None:
        """Raise UserError if the files of the model changed since they were read."""
        from outliers.models.weight_files import check_unchanged

        check_unchanged(self.model, self.revision)

    def load(self, bench: "Bench", facts: dict | None = None) -> "PreTrainedModel":
        """The model, in memory or streamed; it has the weights that the facts say."""
        return bench.load(self.job, self.settings, facts)[0]

    def weights(self, bench: "Bench") -> dict:
        """Which weights were loaded, as a fact."""
        return bench.weights()

    def facts(self, bench: "Bench", cell: Cell) -> dict:
        """Hashes, sizes and kernels; of a streamed model not which weights it has, see `Bench.weights`."""
        from outliers.subjects.bench import left_fields
        from outliers.text.blocks import tokens_hash

        model, fields = bench.load(self.job, self.settings)
        quantized = schemes_of(cell.variant)
        facts = {name: value for name, value in fields.items() if name not in (*self.asked, "streamed")}
        facts |= {"scheme": BASELINE} | cell.variant.fields(model)
        if any(one.scheme.quantizes for one in quantized):
            facts |= left_fields(model, model.num_parameters())
        if any(one.scheme.needs_calibration for one in quantized):
            facts["calibration_hash"] = tokens_hash(self.job.calibration)
        return facts


class Causal(Pretrained):
    """A causal language model with its text.

    settings: text, block, blocks, bos, too.
    """

    settings: Settings

    @property
    def asked(self) -> dict:
        """What rows say of it."""
        settings = self.settings
        return super().asked | {"text": said_of_text(settings.text), "block": settings.block, "blocks": settings.blocks}

    @functools.cached_property
    def job(self) -> "Job":
        """The model with its configuration and token blocks."""
        from outliers.subjects.bench import Job

        return Job.of(self.model, self.revision, self.settings)

    @property
    def blocks(self) -> "torch.Tensor":
        """Token ids, int64 (blocks, T)."""
        return self.job.blocks

    def check_calibration(self, scheme: Scheme) -> None:
        """Read the blocks that schemes are calibrated on.

        Raises:
            UserError: there are none.
        """
        settings = self.settings
        if self.job.calibration is None:
            calibrated = settings if isinstance(settings, Calibrated) else Calibrated(**dict(settings))
            self.job = self.job.calibrated(calibrated)
