"""Int8 models on disk, and checkpoints that are quantized while they are read."""

import copy
import json
from collections.abc import Collection
from pathlib import Path

import torch
from accelerate import dispatch_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from outliers.errors import UserError, reason_of, unknown_name
from outliers.files import writing
from outliers.models.anatomy import projections
from outliers.models.attention import attentions
from outliers.models.checkpoint import check_complete, check_shape, dtype_of, printable
from outliers.models.config_file import check_weights
from outliers.models.load import (
    DTYPES,
    check_finite,
    config_of,
    device_map,
    find_device,
    load_config,
    open_checkpoint,
    refusals,
)
from outliers.models.skeleton import skeleton
from outliers.models.source import Source, find_model
from outliers.models.weight_files import INT8, is_there, regular_file
from outliers.quantization.attention import int8_attentions
from outliers.quantization.calibration import neutral
from outliers.quantization.convert import quantize
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.magnitudes import Calibration
from outliers.quantization.schemes import Scheme, get_scheme, read_scheme, write_scheme

FILE = INT8


def save_quantized(model: PreTrainedModel, folder: str | Path) -> None:
    """Write an int8 model to a folder: codes, scales and all other weights with the scheme, and the paths of what it
    skips, as safetensors, and its configuration.

    Raises:
        UserError: the model's weights are not kept as int8 codes, or the folder cannot be written.

    Example:
        >>> outliers.save_quantized(outliers.quantize(model, "llm.int8", keep="int8"), "int8")
    """
    parts = list(projections(model))
    schemes: dict[Scheme, list[str]] = {}
    for part in parts:
        if isinstance(part.module, Int8Linear):
            schemes.setdefault(part.module.scheme, []).append(part.path)
    exact = [part.path for part in parts if not isinstance(part.module, Int8Linear)]
    if in_int8 := {part.path for part in int8_attentions(model)}:
        exact += [part.path for part in attentions(model) if part.path not in in_int8]
    if not schemes or any(isinstance(part.module, QuantizedLinear) for part in parts):
        raise UserError("this model does not keep int8 codes alone; make one with quantize(model, scheme, keep='int8')")
    folder, tensors, firsts, shared = Path(folder), {}, {}, {}
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        first = firsts.setdefault(tensor.data_ptr(), name)
        if first == name:  # the head is often tied to the embeddings
            tensors[name] = tensor.contiguous()
        elif name not in parameters:  # what layers have learned together
            shared[name] = first
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        config = copy.copy(model.config)
        vars(config).pop("quantization_config", None)  # of `outliers.OutliersConfig`, which says of another file
        config.save_pretrained(folder)
        scheme = max(schemes, key=lambda scheme: len(schemes[scheme]))
        instead = {write_scheme(other): paths for other, paths in schemes.items() if other != scheme}
        lists = {"skip": exact, "shared": shared} | ({"instead": instead} if instead else {})
        metadata = {"scheme": write_scheme(scheme)} | {name: json.dumps(value) for name, value in lists.items()}
        save_file(tensors, folder / FILE, metadata)


def load_quantized(folder: str | Path, device: str | torch.device = "cpu") -> PreTrainedModel:
    """Return the model that `save_quantized` wrote, with the same outputs, bit for bit.

    Raises:
        UserError: the folder holds no int8 model, or a damaged one, or tensors of other shapes or types than its
            configuration asks for; the device does not exist, or "auto" finds too little memory.

    Example:
        >>> outliers.save_quantized(outliers.quantize(model, "llm.int8", keep="int8"), "int8")
        >>> int8 = outliers.load_quantized("int8")
    """
    find_device(device)
    path, source = Path(folder) / FILE, Source(str(folder), None, True)
    if is_there(path):
        regular_file(path)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
        scheme, skip = read_scheme(metadata["scheme"]), json.loads(metadata["skip"])
        shared = json.loads(metadata.get("shared", "{}"))
        instead = json.loads(metadata.get("instead", "{}"))
        instead = {read_scheme(other): paths for other, paths in instead.items()}
        tensors = load_file(path)  # each is read where it is brought to its device
        tensors |= {alias: tensors[first] for alias, first in shared.items()}
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
        raise UserError(f"cannot read an int8 model from '{folder}' ({reason_of(error, 200)})") from None
    config, name = config_of(source, str(folder)), str(folder)
    check_weights(config.to_dict(), name, [path])
    with refusals(name):
        exact = skeleton(config, config.dtype, buffers=True)
        anything = neutral(exact, scheme)  # for what it leads to is replaced by what was saved
        model = quantize(exact, scheme, keep="int8", skip=skip, calibration=anything, instead=instead)
        _check(tensors, model, name)
        places, absent = _places(model, name, device), set(model.state_dict()) - set(tensors)
        # Copied, for where a tensor begins in the mapped file changes how some processors round products with it.
        tensors = {key: tensors[key].to(_place(key, places), copy=True) for key in tensors if key not in shared}
        tensors |= {alias: tensors[first].to(_place(alias, places)) for alias, first in shared.items()}
        model.load_state_dict(tensors, strict=False, assign=True)
        return _finished(model, absent, name, places)


