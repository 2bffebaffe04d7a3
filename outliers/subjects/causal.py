"""Causal language models with blocks of a text, and their loss."""

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from outliers.quantization.schemes import BASELINE, Scheme
from outliers.runs.cell import Cell
from outliers.specification.kinds import Calibrated, Settings, said_of_text
from outliers.variants.together import schemes_of

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from outliers.measurements.bench import Bench, Job

USUAL = {"device": "cpu", "bos": False}  # of which rows say what is not so


class Causal:
    """A causal language model with its text; nothing of it is read before `prepare`.

    settings: text, block, blocks, bos, dtype, device; stream and memory, which change no row.
    """

    needs = ("architecture", "parameters", "scheme")

    def __init__(self, model: str, revision: str | None, settings: Settings):
        self.model, self.revision, self.settings = model, revision, settings

    @property
    def name(self) -> str:
        """The model with its revision, if it has one."""
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    @property
    def asked(self) -> dict:
        """What rows say of it."""
        every = self.settings.model_dump(include={"block", "blocks", "dtype"})
        options = {field: value for field, usual in USUAL.items() if (value := getattr(self.settings, field)) != usual}
        checkpoint = {} if self.revision is None else {"checkpoint": self.revision}
        return {"model": self.model, **checkpoint, "text": said_of_text(self.settings.text), **every, **options}

    @functools.cached_property
    def job(self) -> "Job":
        """The model with its configuration and token blocks."""
        from outliers.measurements.bench import Job  # which imports torch, as what follows

        return Job.of(self.model, self.revision, self.settings)

    @property
    def blocks(self) -> "torch.Tensor":
        """Token ids, int64 (blocks, T)."""
        return self.job.blocks

    def prepare(self) -> None:
        """Read the configuration, the tokenizer and the text."""
        _ = self.job

    def check(self, cells: Iterable[Cell]) -> None:
        """See that variants and metrics fit the model.

        Raises:
            UserError: one does not.
        """
        from outliers.measurements.bench import check_schemes, say_what_is_left
        from outliers.variants.draw import check_draws

        quantized: dict[tuple, Scheme] = {}  # each once, though many metrics are asked of it
        for cell in cells:
            check_draws(getattr(cell.metric, "draws", 1), self.settings.dtype)
            quantized |= {(one.scheme, one.skip, one.only): one.scheme for one in schemes_of(cell.variant)}
        for scheme, *places in quantized:
            if scheme.needs_calibration and self.job.calibration is None:
                self.job = self._calibrated()
            check_schemes(self.job.config, [scheme], *places)
        say_what_is_left(self.name, self.job.config, list(quantized.values()))

    def _calibrated(self) -> "Job":
        settings = self.settings
        return self.job.calibrated(settings if isinstance(settings, Calibrated) else Calibrated(**dict(settings)))

    def check_unchanged(self) -> None:
        """Raise UserError if the files of the model changed since they were read."""
        from outliers.models.weight_files import check_unchanged

        check_unchanged(self.model, self.revision)

    def load(self, bench: "Bench", facts: dict | None = None) -> "PreTrainedModel":
        """The model, in memory or streamed; it has the weights that the facts say."""
        return bench.load(self.job, self.settings, facts)[0]

    def facts(self, bench: "Bench", cell: Cell) -> dict:
        """Hashes, sizes and kernels; of a streamed model not which weights it has, see `Bench.weights`."""
        from outliers.measurements.bench import left_fields
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
