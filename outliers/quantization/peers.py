"""Layers and models of other libraries, for comparison."""

import copy
import functools
import importlib.util
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import starmap
from pathlib import Path

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy import check_plain, projections
from outliers.models.anatomy.experts import settle
from outliers.models.anatomy.weights import device_of, shared_in_copies
from outliers.models.decoder import in_eval_mode
from outliers.models.hooks import check_hooks, hand_over_hooks
from outliers.models.load import (
    config_of,
    hash_parameters,
    line_of,
    load_config,
    load_model,
    quantized_from,
    stored_as,
    without_storage,
)
from outliers.models.skeleton import skeleton
from outliers.models.source import Source, find_model, local_files
from outliers.models.weight_files import INT8, check_unchanged, record_weight_files, regular_file, state_of
from outliers.quantization.convert import skipped
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear, in_float32, stored_weight
from outliers.quantization.schemes import BASELINE, SCHEMES
from outliers.quantization.store import load_quantized

BITSANDBYTES = "bitsandbytes"


def has_bitsandbytes() -> bool:
    return importlib.util.find_spec(BITSANDBYTES) is not None


def bitsandbytes_layer(exact: nn.Module, threshold: float = 6.0) -> nn.Module:
    """Return the bitsandbytes equivalent of an `nn.Linear` or `Conv1D` layer, in eval mode.

    In training mode, the CPU path of bitsandbytes does not quantize activations.

    threshold: magnitude from which on a feature is multiplied in 16 bits.
    """
    logging.getLogger(BITSANDBYTES).setLevel(logging.CRITICAL)  # its import warns of optional kernels
    import bitsandbytes

    weight, bias = stored_weight(exact).detach(), exact.bias
    outputs, features = weight.shape
    options = {"bias": bias is not None, "has_fp16_weights": False, "threshold": threshold}
    layer = bitsandbytes.nn.Linear8bitLt(features, outputs, **options)
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": bias.detach()}))
    if bias is not None:
        layer.bias.data = layer.bias.data.to(bias.dtype)
    return layer.to(weight.device).eval()


def with_bitsandbytes(model: PreTrainedModel, threshold: float = 6.0) -> PreTrainedModel:
    """Return a new model whose projections are bitsandbytes layers, see `with_layers`."""
    return with_layers(model, functools.partial(bitsandbytes_layer, threshold=threshold))


def with_layers(model: PreTrainedModel, make: Callable[[nn.Module], nn.Module]) -> PreTrainedModel:
    """Return a new model with each projection of the decoder layers replaced by `make(projection)`; it shares all else.

    Raises:
        UserError: a projection is more than a floating-point weight and a bias, see `outliers.quantize`.
    """
    memo = shared_in_copies(model)
    for projection in projections(model):
        check_plain(projection)
        check_hooks(projection.path, projection.module)
        memo[id(projection.module)] = layer = make(projection.module)
        hand_over_hooks(projection.module, layer)
    copied = copy.deepcopy(model, memo)
    settle(copied)
    return copied


def _int8_file(name: str) -> Path | None:
    """Return the file of a model that `outliers.save_quantized` wrote into a folder, or None."""
    file = Path(name) / INT8
    return regular_file(file) if file.exists() else None


def _cache_key(name: str, model: PreTrainedModel) -> tuple[str, str, str, tuple]:
    """Return the cache key of a model to compare with: its name, the dtype and device of ours, and the state of its
    files."""
    int8_file = _int8_file(name)
    states = tuple(map(state_of, [int8_file] if int8_file else local_files(name)))
    return name, str(model.dtype).removeprefix("torch."), str(device_of(model)), states


@functools.lru_cache(maxsize=1)
@torch.inference_mode(False)  # the first caller may be in inference mode, and later ones not
def _loaded(name: str, dtype: str, device: str, _states: tuple) -> PreTrainedModel:
    if not (int8_file := _int8_file(name)):
        return load_model(name, dtype, device)
    record_weight_files(name, None, [int8_file])
    return load_quantized(name, device)