def _check(tensors: dict[str, torch.Tensor], model: PreTrainedModel, name: str) -> None:
    """See that tensors are those of an int8 model: codes and scales of their types, all others of any float dtype."""
    expected = model.state_dict()
    parameters = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    for key, tensor in tensors.items():
        if key not in expected:
            raise UserError(f"'{name}' holds tensors that its architecture does not have ({printable(key)}, …)")
        check_shape(tuple(tensor.shape), expected[key].shape, key, name)
        same = tensor.is_floating_point() if key in parameters else tensor.dtype == expected[key].dtype
        if not same:
            raise UserError(f"the int8 model '{name}' holds '{key}' as {tensor.dtype}; expected {expected[key].dtype}")
        if tensor.is_floating_point():
            check_finite(tensor if tensor.itemsize > 1 else tensor.float(), key, name)  # torch has no limits of 8 bits


def load_int8(
    name: str,
    scheme: str | Scheme = "llm.int8",
    dtype: str = "float32",
    device: str | torch.device = "cpu",
    revision: str | None = None,
    skip: Collection[str] = (),
    calibration: Calibration | None = None,
) -> PreTrainedModel:
    """Return an int8 model from safetensors or GGUF, each weight quantized as it is read.

    The memory that it takes at most is the int8 model and one file of the checkpoint.

    Args:
        name: as for `load_model`.
        scheme: one that quantizes weights.
        dtype: of what is not quantized, and of the hidden states: "float32", "float16" or "bfloat16".
        device: where to put it; "auto" as for `load_model`.
        revision: branch, tag or commit on the hub; or a checkpoint's folder in a local folder.
        skip, calibration: as for `quantize`.

    Raises:
        UserError: as `load_model`; the scheme is unknown or quantizes no weights; as `quantize` of skip and
            calibration.

    Example:
        >>> int8 = outliers.load_int8("pocket/gpt2-0.1m", "absmax-vector")
    """
    scheme = get_scheme(scheme)
    if not scheme.quantizes_projections:
        raise UserError(f"scheme '{scheme.name}' quantizes no projections; use load_model")
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    find_device(device)
    config = load_config(name, revision)
    with refusals(name):
        exact = skeleton(config, DTYPES[dtype], buffers=True)
    checkpoint = open_checkpoint(find_model(name, revision), name, revision, exact)
    model = quantize(exact, scheme, keep="int8", skip=skip, calibration=calibration)
    places = _places(model, name, device)
    for tensor_name, stored in checkpoint.tensors.items():
        tensor = stored.read().to(_place(tensor_name, places))
        # copied, for a tensor that shares the memory of the file would keep all of it in memory
        tensor = tensor.to(dtype_of(model, tensor_name), copy=True)
        check_finite(tensor, tensor_name, name, stored)
        _assign(model, tensor_name, tensor)
    model.ignored_tensors, model.zero_points = checkpoint.ignored, checkpoint.zero_points
    return _finished(model, checkpoint.absent(exact), name, places)


def _places(model: PreTrainedModel, name: str, device: str | torch.device) -> dict:
    """Path of a module, "" for the whole model, to its device."""
    return device_map(model, name) if device == "auto" else {"": find_device(device)}


def _place(name: str, places: dict) -> int | str | torch.device:
    """The device of a tensor."""
    return next(place for part, place in places.items() if f"{name}.".startswith(f"{part}." if part else ""))


def _assign(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor of a checkpoint in its place, quantized where it is a projection's weight."""
    path, _, part = name.rpartition(".")
    module = model.get_submodule(path)
    if isinstance(module, Int8Linear) and part == "weight":
        module.set_weight(tensor)
    elif part in module._parameters:
        module._parameters[part] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[part] = tensor


def _finished(model: PreTrainedModel, absent: set[str], name: str, places: dict) -> PreTrainedModel:
    """Tie what is tied, as transformers does where some tensors are absent; see that nothing is missing, and let hidden
    states follow the layers from device to device."""
    model.tie_weights(missing_keys=absent, recompute_mapping=False)
    missing = [key for key, tensor in model.state_dict().items() if tensor.is_meta]
    check_complete(missing, name)
    # As transformers loads a model. Torch takes a weight that has no gradient for one to copy for each sequence of a
    # batch, where the input is not in one piece: the head's, of which only the last positions are wanted.
    model.requires_grad_()
    return dispatch_model(model, places, skip_keys=model._skip_keys_device_placement)
