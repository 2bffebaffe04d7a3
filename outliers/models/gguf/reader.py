"""GGUF files as models: the configuration, and the tensors under the model's own names.

transformers and the package `gguf` read the file. transformers makes the configuration, and undoes the changes that
llama.cpp makes to tensors; `gguf` dequantizes them.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from outliers.errors import UserError, joined_names
from outliers.models.gguf.architectures import (
    BY_FIELDS,
    keys_and_values,
    latent_tensors,
    made_by_fields,
    without_next_tokens,
)
from outliers.models.gguf.experts import expert_tensors, joined_experts
from outliers.models.gguf.fields import set_fields, with_one_value
from outliers.models.gguf.header import GGUFHeader, Tensor, gguf_refusals, read_header, remembered
from outliers.models.gguf.rotary import FREQUENCIES, set_rotary_parameters
from outliers.models.internals import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from outliers.models.skeleton import skeleton
from outliers.models.stored.tensors import Lazy

# Projections whose biases may be missing while those of `fields.BIASES` exist.
PROJECTIONS = ("attn_output", "ffn_gate", "ffn_down")
MODEL_TYPES = (  # types of models that are read; tests compare these with transformers' own
    *("gpt2", "bloom", "llama", "mistral", "qwen2", "qwen3", "phi3", "stablelm", "starcoder2", "gemma2"),
    *("gemma3_text", "falcon", "qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss", "olmoe", "glm4_moe", "deepseek_v2"),
    *("deepseek_v3", "llama4_text", "t5", "umt5"),
)
CORRECTION = "e_score_correction"  # of routers: a buffer in transformers, and a bias in files
ALIGNED = 64  # bytes at whose multiples tensors of torch begin
KINDS = {  # types of fields by their Python types
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.INT64,
    float: gguf.GGUFValueType.FLOAT64,
    str: gguf.GGUFValueType.STRING,
}


def read_config(file: Path) -> PretrainedConfig:
    """Return the configuration of a file's model; copy it before changing it."""
    return _read_config(file)[0]


def unread_fields(file: Path) -> list[str]:
    """Return the fields of a file's architecture that neither llama.cpp nor `read_config` knows."""
    return _read_config(file)[1]


@remembered
def _read_config(file: Path) -> tuple[PretrainedConfig, list[str]]:
    """Return the configuration of a file's model, and the names of unread fields."""
    header = without_next_tokens(with_one_value(read_header(file)))
    if header.architecture in BY_FIELDS:
        config, header = made_by_fields(header)
    else:
        config = _by_transformers(header)
    if header.architecture == "llama" and header.of_model("expert_count"):  # llama.cpp has no type for Mixtral
        fields = AutoConfig.for_model("mixtral").to_dict().keys() & config.to_dict().keys() - {"model_type"}
        config = AutoConfig.for_model("mixtral", **{name: getattr(config, name) for name in fields})
    if header.of_model("vocab_size") is None:
        config.vocab_size = next(tensor.shape[0] for tensor in header.tensors if tensor.name == "token_embd.weight")
    if hasattr(config, "dense_act_fn"):
        _correct_feed_forward(config, {tensor.name for tensor in header.tensors})
    unread = set_fields(config, header, file)
    config._name_or_path = str(file)
    if not header.of_model("attention.scale"):
        _check_scale(config, file)
    set_rotary_parameters(config, header, file)
    return config, unread


@remembered
def check_tensors(file: Path) -> None:
    """Compare a file's tensors with those that its configuration requires, as `read_tensors` does."""
    read_tensors(file, skeleton(read_config(file), torch.float32))


def stored_type(file: Path) -> str | None:
    """Return the quantization type of a file, see `GGUFHeader.type`."""
    return read_header(file).type