@functools.lru_cache(maxsize=64)
def _fields(*cache_key) -> dict:
    """Return the fields of rows on a model to compare with; cached, because many metrics ask for them."""
    name, loaded = cache_key[0], _loaded(*cache_key)
    if _int8_file(name):
        (stored,) = {layer.scheme.name for layer in loaded.modules() if isinstance(layer, Int8Linear)}
    else:
        stored = quantized_from(find_model(name)) or stored_as(load_config(name))
    # state_dict, because codes are no parameters
    hashed = hash_parameters(starmap(line_of, loaded.state_dict().items()))
    fields = {"other_quantized_from": stored, "other_zero_points": getattr(loaded, "zero_points", None)}
    return {"other_weights_hash": hashed} | {field: value for field, value in fields.items() if value}


def other_fields(other: str, model: PreTrainedModel) -> dict:
    """Return the row fields that identify the weights of the model to compare with, and how they are stored."""
    return _fields(*_cache_key(other, model))


@contextmanager
def other_model(other: str | PreTrainedModel, model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Provide the model to compare with, in eval mode; a name is loaded in the dtype and on the device of `model`.

    Raises:
        UserError: as `outliers.load_model`; the model is in another dtype or on another device, or its files change.
    """
    theirs = _loaded(*_cache_key(other, model)) if isinstance(other, str) else other
    for name, value_of in (("dtype", lambda one: one.dtype), ("device", device_of)):
        other_value, own_value = value_of(theirs), value_of(model)
        if other_value != own_value:
            raise UserError(
                f"the model to compare with is in {other_value}, and the other one in {own_value}; expected one {name}"
            )
    with in_eval_mode(theirs):
        yield theirs
    if isinstance(other, str):
        check_unchanged(other, None)


def check_alike(model: PreTrainedModel, other: str | PreTrainedModel) -> None:
    """Raise UserError unless another model has the architecture, sizes and vocabulary of `model`.

    model: with or without values.
    """
    if not isinstance(other, str):
        name, config = other.config.name_or_path, other.config
    else:
        name, int8 = other, _int8_file(other)
        config = config_of(Source(name, None, True), name, any_kind=True) if int8 else load_config(name)
    if config.model_type != model.config.model_type:
        raise UserError(
            f"'{name}' is a model of the architecture '{config.model_type}'; expected one of "
            f"'{model.config.model_type}', as the model that it is compared with"
        )
    ours, theirs = (
        {key: tuple(tensor.shape) for key, tensor in skeleton(without_storage(model_config)).state_dict().items()}
        for model_config in (model.config, config)
    )
    for key in dict.fromkeys([*ours, *theirs]):
        if ours.get(key) != theirs.get(key):
            shapes = (str(shapes.get(key, "none")) for shapes in (theirs, ours))
            raise UserError(
                "'{}' has '{}' of the shape {}, and the model that it is compared with {}; expected a model of the "
                "same sizes, layers and vocabulary".format(name, key, *shapes)
            )


def with_projections_of(
    other: PreTrainedModel, model: PreTrainedModel, only: Collection[str], skip: Collection[str]
) -> PreTrainedModel:
    """Return a new model that takes some projections from another one; it shares all else with `model`.

    only, skip: places as for `outliers.quantize`.
    """
    left = skipped(model, skip, SCHEMES[BASELINE], only)
    memo = shared_in_copies(model)
    for ours, theirs in zip(projections(model), projections(other), strict=True):
        if ours.path not in left:
            memo[id(ours.module)] = theirs.module
    return copy.deepcopy(model, memo)


def weight_of(module: nn.Module) -> torch.Tensor | None:
    """Return the weight (outputs, features) of a projection in float32 or better, dequantized if necessary.

    None if only the module itself knows how it multiplies. Codes of ours and of other libraries are supported.
    """
    if isinstance(module, QuantizedLinear):
        return in_float32(module.weight.detach())
    if isinstance(module, Int8Linear):
        return module.dequantized
    weight = getattr(module, "weight", None)
    if weight is None:
        return None
    if is_traceable_wrapper_subclass(weight) and hasattr(weight, "dequantize"):  # torchao
        return in_float32(weight.dequantize().detach())
    if getattr(module, "quant_state", None) is not None or hasattr(weight, "SCB"):  # bitsandbytes
        from transformers.integrations.bitsandbytes import dequantize_bnb_weight

        return in_float32(dequantize_bnb_weight(weight, getattr(module, "state", None)).detach())
    return in_float32(stored_weight(module).detach()) if weight.is_floating_point() else None
