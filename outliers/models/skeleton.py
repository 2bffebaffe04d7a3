"""Models without values, built from configurations."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import init_empty_weights
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from outliers.errors import UserError, reason_of_transformers
from outliers.models.anatomy import family_of
from outliers.models.internals import compute_buffers
from outliers.models.source import Source, out_of_reach
from outliers.models.weight_files import PICKLED


def skeleton(config: PretrainedConfig, dtype: torch.dtype = torch.bfloat16, buffers: bool = False) -> PreTrainedModel:
    """Return a model with the head of its family on the meta device, where tensors have no values, in eval mode.

    config: not changed. dtype: of the weights; shapes do not depend on it. buffers: whether buffers that the
    architecture computes from its configuration, such as rotary frequencies, have values, on the CPU.

    Raises:
        UserError: transformers has no such model, or cannot build it.
    """
    with refusals(config.name_or_path or config.model_type), init_empty_weights(include_buffers=not buffers):
        model = family_of(config).made_by.from_config(copy.deepcopy(config), dtype=dtype).eval()
    if buffers:
        compute_buffers(model)
    model.tie_weights()  # again, because accelerate makes separate parameters
    return model


@contextmanager
def refusals(name: str, source: Source | None = None, part: str = "") -> Iterator[None]:
    """Convert the errors of libraries for an unusable model, or a part of it, to one line; wrap only their code in it.

    source: where the model is, to report an unreachable hub. part: such as "the tokenizer of ".
    """
    try:
        with quiet():
            yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # invalid files raise anything; a Rust library has its own class
        if source and source.local_files_only and not Path(source.path).is_dir():
            raise out_of_reach(name) from None
        reason = reason_of_transformers(error, 300)
        if "safetensors" in reason:
            reason = PICKLED
        raise UserError(f"cannot load {part}'{name}': {reason}") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress warnings and progress bars of transformers."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
