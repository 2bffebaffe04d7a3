"""Loading of models, configurations and tokenizers."""

import copy
import functools
import hashlib
import logging
import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory, get_max_memory
from torch import nn
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    BaseImageProcessor,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from outliers.errors import BadWeights, UserError, unknown_name
from outliers.models.anatomy import anatomy_of, part_config
from outliers.models.anatomy.experts import holds_experts, set_weights
from outliers.models.anatomy.weights import named_weights
from outliers.models.checkpoint import Checkpoint, read_checkpoint
from outliers.models.config_file import architecture_first, check_fields, check_weights, read_config_file
from outliers.models.internals import complete, dtype_of
from outliers.models.names import WITH_ADAPTER, known_configs
from outliers.models.skeleton import refusals, skeleton
from outliers.models.source import Source, config_path, find_model
from outliers.models.stored.tensors import Lazy, printable
from outliers.models.tokenizers import read_folder_tokenizer
from outliers.models.weight_files import state_of

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MANY = 8  # number of ignored tensors that a message names
LARGEST_SIDE = 1 << 13  # pixels, of the output of an image processor
HASHING = 4  # threads that hash weights
# Settings that never come from a file: transformers' own attention and experts, because a file may name code on the
# hub, and the outputs of a model.
OURS = {
    "_attn_implementation": None,
    "_experts_implementation": None,
    "output_attentions": False,
    "output_hidden_states": False,
    "return_dict": True,
}
logger = logging.getLogger(__name__)


def quantized_from(source: Source) -> str | None:
    """Return the type in which a GGUF file's weights were quantized, such as "Q4_1"; None for other models."""
    return source.format.stored_type(*source.files) if source.format else None


def find_config(name: str) -> PretrainedConfig:
    """Return the configuration of a model: of those in `known_configs` without network access, else of a hub id, a
    local folder or a pocket model.

    For a model that also takes pictures it is that of the text part.
    """
    if name not in known_configs():
        return config_of(find_model(name), name, any_kind=True)
    fields = {field: value for field, value in known_configs()[name].items() if field != "shown"}
    return AutoConfig.for_model(**fields)


def config_of(source: Source, name: str, any_kind: bool = False) -> PretrainedConfig:
    """Return the configuration of model `name`, checked before and after transformers parses it.

    any_kind: whether its architecture may be unknown, and its weights absent or too few.
    """
    if source.format:
        config = copy.deepcopy(source.format.read_config(*source.files))
        if not any_kind and config.model_type not in source.format.MODEL_TYPES:
            raise UserError(
                f"unknown architecture '{config.model_type}' of '{name}', whose header may leave out what its model "
                f"needs; expected one of {', '.join(source.format.MODEL_TYPES)}, or a folder with config.json and "
                "safetensors"
            )
        check_fields(config.to_dict(), *source.files)
    else:
        file = config_path(source)
        kind = read_config_file(file)["model_type"] if file else ""
        with architecture_first(kind), refusals(name, source):
            config = part_config(copy.deepcopy(_parsed_config(source, file and state_of(file))))
    for field, value in OURS.items():
        setattr(config, field, value)
    vars(config).pop("auto_map", None)  # the type is known, so that no code beside it is needed
    if not any_kind:
        anatomy_of(config)
        if not source.format:  # GGUF compares all tensors, and has formats of less than half a byte per weight
            check_weights(config.to_dict(), name, source.files)
    return config


@functools.lru_cache(maxsize=8)
def _parsed_config(source: Source, _state: tuple | None) -> PretrainedConfig:
    """Return the configuration that transformers makes of a model's `config.json`, cached until the file changes."""
    return AutoConfig.from_pretrained(source.path, **_hub_keywords(source))


def load_config(name: str, revision: str | None = None) -> PretrainedConfig:
    """Load the configuration of a model, and check that its files fit."""
    return read_config(find_model(name, revision), name)


def read_config(source: Source, name: str) -> PretrainedConfig:
    """Return the configuration of a model that was found, as `load_config`."""
    config = config_of(source, name)
    if source.format:
        source.format.check_tensors(*source.files)
    return config


def stored_as(config: PretrainedConfig) -> str | None:
    """Return the method by which a model's stored weights are quantized, or None."""
    return (config.to_dict().get("quantization_config") or {}).get("quant_method")


