"""One model with its text: checked, loaded, and described for its rows; and what a process keeps between two cells."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from outlier_kernels.dispatch import path
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outliers.errors import BrokenModel, UserError
from outliers.models.anatomy import anatomy_of, check_block, weights_of_experts
from outliers.models.load import (
    find_device,
    load_config,
    load_model,
    load_tokenizer,
    quantized_from,
    some_of,
    stored_as,
    weights_hash,
)
from outliers.models.skeleton import skeleton
from outliers.models.source import local_files
from outliers.models.stream import Variant, check_one_device, is_streamed, stream_model
from outliers.models.weight_files import check_unchanged
from outliers.quantization.calibration import Calibration, calibrate
from outliers.quantization.convert import check_attends, check_groups, quantize, skipped
from outliers.quantization.schemes import BASELINE, Scheme
from outliers.specification.kinds import BOS, Calibrated, Machine, Settings, Spread, said_of_text
from outliers.terminal.progress import Progress
from outliers.text.blocks import find_text, load_text, tokens_hash
from outliers.tracing.result import STREAM, Trace
from outliers.tracing.trace import trace
from outliers.variants.ablated import Ablated
from outliers.variants.quantized import Quantized
from outliers.variants.together import parts_of, schemes_of
from outliers.variants.weights import Scaled

logger = logging.getLogger(__name__)


class Job(NamedTuple):
    """A model of an experiment with its configuration and, where it reads a text, token blocks, int64 (blocks, T).

    calibration: blocks that are not measured, where a scheme has to know how large the inputs are.
    """

    model: str
    revision: str | None
    config: PretrainedConfig
    blocks: torch.Tensor | None = None
    calibration: torch.Tensor | None = None

    @property
    def name(self) -> str:
        """The model with its revision, if it has one."""
        return self.model if self.revision is None else f"{self.model}@{self.revision}"

    @classmethod
    def of_model(cls, name: str, revision: str | None, settings: Spread) -> "Job":
        """Load what is light of a model without a text.

        Raises:
            UserError: the model, its revision or the device is unknown, or they do not fit together.
        """
        check_machine(settings)
        if getattr(settings, "stream", False):
            check_one_device(settings.device)
        config = load_config(name, revision)
        local_files(name, revision)
        load_tokenizer(name, revision)
        return cls(name, revision, config)

    @classmethod
    def of(cls, name: str, revision: str | None, settings: Settings) -> "Job":
        """The same with its text, so that a mistake shows before anything is measured.

        Raises:
            UserError: as `of_model`; the text is unknown, or does not fit the model.
        """
        job = cls.of_model(name, revision, settings)
        check_block(job.config, settings.block)
        tokenizer = load_tokenizer(name, revision)
        blocks = load_text(settings.text, tokenizer, settings.block, settings.blocks, settings.bos)
        check_block(job.config, settings.block, int(blocks.max()))
        return job._replace(blocks=blocks)

    def calibrated(self, settings: Calibrated) -> "Job":
        """The same with blocks to calibrate on.

        Raises:
            UserError: as `load_text`; or one of them is measured.
        """
        tokenizer, of_own = load_tokenizer(self.model, self.revision), settings.calibration is not None
        text, first = (settings.calibration, 0) if of_own else (settings.text, settings.blocks)
        try:
            count = first + settings.calibration_blocks
            blocks = load_text(text, tokenizer, settings.block, count, settings.bos)[first:]
        except UserError as error:
            raise UserError(f"no {settings.calibration_blocks} blocks to calibrate on: {error}") from None
        check_block(self.config, settings.block, int(blocks.max()))
        measured = {block.numpy().tobytes(): number for number, block in enumerate(self.blocks, 1)}
        for number, block in enumerate(blocks, 1):
            if same := measured.get(block.numpy().tobytes()):
                raise UserError(
                    f"block {number} to calibrate on is block {same} of what is measured, which would look better than "
                    "it is; choose another text with --calibration"
                )
        return self._replace(calibration=blocks)


def check_machine(machine: Machine) -> None:
    """Raise UserError where the device of an experiment, or a forced kernel path, is not there."""
    if getattr(machine, "engine", "local") == "ray":
        if machine.device not in ("cpu", "cuda", "auto"):
            raise UserError(
                f"device '{machine.device}' with engine 'ray', which chooses GPUs; expected cpu, cuda or auto"
            )
        return
    device = find_device(machine.device)
    try:
        path(device)
    except ValueError as error:  # the kernels stand alone and do not know this project's errors
        raise UserError(str(error)) from None


class Bench:
    """What a process that measures cells keeps between them: the last model that it loaded, and a bar to move."""

    def __init__(self, bar: Progress):
        self.bar = bar
        self._key, self._loaded, self._like = None, None, None
        self._calibration: Calibration | None = None
        self._tokenizer: tuple | None = None
        self._form: PreTrainedModel | None = None  # the model, under the scheme whose codes others may share
        self.exact: dict = {}  # last hidden states of the last model as it is, by draw and part of the text
        self.trace: Trace | None = None  # of the last model as it is, on all of its text

    def load(self, job: Job, settings: Settings, like: dict | None = None) -> tuple[PreTrainedModel, dict]:
        """The model of a job, in the form that it was left in, and the fields that all its rows have in common.

        Of a streamed model they do not say which weights it has, see `weights`.

        Raises:
            UserError: as `load_model`, or `stream_model`; or its weights are not those of the fields `like`, because
                they changed after another process read them.
        """
        place = job.model, settings.dtype, settings.device, job.revision

        def load() -> tuple[PreTrainedModel, dict]:
            streamed = getattr(settings, "stream", False)
            model = stream_model(*place, settings.memory) if streamed else load_model(*place)
            return model, describe(job, model, settings)

        model, fields = self.keep(job, settings.model_dump_json(), load, like)
        return model, fields | described_text(job, settings)

    def keep(self, job: Job, form: str, load: Callable, like: dict | None = None) -> tuple[PreTrainedModel, dict]:
        """What `load` gives for a job in a form, a model and its fields, loaded unless it is the last one."""
        self._like = like
        key = job.model, job.revision, form
        if key != self._key:
            self._key = self._loaded = self._form = self._calibration = self.trace = None  # never two at once
            self.exact.clear()
            self._loaded = load()
            self._form = self._loaded[0]
            self._key = key
        if not is_streamed(self._loaded[0]):
            self.check_weights()
        return self._loaded

    def tokenizer(self, job: Job) -> PreTrainedTokenizerBase:
        """That of a job's model."""
        key = job.model, job.revision
        if self._tokenizer is None or self._tokenizer[0] != key:
            self._tokenizer = key, load_tokenizer(*key)
        return self._tokenizer[1]

    @contextmanager
    def under(self, variant: Variant) -> Iterator[PreTrainedModel]:
        """The last model, which is resident, under a variant; a scheme shares codes with the one before, unless other
        weights than the model's are quantized."""
        parts = parts_of(variant)
        first = next((part for part in parts if not isinstance(part, Ablated)), None)
        with ExitStack() as stack:
            model = self._form if isinstance(first, Quantized) else self._loaded[0]
            for number, part in enumerate(parts):
                model = stack.enter_context(part.on(model))
                if number == 0 and isinstance(part, Quantized):
                    self._form = model
            yield model

    def counted(self, blocks: torch.Tensor, steps: int = 1) -> "Counted":
        """Blocks (blocks, T) that move the bar each time that they pass the last model; steps: how far each does."""
        return Counted(blocks, self.bar, steps, is_streamed(self._loaded[0]))

    def calibration(self, job: Job, schemes: Iterable[Scheme]) -> Calibration | None:
        """That of the last model on the blocks of a job, found once; None where no scheme needs it."""
        if not any(scheme.needs_calibration for scheme in schemes):
            return None
        if self._calibration is None or not torch.equal(self._calibration.blocks, job.calibration):
            self._calibration = calibrate(quantize(self._loaded[0], BASELINE), job.calibration)
        return self._calibration

    def knowing(self, variants: Iterable[Variant], job: Job) -> list[Variant]:
        """Variants of the last model that know of the text of a job what they have to."""
        variants = list(variants)
        waiting = [one.scheme for variant in variants for one in schemes_of(variant) if one.needs_calibration]
        calibration = self.calibration(job, waiting)
        if self.trace is None and any(variant.needs_trace for variant in variants):
            self.trace = trace(self._loaded[0], job.blocks, STREAM, attention=False)
        variants = [one.calibrated(calibration) if one.needs_calibration else one for one in variants]
        return [one.knowing(self.trace) if one.needs_trace else one for one in variants]

    def weights(self) -> dict:
        """Which weights the last model has, as a field of its rows; what of a streamed one was not read yet is read."""
        if self._loaded is None:
            return {}
        model, fields = self._loaded
        return {"weights_hash": model.stream.weights_hash() if is_streamed(model) else fields["weights_hash"]}

    def check_weights(self) -> None:
        """Raise UserError if the last model's weights are not those that it was to have; of a streamed one this is
        known when its layers were read."""
        if self._like and "weights_hash" in self._like:
            check_same_weights([self._like, self._like | self.weights()])

    def check_unchanged(self) -> None:
        """Raise UserError if the files of the last model changed since they were read."""
        if self._key:
            check_unchanged(*self._key[:2])


