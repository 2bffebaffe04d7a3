"""Int8 models on disk, and checkpoints that are quantized while they are read."""

import copy
import json
from collections.abc import Collection
from functools import partial
from os.path import lexists
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PretrainedConfig, PreTrainedModel

from outliers.errors import UserError, reason_of
from outliers.files import writing
from outliers.models.anatomy import projections
from outliers.models.anatomy.weights import check_in_memory
from outliers.models.attention import attentions
from outliers.models.checkpoint import check_complete, check_shape, safetensors_refusals
from outliers.models.config_file import check_weights
from outliers.models.load import config_of, fill, find_device, open_model, refusals, tensor_of
from outliers.models.skeleton import skeleton
from outliers.models.source import Source
from outliers.models.stored.tensors import READ, Lazy, printable, read_safetensors
from outliers.models.weight_files import INT8, regular_file
from outliers.quantization.attention import int8_attentions
from outliers.quantization.calibration import neutral
from outliers.quantization.convert import quantize
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.magnitudes import Calibration
from outliers.quantization.schemes import Scheme, get_scheme, read_scheme, write_scheme


def save_quantized(model: PreTrainedModel, folder: str | Path) -> None:
    """Write an int8 model to a folder.

    The folder gets the model's configuration and one safetensors file: codes, scales and all other weights, with the
    scheme and the paths of what it skips as metadata.

    Args:
        model: a model with int8 codes as weights, from `outliers.quantize(…, keep="int8")`.
        folder: created if it does not exist.

    Raises:
        UserError: the model's weights are not kept as int8 codes, it has not the tensors of its configuration (it was
            pruned), or the folder cannot be written.

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
    check_in_memory(model, "saving")
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, tensor in model.state_dict().items():
        first = firsts.setdefault(tensor.data_ptr(), name)
        if first == name:  # the head is often tied to the embeddings
            tensors[name] = tensor.contiguous()
        elif name not in parameters:  # learned transforms that several layers share
            shared[name] = first
    config = copy.copy(model.config)
    vars(config).pop("quantization_config", None)  # it is of `outliers.OutliersConfig`, and describes another file
    scheme = max(schemes, key=lambda scheme: len(schemes[scheme]))
    others = {other: paths for other, paths in schemes.items() if other != scheme}
    expected = _without_values(config, scheme, exact, others).state_dict()
    for name, tensor in tensors.items():
        if name not in expected or expected[name].shape != tensor.shape:
            made = f"one of {tuple(expected[name].shape)}" if name in expected else "no such tensor"
            raise UserError(
                f"the model has '{name}' of {tuple(tensor.shape)}, and its configuration makes {made}: the file could "
                "not be loaded; expected a model as its configuration describes it"
            )
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(folder)
        instead = {write_scheme(other): paths for other, paths in others.items()}
        lists = {"skip": exact, "shared": shared} | ({"instead": instead} if instead else {})
        metadata = {"scheme": write_scheme(scheme)} | {name: json.dumps(value) for name, value in lists.items()}
        save_file(tensors, folder / INT8, metadata)


def load_quantized(folder: str | Path, device: str | torch.device = "cpu") -> PreTrainedModel:
    """Return the model that `save_quantized` wrote, with the same outputs, bit for bit.

    Args:
        folder: that of `save_quantized`.
        device: where to put the model; "auto" as for `outliers.load_model`.

    Raises:
        UserError: the folder has no int8 model, a damaged one, or one whose tensors do not have the shapes or dtypes of
            its configuration; the device does not exist, or "auto" finds too little memory.

    Example:
        >>> outliers.save_quantized(outliers.quantize(model, "llm.int8", keep="int8"), "int8")
        >>> int8 = outliers.load_quantized("int8")
    """
    find_device(device)
    path, source = Path(folder) / INT8, Source(str(folder), None, True)
    if lexists(path):
        regular_file(path)
    name = str(folder)
    try:
        metadata, stored = read_safetensors(path, partial(safetensors_refusals, name))
        scheme, skip = read_scheme(metadata["scheme"]), json.loads(metadata["skip"])
        shared = json.loads(metadata.get("shared", "{}"))
        instead = json.loads(metadata.get("instead", "{}"))
        instead = {read_scheme(other): paths for other, paths in instead.items()}
        tensors = {lazy.name: lazy for lazy in stored}
        firsts = {alias: tensors[first] for alias, first in shared.items()}
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError, OverflowError) as error:
        raise UserError(
            f"cannot read an int8 model from '{folder}' ({reason_of(error, 200)}); quantize the exact model again"
        ) from None
    config = config_of(source, name, any_kind=True)
    check_weights(config.to_dict(), name, [path])
    with refusals(name):
        model = _without_values(config, scheme, skip, instead)
        # An alias is read from the model, after the tensor that it shares.
        tensors |= {
            alias: first._replace(read=partial(tensor_of, model, first.name)) for alias, first in firsts.items()
        }
        _check(tensors, model, name)
        return fill(model, tensors, set(model.state_dict()) - set(tensors), name, device, cast=False)


def _without_values(
    config: PretrainedConfig, scheme: Scheme, skip: list[str], instead: dict[Scheme, list[str]]
) -> PreTrainedModel:
    """Return an int8 model without values, as a configuration and a scheme describe it."""
    exact = skeleton(config, config.dtype, buffers=True)
    anything = neutral(exact, scheme)  # its values do not matter: saved ones replace all fitted to them
    return quantize(exact, scheme, keep="int8", skip=skip, calibration=anything, instead=instead)


def _check(tensors: dict[str, Lazy], model: PreTrainedModel, name: str) -> None:
    """Raise UserError unless tensors fit an int8 model: codes and scales of exact dtypes, parameters of any float
    dtype."""
    expected = model.state_dict()
    parameters = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    for key, lazy in tensors.items():
        if key not in expected:
            raise UserError(
                f"'{name}' holds tensors that its architecture does not have ({printable(key)}, …); quantize the exact "
                "model again"
            )
        check_shape(lazy, expected[key].shape, name)
        dtype = READ.get(lazy.dtype)
        same = dtype is not None and (dtype.is_floating_point if key in parameters else dtype == expected[key].dtype)
        if not same:
            raise UserError(
                f"the int8 model '{name}' holds '{key}' as {dtype or lazy.dtype}; expected {expected[key].dtype}"
            )
    check_complete(tensors, model, name)


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

    Peak memory is the int8 model and one file of the checkpoint.

    Args:
        name: as for `load_model`.
        scheme: a scheme that quantizes weights.
        dtype: of unquantized weights and of the hidden states: "float32", "float16" or "bfloat16".
        device: where the model is put; "auto" as for `load_model`.
        revision: branch, tag or commit on the hub; or a checkpoint's folder in a local folder.
        skip, calibration: as for `quantize`.

    Raises:
        UserError: as `load_model`; the scheme is unknown or quantizes no weights; skip or calibration are invalid, see
            `quantize`.

    Example:
        >>> int8 = outliers.load_int8("pocket/gpt2-0.1m", "absmax-vector")
    """
    scheme = get_scheme(scheme)
    if not scheme.quantizes_projections:
        raise UserError(f"scheme '{scheme.name}' quantizes no projections; use load_model")
    model, checkpoint = open_model(name, dtype, device, revision)
    small = quantize(model, scheme, keep="int8", skip=skip, calibration=calibration)
    return fill(small, checkpoint.tensors, checkpoint.absent(model), name, device)