def _by_transformers(header: GGUFHeader) -> PretrainedConfig:
    """Return the configuration that transformers derives from a header.

    transformers takes seconds to read a vocabulary, and trusts the claims of a header. So it gets a file with only the
    fields and the names of tensors.
    """
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "header.gguf", header.architecture)
        for name, value in header.fields.items():
            _copy(writer, name, value)
        for tensor in header.tensors:
            writer.add_tensor(tensor.name, np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return AutoConfig.from_pretrained(folder, gguf_file="header.gguf", local_files_only=True)


def _correct_feed_forward(config: PretrainedConfig, names: set[str]) -> None:
    """Correct T5's configuration, for which transformers always assumes a gated ReLU and a tied head.

    In T5, gated layers use GELU, and the outputs of a tied head are scaled.
    """
    gated, tied = any(".ffn_gate." in name for name in names), "output.weight" not in names
    config.is_gated_act, config.scale_decoder_outputs = gated, tied
    config.dense_act_fn, config.feed_forward_proj = ("gelu_new", "gated-gelu") if gated else ("relu", "relu")


def _check_scale(config: PretrainedConfig, file: Path) -> None:
    """Raise UserError if a Gemma file does not give its attention scale, which may then differ from the one that
    transformers assumes."""
    scale, width = getattr(config, "query_pre_attn_scalar", None), getattr(config, "head_dim", None)
    if scale is not None and scale != width:
        raise UserError(
            f"'{file}' does not say how its attention is scaled, and {config.model_type} with {width} features a head "
            "has a scale of its own; use safetensors"
        )


def _copy(writer: gguf.GGUFWriter, name: str, value) -> None:
    """Write a header field, except fields that the writer adds, and those of the vocabulary and of rotary scaling."""
    is_vocabulary = name.startswith("tokenizer.") and not name.endswith("_token_id")
    if name in ("general.architecture", "general.alignment") or is_vocabulary or ".rope.scaling." in name:
        return
    if isinstance(value, list) and value:
        writer.add_key_value(name, value, gguf.GGUFValueType.ARRAY, KINDS[type(value[0])])
    elif not isinstance(value, list):
        writer.add_key_value(name, value, KINDS[type(value)])


def read_tensors(file: Path, model: PreTrainedModel) -> dict[str, Lazy]:
    """Return the tensors of a model by its own names, each dequantized to float32 when it is read.

    model: made from the file's configuration, without values.

    Raises:
        UserError: the file lacks a part of the model, or has additional tensors.
    """
    with gguf_refusals(file):
        header, expected = without_next_tokens(read_header(file)), model.state_dict()
        processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
        # transformers would build a table of all tensors for each module; the base model's is enough, because some
        # architectures are converted without its prefix.
        prefix = f"{model.base_model_prefix}."
        inside = {name.removeprefix(prefix): None for name in expected if name.startswith(prefix)}
        base = _Names(model.config, inside, {})
        names = _Names(model.config, expected, {model.base_model_prefix: base})
        own_names = get_gguf_hf_weights_map(names, processor, header.architecture)
        own_names = {name: own.replace(f"{CORRECTION}.bias", f"{CORRECTION}_bias") for name, own in own_names.items()}
        of_experts = expert_tensors(model, header.tensors)
        latent = dict(latent_tensors(model, header.tensors))
        parts = defaultdict(list, latent | {own_name: stored for own_name, (stored, _) in of_experts.items()})
        placed = {tensor.name for stored in parts.values() for tensor in stored}
        for tensor in (one for one in header.tensors if one.name not in placed):
            parts[next((own_names[name] for name in _names(tensor) if name in own_names), None)].append(tensor)
        others = [own_name for own_name in parts if own_name not in expected]
        unused = [tensor.name for own_name in others for tensor in parts.pop(own_name) if tensor.name != FREQUENCIES]
        zeros = _absent_biases(own_names, expected.keys() - parts.keys())
        _check_complete(model, parts, unused, file, zeros)

        def made(own_name: str) -> Callable[[list[Tensor]], torch.Tensor]:
            if own_name in of_experts:
                return partial(joined_experts, of_experts[own_name][1], header)
            if own_name in latent:
                return partial(keys_and_values, header)
            return partial(_processed, header, own_name, processor.process)

        tensors = {}
        for own_name, stored in parts.items():
            shape, is_stacked = tuple(expected[own_name].shape), own_name in of_experts
            tensors[own_name] = _lazy(header, own_name, shape, stored, made(own_name), is_stacked)
        return tensors | {own_name: _zeros(own_name, tuple(expected[own_name].shape)) for own_name in zeros}


def _absent_biases(own_names: dict[str, str], absent: Collection[str]) -> set[str]:
    """Return the biases of projections that no layer of the file has, which become zeros: transformers can only switch
    the biases of several projections on together.

    own_names: the model's names of tensors by those in the file. absent: the model's names that are not in the file.
    """
    kinds = defaultdict(set)
    for name, own_name in own_names.items():
        kinds[re.sub(r"\d+", "", name)].add(own_name)
    biases = [names for kind, names in kinds.items() if kind.endswith(tuple(f"{one}.bias" for one in PROJECTIONS))]
    return {name for names in biases if names <= set(absent) for name in names}


def _zeros(own_name: str, shape: tuple[int, ...]) -> Lazy:
    return Lazy(own_name, shape, "F32", [], lambda: torch.zeros(shape))


def _lazy(
    header: GGUFHeader, own_name: str, shape: tuple[int, ...], parts: list[Tensor], make: Callable, of_experts: bool
) -> Lazy:
    """Return a tensor of a model; make: joins its parts in the file, each of which may hold all experts."""

    def read() -> torch.Tensor:
        with gguf_refusals(header.file.path):
            tensor = make(parts)
            if tensor.data_ptr() % ALIGNED:  # alignment affects how some processors round products
                tensor = tensor.clone()
            if tensor.shape != shape:
                raise ValueError(f"'{own_name}' has the shape {tuple(tensor.shape)}, expected {shape}")
            return tensor

    def piece(number: int) -> Lazy:
        pieces = [part.piece(number) for part in parts]
        return _lazy(header, f"{own_name}[{number}]", (1, *shape[1:]), pieces, make, of_experts)

    spans = [(header.file, part.start, part.end) for part in parts]
    return Lazy(own_name, shape, "F32", spans, read, piece=piece if of_experts else None)


def _processed(header: GGUFHeader, own_name: str, process: Callable, parts: list[Tensor]) -> torch.Tensor:
    """Read a tensor; process: the function of transformers that undoes llama.cpp's changes to it."""
    (part,) = parts
    mapping = dict.fromkeys(_names(part), own_name)
    made = process(header.read(part), part.name, tensor_key_mapping=mapping, parsed_parameters={"tensors": {}})
    return torch.from_numpy(np.require(made.weights, requirements=["C", "W"]))


def _check_complete(
    model: PreTrainedModel, parts: dict[str, list[Tensor]], unused: list[str], file: Path, zeros: Collection[str]
) -> None:
    """Raise UserError unless the file has exactly the model's tensors, of types that gguf can dequantize."""
    expected = model.state_dict()
    own = (*dict(model.named_parameters()), *(name for name, _ in model.named_buffers() if name in expected))
    missing = [tensor_name for tensor_name in own if tensor_name not in {*parts, *zeros}]
    wrong = [
        tensor_name
        for tensor_name, stored in parts.items()
        if sum(prod(part.shape) for part in stored) != expected[tensor_name].numel()
    ]
    for names, fault in ((missing, "lacks"), (wrong, "has other sizes of"), (unused, "holds beside the model")):
        if names:
            raise UserError(
                f"'{file}' {fault} {len(names)} tensors ({joined_names(names)}); expected those of "
                f"{model.config.model_type} as transformers computes it"
            )
    for kind in {part.type for stored in parts.values() for part in stored}:
        gguf.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)


class _Names(NamedTuple):
    """The part of a module's interface from which transformers finds the names of its tensors in a file."""

    config: PretrainedConfig
    tensors: dict
    children: dict

    def state_dict(self) -> dict:
        return {name.replace(f"{CORRECTION}_bias", f"{CORRECTION}.bias"): one for name, one in self.tensors.items()}

    def named_children(self):
        return self.children.items()


def _names(tensor: Tensor) -> tuple[str, str]:
    """Return the possible names of a tensor; tensors that are joined to a parameter of all experts lack ".weight"."""
    return tensor.name, tensor.name.removesuffix(".weight")