def check_same_weights(fields: list[dict]) -> None:
    """Raise UserError if measurements of a model, which several processes may have made, are of different weights."""
    if len({of_one.get("weights_hash") for of_one in fields}) > 1:
        model = fields[0]["model"]
        raise UserError(f"the weights of '{model}' changed while they were measured; run again once they are whole")


@contextmanager
def named(model: str, *schemes: str) -> Iterator[None]:
    """Let what is wrong with a model say which one it is, and under which scheme."""
    try:
        yield
    except BrokenModel as error:
        under = f" under {' or '.join(schemes)}" if schemes else ""
        raise BrokenModel(f"'{model}'{under}: {error}") from None


def describe(job: Job, model: PreTrainedModel, machine: Machine) -> dict:
    """The fields that all rows of a job's loaded model have in common, but for those of its text and of the machine."""
    fields = {
        "model": job.model,
        "checkpoint": job.revision,
        "revision": getattr(model.config, "_commit_hash", None),
        "weights_hash": None if is_streamed(model) else weights_hash(model),
        "ignored_tensors": some_of(model.ignored_tensors) or None,
        "quantized_from": quantized_from(job.model, job.revision) or stored_as(job.config),
        "streamed": is_streamed(model) or None,
        "architecture": model.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": machine.dtype,
    }
    return {name: value for name, value in fields.items() if value is not None}


