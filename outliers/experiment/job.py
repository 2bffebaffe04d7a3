"""One model with its text: checked, loaded, and described for its rows."""

import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch
from outlier_kernels.dispatch import path
from transformers import PretrainedConfig, PreTrainedModel

from outliers.errors import UserError
from outliers.experiment.provenance import environment
from outliers.measurements.footprint import meta_model
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
from outliers.models.source import local_files
from outliers.models.stream import check_one_device, is_streamed, stream_model
from outliers.quantization.schemes import Scheme
from outliers.specification.kinds import BOS, Machine, Settings
from outliers.terminal.progress import Progress
from outliers.text.blocks import find_text, load_text, text_name, tokens_hash

logger = logging.getLogger(__name__)


class Job(NamedTuple):
    """A model of an experiment with its configuration and its token blocks, int64 (blocks, T)."""

    model: str
    revision: str | None
    config: PretrainedConfig
    blocks: torch.Tensor

    @property
    def name(self) -> str:
        """The model with its revision, if it has one."""
        return self.model if self.revision is None else f"{self.model}@{self.revision}"


def prepare(name: str, revision: str | None, settings: Settings) -> Job:
    """Load what is light of a model, so that a mistake shows before anything is measured.

    Raises:
        UserError: the model, its revision, the text or the device is unknown, or they do not fit together.
    """
    if settings.engine == "local":
        check_kernels(settings)
    elif settings.device not in ("cpu", "cuda", "auto"):
        raise UserError(f"device '{settings.device}' with engine 'ray', which chooses GPUs; expected cpu, cuda or auto")
    if settings.stream:
        check_one_device(settings.device)
    config = load_config(name, revision)
    local_files(name, revision)
    check_block(config, settings.block)
    tokenizer = load_tokenizer(name, revision)
    blocks = load_text(settings.text, tokenizer, settings.block, settings.blocks, settings.bos)
    check_block(config, settings.block, int(blocks.max()))
    return Job(name, revision, config, blocks)


def load(job: Job, settings: Settings) -> tuple[PreTrainedModel, dict]:
    """Load the model of a job; return it with the fields that all its rows have in common.

    Those of a streamed model say nothing of its weights, which are not read yet.
    """
    place = job.model, settings.dtype, settings.device, job.revision
    model = stream_model(*place, settings.memory) if settings.stream else load_model(*place)
    return model, describe(job, model, settings)


def describe(job: Job, model: PreTrainedModel, settings: Settings) -> dict:
    """The fields that all rows of a job's loaded model have in common."""
    return describe_model(job.model, job.revision, job.config, model, settings) | {
        "text": text_name(settings.text),
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


def say_what_is_left(name: str, config: PretrainedConfig, schemes: list[Scheme | None]) -> None:
    """Log it, which a command prints, before a model is under 8-bit schemes, or None for another library's."""
    if anatomy_of(config).mixture and any(scheme is None or scheme.bits == 8 for scheme in schemes):
        model = meta_model(config)
        share = weights_of_experts(model) / model.num_parameters()
        logger.info(f"the experts of '{name}', {share:.0%} of its weights, are not quantized")


def describe_model(
    name: str, revision: str | None, config: PretrainedConfig, model: PreTrainedModel, machine: Machine
) -> dict:
    """The fields that all rows of a loaded model have in common, whatever it reads; config: as its files have it."""
    fields = {
        "model": name,
        "checkpoint": revision,
        "revision": getattr(model.config, "_commit_hash", None),
        "weights_hash": None if is_streamed(model) else weights_hash(model),
        "ignored_tensors": some_of(model.ignored_tensors) or None,
        "quantized_from": quantized_from(name, revision) or stored_as(config),
        "streamed": is_streamed(model) or None,
        "architecture": model.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": machine.dtype,
        **environment(machine.device),
    }
    return {name: value for name, value in fields.items() if value is not None}


def check_kernels(machine: Machine) -> torch.device:
    """The device of an experiment; raise UserError where it, or a forced kernel path, is not there."""
    device = find_device(machine.device)
    try:
        path(device)
    except ValueError as error:  # the kernels stand alone and do not know this project's errors
        raise UserError(str(error)) from None
    return device


class Counted:
    """Blocks that move a bar as they are read, each time that they are read."""

    def __init__(self, blocks: torch.Tensor, bar: Progress):
        self.blocks, self.bar = blocks, bar

    def __iter__(self) -> Iterator[torch.Tensor]:
        for block in self.blocks:
            yield block
            self.bar.update()
