"""Everything used of transformers beyond its public interface; tests/models/test_internals.py names each of it."""

# ruff: noqa: F401

from collections.abc import Collection
from itertools import accumulate

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, dot_natural_key, rename_source_key
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.quantizers import AutoHfQuantizer
from transformers.safetensors_conversion import auto_conversion
from transformers.tokenization_utils_base import generate_merges
from transformers.utils.import_utils import is_env_variable_true

from outliers.errors import UserError

try:
    from transformers.integrations.gguf.reader import _read_metadata, _read_tensor_table
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
except ImportError:  # other versions of transformers have no such module

    def _read_metadata(*_):
        raise UserError("this transformers reads GGUF files in another way; expected 5.23, see constraints.txt")

    _read_tensor_table = _read_metadata


def dtype_of(model: PreTrainedModel, tensor_name: str) -> torch.dtype:
    """Return the dtype that a tensor is cast to: the model's, except float32 for GPT-OSS's norms in a float16 model."""
    others = model._get_dtype_plan(model.dtype)
    return next((dtype for part, dtype in others.items() if part in tensor_name), model.dtype)


def complete(model: PreTrainedModel, absent: Collection[str]) -> None:
    """Tie weights as transformers does if some tensors are absent, and compute absent parameters, such as Marian's
    positions."""
    model.tie_weights(missing_keys=set(absent), recompute_mapping=False)
    for name in absent:
        path, _, part = name.rpartition(".")
        module = model.get_submodule(path)
        parameter = module._parameters.get(part)
        if parameter is not None and parameter.is_meta:
            module._parameters[part] = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
            _initialize(model, path)


def compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no file holds, as transformers does after loading; the model needs no other values.

    They have to be computed in float32: GPT-J's positions would have other values in 16 bits.
    """
    for path, module in model.named_modules():
        if module._non_persistent_buffers_set:
            _initialize(model, path)


def _initialize(model: PreTrainedModel, path: str) -> None:
    """Initialize a module by the innermost model that contains it, which knows the module's sizes."""
    around = map(model.get_submodule, accumulate(path.split("."), "{}.{}".format))
    owner = [module for module in (model, *around) if isinstance(module, PreTrainedModel)][-1]
    owner._init_weights(model.get_submodule(path))