def described_text(job: Job, settings: Settings) -> dict:
    """The same of the text of a job; nothing where it has none."""
    if job.blocks is None:
        return {}
    return {
        "text": said_of_text(settings.text),
        "tokens_hash": tokens_hash(job.blocks),
        "protocol": protocol_of(settings),
        "block": settings.block,
        "blocks": settings.blocks,
    }


def protocol_of(settings: Settings) -> str:
    """How the text of an experiment is cut into blocks."""
    return find_text(settings.text).protocol + (BOS if settings.bos else "")


def left_fields(model: PreTrainedModel, parameters: int) -> dict:
    """The share of a model's parameters that no scheme quantizes because experts hold it, as a field of 8-bit rows."""
    experts = weights_of_experts(model)
    return {"unquantized_experts": round(experts / parameters, 4)} if experts else {}


def check_parts(config: PretrainedConfig, variants: Collection[Ablated | Scaled]) -> None:
    """Raise UserError if a variant names something that a model has not."""
    model = skeleton(config, torch.bfloat16) if variants else None
    for variant in variants:
        variant.check(model)


def check_schemes(
    config: PretrainedConfig, schemes: Iterable[Scheme | None], skip: Collection[str], only: Collection[str] = ()
) -> None:
    """Raise UserError if a scheme does not fit a model, or `skip` or `only` matches nothing of it, or nothing is left
    that a scheme quantizes; None: another library's."""
    own = [scheme for scheme in schemes if scheme]
    if not skip and not only and not any(scheme.group or scheme.attention is not None for scheme in own):
        return
    model = skeleton(config, torch.bfloat16)
    for scheme in own:
        check_attends(model, scheme)
        check_groups(model, scheme, skipped(model, skip, scheme, only))


def say_what_is_left(name: str, config: PretrainedConfig, schemes: list[Scheme | None]) -> None:
    """Log it, which a command prints, before a model is under 8-bit schemes, or None for another library's."""
    if anatomy_of(config).mixture and any(scheme is None or scheme.quantizes for scheme in schemes):
        model = skeleton(config, torch.bfloat16)
        share = weights_of_experts(model) / model.num_parameters()
        logger.info(f"the experts of '{name}', {share:.0%} of its weights, are not quantized")


class Counted:
    """Blocks that move a bar each time that they pass a model.

    steps: how far each moves it. streamed: whether the model takes all of them before its layers compute, which then
    move the bar.
    """

    def __init__(self, blocks: torch.Tensor, bar: Progress, steps: int = 1, streamed: bool = False):
        self.blocks, self.bar, self.steps, self.streamed = blocks, bar, steps, streamed

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.streamed:
            self.bar.begin(self.steps * len(self.blocks))
            yield from self.blocks
            return
        for block in self.blocks:
            yield block
            self.bar.update(self.steps)