def without_storage(config: PretrainedConfig) -> PretrainedConfig:
    """Return a copy of a configuration without its quantization method."""
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    return config


def load_tokenizer(name: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model.

    Args:
        name: of the model, as for `outliers.load_model`.
        revision: branch, tag or commit on the hub; by default the main branch.

    Raises:
        UserError: the model is unknown or unreachable, or ships no tokenizer; or the tokenizer cannot be used, or cuts
            words at random.

    Example:
        >>> outliers.load_tokenizer("pocket/gpt2-0.1m").is_fast
        True
    """
    return read_tokenizer(find_model(name, revision), name)


def read_tokenizer(source: Source, name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a model that was found, as `load_tokenizer`."""
    with refusals(name, source, "the tokenizer of "):
        if source.format:
            return source.format.read_tokenizer(*source.files)
        config = None
        with suppress(Exception):  # transformers reads tokenizers of configurations that it cannot parse, too
            config = _parsed_config(source, (file := config_path(source)) and state_of(file))
        tokenizer = read_folder_tokenizer(source, name, config, **_hub_keywords(source))
        fast = getattr(tokenizer, "backend_tokenizer", None)
        if dropout := getattr(fast and fast.model, "dropout", None):
            raise UserError(
                f"the tokenizer of '{name}' drops {dropout:.0%} of its merges at random; set 'dropout' to 0"
            )
        return tokenizer


def load_processor(name: str, revision: str | None = None) -> BaseImageProcessor:
    """Load the image processor of a vision model, always with PIL.

    Raises:
        UserError: the model is unknown or unreachable, has no image processor, or an unusable one.
    """
    return read_processor(find_model(name, revision), name)


def read_processor(source: Source, name: str) -> BaseImageProcessor:
    """Return the image processor of a model that was found, as `load_processor`."""
    with refusals(name, source, "the image processor of "):
        processor = AutoImageProcessor.from_pretrained(source.path, backend="pil", **_hub_keywords(source))
    for size in (getattr(processor, "size", None), getattr(processor, "crop_size", None)):
        for side, pixels in dict(size or {}).items():
            if pixels is not None and not 1 <= pixels <= LARGEST_SIDE:
                raise UserError(
                    f"the image processor of '{name}' asks for {side} {pixels}; expected 1 to {LARGEST_SIDE:,} pixels"
                )
    return processor


def load_model(
    name: str, dtype: str = "float32", device: str | torch.device = "cpu", revision: str | None = None
) -> PreTrainedModel:
    """Return a causal language model in eval mode, loaded from safetensors or GGUF; no foreign code runs.

    The weights of a quantized GGUF file are the dequantized ones.

    Of a model that takes pictures too, its text part.

    Args:
        name: a hub id ("gpt2", "facebook/opt-125m"), a local folder or GGUF file, a pocket model ("pocket/gpt2-1.7m"),
            or a packaged one ("smollm2-135m").
        dtype: "float32", "float16" or "bfloat16".
        device: where to put it, such as "cpu" or "cuda"; "auto" spreads its layers over all GPUs by what is free on
            them, and is the CPU where there is none.
        revision: branch, tag or commit on the hub; or a checkpoint's folder in a local folder.

    Raises:
        UserError: the model is unknown, unreachable, of an unknown architecture or incomplete; its weights are
            corrupt or hold NaN or inf; the dtype or the device does not exist; "auto" finds too little memory.

    Example:
        >>> outliers.load_model("pocket/gpt2-0.1m").dtype
        torch.float32
    """
    model, checkpoint = open_model(name, dtype, device, revision)
    return fill(model, checkpoint.tensors, checkpoint.absent(model), name, device)


def open_model(
    name: str, dtype: str, device: str | torch.device, revision: str | None
) -> tuple[PreTrainedModel, Checkpoint]:
    """Return a model without values, except computed ones (see `skeleton`), and the contents of its files.

    Tensors that the model does not use are logged as a warning, because the model may differ from the trained one.
    device: only checked. Errors are those of `load_model`.
    """
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    find_device(device)
    source = find_model(name, revision)
    config = config_of(source, name)
    model = skeleton(config, DTYPES[dtype], buffers=True)
    if (explicit := getattr(config, "transformers_weights", None)) is not None:
        raise UserError(
            f"the configuration of '{name}' names {str(explicit)[:100]!a} as its weights; expected none but "
            "model.safetensors or what its index lists"
        )
    checkpoint = read_checkpoint(source, name, revision, model)
    with suppress(UserError), refusals(source.path):  # many folders have none, and no measurement uses it
        if not source.file:
            model.generation_config = GenerationConfig.from_pretrained(source.path, **_hub_keywords(source))
    vars(model.config).pop("quantization_config", None)  # because the loaded weights are not quantized
    model.ignored_tensors, model.zero_points = checkpoint.ignored, checkpoint.note_on_zero_points
    model.merged_adapter = checkpoint.adapter if source.adapter else None
    if checkpoint.adapter and not source.adapter:
        logger.warning(
            f"warning: '{name}' holds a {checkpoint.adapter} beside its weights, which is left out (transformers would "
            f"apply it); --adapter, or the name '{name}{WITH_ADAPTER}', merges it"
        )
    if checkpoint.note_on_zero_points:
        logger.warning(f"warning: zero points of '{name}' are read as {checkpoint.note_on_zero_points}")
    if count := len(checkpoint.ignored):
        kind, place = ("field", "llama.cpp") if source.format else ("tensor", "its configuration")
        logger.warning(
            f"warning: the checkpoint of '{name}' holds {count} {kind}{'s' if count > 1 else ''} for which "
            f"{place} has no place ({', '.join(first_names(checkpoint.ignored))}); they are ignored"
        )
    return model, checkpoint


def fill(
    model: PreTrainedModel,
    tensors: dict[str, Lazy],
    absent: set[str],
    name: str,
    device: str | torch.device,
    cast: bool = True,
) -> PreTrainedModel:
    """Load tensors into a model without values, tie weights, and compute values that no file holds.

    tensors: by the model's own names, checked against the model. absent: names that are in no file. cast: whether to
    cast to the model's dtype.

    Raises:
        UserError: "auto" finds too little memory; BadWeights: a tensor has NaN or inf.
    """
    places = device_map(model, name) if device == "auto" else {"": find_device(device)}
    for tensor_name, lazy in tensors.items():
        place = next(place for part, place in places.items() if f"{tensor_name}.".startswith(part and f"{part}."))
        dtype = dtype_of(model, tensor_name) if cast else None
        put(model, tensor_name, lazy, name, place, dtype)
    complete(model, absent)
    if device == "auto":
        return dispatch_model(model, places, skip_keys=model._skip_keys_device_placement)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(places[""])
    return model


def put(
    model: PreTrainedModel,
    tensor_name: str,
    lazy: Lazy,
    name: str,
    device: int | str | torch.device,
    dtype: torch.dtype | None,
) -> None:
    """Read the parameter or buffer `tensor_name` of model `name` onto its device; a layer of int8 codes gets the codes
    of a weight."""
    tensor = read_checked(lazy, tensor_name, name, device, dtype)
    path, _, part = tensor_name.rpartition(".")
    module = model.get_submodule(path)
    if part in module._parameters:
        module._parameters[part] = nn.Parameter(tensor, module._parameters[part].requires_grad)
    elif part in module._buffers:
        module._buffers[part] = tensor
    elif not holds_experts(module):
        module.set_weight(tensor)
    if holds_experts(module):
        set_weights(module, part, tensor)


def read_checked(
    lazy: Lazy, tensor_name: str, name: str, device: int | str | torch.device, dtype: torch.dtype | None
) -> torch.Tensor:
    """Read the tensor `tensor_name` of model `name` onto a device; raise BadWeights if it has NaN or inf."""
    tensor = lazy.read()
    tensor = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
    _check_finite(tensor, tensor_name, name, lazy)
    return tensor


def tensor_of(model: PreTrainedModel, tensor_name: str) -> torch.Tensor:
    path, _, part = tensor_name.rpartition(".")
    return getattr(model.get_submodule(path), part)


def first_names(names: list[str]) -> list[str]:
    """Return the first names of tensors, followed by the number of all if there are more."""
    names_shown = [printable(name) for name in names[:MANY]]
    return names_shown if len(names) <= MANY else [*names_shown, f"… {len(names)} in all"]


def device_map(skeleton: PreTrainedModel, name: str) -> dict[str, int | str]:
    """Return the device of each module by path, "" for the whole model, distributing layers evenly over GPUs.

    Devices are numbers of GPUs, or "cpu" without a GPU. Each layer is placed as a whole. skeleton: the model without
    weights.
    """
    torch.cuda.empty_cache()  # memory that torch caches of a deleted model would count as used
    free = get_max_memory()
    gpus = [place for place in free if isinstance(place, int)]
    whole = {"no_split_module_classes": skeleton._no_split_modules}
    # without a GPU all free memory is the CPU's, whatever accelerate calls it ("mps" on a Mac)
    memory = get_balanced_memory(skeleton, **whole) if gpus else {"cpu": sum(free.values())}
    places = infer_auto_device_map(skeleton, memory, **whole, offload_buffers=True)  # else it warns before the error
    outside = [part for part, place in places.items() if place not in (gpus or ["cpu"])]
    if outside:
        size, where = skeleton.get_memory_footprint() / 1e9, "the GPUs have" if gpus else "this machine has"
        raise UserError(
            f"'{name}' takes {size:.1f} GB, and {where} too little memory free for all of it ('{outside[0]}' is left "
            "over); use --stream or a smaller --dtype"
        )
    return places


def _check_finite(tensor: torch.Tensor, tensor_name: str, name: str, lazy: Lazy) -> None:
    """Raise BadWeights if a weight has NaN or inf, possibly only in its present dtype."""
    if not (tensor.is_floating_point() and tensor.numel()):
        return
    tensor = tensor.float() if tensor.itemsize == 1 else tensor  # torch has no finfo limits for 8 bits
    ends = torch.stack(torch.aminmax(tensor))  # NaN if there is one; twelve times as fast as testing every entry
    if torch.isfinite(ends).all():
        return
    largest = lazy.read().double().abs().max().item()
    if not largest < math.inf:
        raise BadWeights(f"the weights of '{name}' hold NaN or inf in '{tensor_name}'; expected finite weights")
    dtype, limit = str(tensor.dtype).removeprefix("torch."), torch.finfo(tensor.dtype).max
    holding = " or ".join(known for known, of in DTYPES.items() if torch.finfo(of).max >= largest)
    expected = f"dtype that holds it: {holding}" if holding else "smaller weight"
    raise BadWeights(
        f"'{tensor_name}' of '{name}' holds {largest:,.6g}, beyond {dtype}, which ends at {limit:,.6g}; expected a "
        f"{expected}"
    )


def find_device(name: str | torch.device) -> torch.device:
    """Return the torch device of a name; "auto" stands for the first GPU, or else the CPU, where token ids go."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device '{name}'; expected cpu, cuda, cuda:N or auto") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device '{name}' is not supported; expected cpu, cuda, cuda:N or auto")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UserError(f"device '{name}' is not there: torch {torch.__version__} sees {count} GPUs; use cpu")
    return device


def weights_hash(model: PreTrainedModel) -> str:
    """Return the SHA-256 of the names, dtypes, shapes and digests of all parameters, as loaded: 16 hexadecimal
    digits."""
    with ThreadPoolExecutor(HASHING) as pool:
        return hash_parameters(pool.map(lambda parameter: line_of(*parameter), list(named_weights(model))))


def line_of(name: str, tensor: torch.Tensor, pieces: Iterable[torch.Tensor] | None = None) -> str:
    """Return the line of a parameter in the hash of all weights: its name, dtype, shape, and the SHA-256 of its bytes.

    pieces: its entries along the first dimension, if the tensor has no values.
    """
    digest = hashlib.sha256()
    for piece in (tensor,) if pieces is None else pieces:
        digest.update(piece.detach().cpu().flatten().view(torch.uint8).numpy())
    return f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest.hexdigest()}\n"


def hash_parameters(lines: Iterable[str]) -> str:
    """Return the hash of a model's weights from the lines of its parameters, in any order."""
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()[:16]


def _hub_keywords(source: Source) -> dict:
    where = {"revision": source.revision or "main", "local_files_only": source.local_files_only}
    return where | {"trust_remote_code": False}
