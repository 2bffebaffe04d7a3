"""Small GGUF files, written as llama.cpp writes them: its names, its fields, and what it does to some tensors."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map
from transformers.pytorch_utils import Conv1D

from outliers.models.names import POCKET

OTHER_NAMES = {"gemma3_text": "gemma3", "gpt_oss": "gpt-oss", "qwen3_moe": "qwen3moe"}  # by model type, in GGUF
OTHER_NAMES |= {"qwen2_moe": "qwen2moe", "mixtral": "llama", "glm4_moe": "glm4moe", "llama4_text": "llama4"}
OTHER_NAMES |= dict.fromkeys(("deepseek_v2", "deepseek_v3"), "deepseek2")
LIKE = {"gemma3_text": "gemma3", "mixtral": "llama", "llama4_text": "llama"}  # fields in transformers' table
LIKE |= dict.fromkeys(("olmoe", "glm4_moe", "deepseek_v2", "deepseek_v3"), "qwen3_moe")
OF_ROUTERS = {  # fields that llama.cpp writes of what a configuration has
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
}
TOKENIZER = POCKET / "gpt2-0.1m" / "tokenizer.json"
VOCABULARY = 4096


def _rows_of_heads(heads: int, tensor: np.ndarray) -> np.ndarray:
    """The halves of a head that rotary embeddings turn together, interleaved."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _as_in_llama(config, name: str, tensor: np.ndarray) -> np.ndarray:
    if ".attn_q." in name:
        return _rows_of_heads(config.num_attention_heads, tensor)
    return _rows_of_heads(config.num_key_value_heads, tensor) if ".attn_k." in name else tensor


def _as_in_bloom(config, name: str, tensor: np.ndarray) -> np.ndarray:
    """Queries, keys and values of all heads one after the other, not head by head."""
    if ".attn_qkv." not in name:
        return tensor
    return tensor.reshape(config.n_head, 3, -1, *tensor.shape[1:]).swapaxes(0, 1).reshape(tensor.shape)


def _as_in_gemma(_config, name: str, tensor: np.ndarray) -> np.ndarray:
    return tensor + 1 if name.endswith("norm.weight") else tensor


CHANGES = {"llama": _as_in_llama, "mixtral": _as_in_llama, "bloom": _as_in_bloom}
CHANGES |= {"gemma2": _as_in_gemma, "gemma3_text": _as_in_gemma}


def tensors_of(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """A model's weights as llama.cpp names and stores them, float32."""
    config = model.config
    name = OTHER_NAMES.get(config.model_type, config.model_type)
    processor = TENSOR_PROCESSORS.get(name, TensorProcessor)(config=config.to_dict())
    model_type = name if name in ("llama", *{*OTHER_NAMES.values()}) else "llama" if name == "mistral" else None
    names = get_gguf_hf_weights_map(model, processor, model_type)
    weights, tensors = dict(model.named_parameters()), {}
    for of_file, own in names.items():
        if own not in weights:
            continue
        tensor = weights[own].detach().float()
        if isinstance(model.get_submodule(own.rpartition(".")[0]), Conv1D):
            tensor = tensor.T if tensor.ndim > 1 else tensor
        if ".experts." in own:
            continue
        tensor = tensor[0] if "gate_inp_shexp" in of_file else tensor
        change = CHANGES.get(config.model_type, lambda _config, _name, tensor: tensor)
        tensors[of_file] = np.ascontiguousarray(change(config, of_file, tensor.numpy()))
    base = model.base_model if hasattr(model.base_model, "layers") else getattr(model, "model", None)
    for number, layer in enumerate(getattr(base, "layers", ())):
        part = getattr(layer, "mlp", None) or getattr(layer, "feed_forward", None)
        if hasattr(gate := getattr(part, "gate", None), "e_score_correction_bias"):
            tensors[f"blk.{number}.exp_probs_b.bias"] = gate.e_score_correction_bias.numpy()
        if f"blk.{number}.attn_kv_b.weight" in tensors:  # as newer files have it: for keys, turned, and for values
            both = tensors.pop(f"blk.{number}.attn_kv_b.weight").reshape(
                config.num_attention_heads, -1, config.kv_lora_rank
            )
            keys, values = np.split(both, [config.qk_nope_head_dim], 1)
            tensors[f"blk.{number}.attn_k_b.weight"] = np.ascontiguousarray(keys.swapaxes(1, 2))
            tensors[f"blk.{number}.attn_v_b.weight"] = np.ascontiguousarray(values)
        if experts := getattr(part, "experts", None):
            tensors |= {f"blk.{number}.ffn_{name}": tensor for name, tensor in experts_of(experts)}
    return tensors


def experts_of(experts: torch.nn.Module) -> Iterator[tuple[str, np.ndarray]]:
    """The weights of all experts of a layer, outputs first, and their biases, each kind as one tensor; those of Llama 4
    do not say themselves how they lie."""
    for own, parameter in experts.named_parameters():
        end = "bias" if own.endswith("_bias") else "weight"
        tensor = parameter.detach().float()
        tensor = tensor.mT if getattr(experts, "is_transposed", True) and end == "weight" else tensor
        if own.startswith("gate_up"):
            gates = (
                (tensor[:, 0::2], tensor[:, 1::2])
                if not getattr(experts, "is_concatenated", True)
                else tensor.chunk(2, 1)
            )
            for kind, one in zip(("gate", "up"), gates, strict=True):
                yield f"{kind}_exps.{end}", np.ascontiguousarray(one)
        else:
            yield f"down_exps.{end}", np.ascontiguousarray(tensor)


def fields_of(model: PreTrainedModel) -> dict:
    """What llama.cpp says of a model's configuration, as far as transformers reads it, and of its rotary embeddings."""
    config = model.config
    said = GGUF_CONFIG_MAPPING[LIKE.get(config.model_type, config.model_type)]
    if config.model_type in ("mixtral", "llama4_text", "glm4_moe", "deepseek_v2", "deepseek_v3"):
        count = "num_local_experts" if hasattr(config, "num_local_experts") else "n_routed_experts"
        said = {**said, "expert_count": count, "expert_used_count": "num_experts_per_tok"}
    fields = {field: getattr(config, name, None) for field, name in said.items() if name not in (None, "rope_theta")}
    fields["context_length"] = getattr(config, "max_position_embeddings", None)
    fields["expert_feed_forward_length"] = getattr(config, "moe_intermediate_size", None)
    fields["expert_shared_feed_forward_length"] = getattr(config, "shared_expert_intermediate_size", None)
    fields["attention.sliding_window"] = getattr(config, "sliding_window", None)
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        fields[field] = getattr(config, field, None)
    fields.pop("sliding_window", None)  # by which transformers, not llama.cpp, knows that of GPT-OSS
    if getattr(config, "multi_query", False):
        fields |= {"attention.head_count_kv": 1, "feed_forward_length": config.ffn_hidden_size}
    for own in ("layer_norm_epsilon", "norm_eps"):
        fields["attention.layer_norm_epsilon"] = getattr(config, own, fields.get("attention.layer_norm_epsilon"))
    rotary = getattr(config, "rope_parameters", None)
    if rotary:
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rotary = rotary.get("full_attention", rotary)
        fields["rope.freq_base"] = rotary["rope_theta"]
        fields["rope.dimension_count"] = int(width * (rotary.get("partial_rotary_factor") or 1))
        fields["attention.key_length"] = width
    fields |= {field: getattr(config, name, None) for field, name in OF_ROUTERS.items()}
    if config.model_type in ("glm4_moe", "deepseek_v3"):
        fields["expert_gating_func"] = 2
    if config.model_type == "llama4_text":
        fields |= {"feed_forward_length": config.intermediate_size_mlp}
        fields |= {"expert_feed_forward_length": config.intermediate_size}
    if hasattr(config, "kv_lora_rank"):
        fields |= {"attention.q_lora_rank": config.q_lora_rank, "attention.kv_lora_rank": config.kv_lora_rank}
        fields |= {"attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim, "attention.head_count_kv": 1}
        fields |= {"attention.value_length": config.kv_lora_rank, "attention.value_length_mla": config.v_head_dim}
        fields |= {"attention.key_length_mla": config.qk_head_dim, "rope.dimension_count": config.qk_rope_head_dim}
    return {field: value for field, value in fields.items() if value is not None}


def vocabulary(size: int = VOCABULARY) -> dict:
    """Fields of a tokenizer: of the pocket models, or of as many tokens as are asked for, which can split no text."""
    if size != VOCABULARY:
        return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{number}" for number in range(size)]}
    content = json.loads(TOKENIZER.read_text())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].get)
    special = {token["id"] for token in content["added_tokens"]}
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if number in special else 1 for number in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }


def write_gguf(path: Path, architecture: str, fields: dict, tensors: dict[str, np.ndarray], kind: str = "F32") -> Path:
    """Write a file of these fields and tensors; None is no field.

    kind: type of the matrices that consist of whole blocks of it; as with llama.cpp the others are F32.
    """
    kind, stored = gguf.GGMLQuantizationType[kind], {}
    for name, tensor in tensors.items():
        whole_blocks = tensor.ndim > 1 and tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        own = kind if whole_blocks else gguf.GGMLQuantizationType.F32
        stored[name] = gguf.quantize(tensor, own), own
    return write_stored(path, architecture, fields, stored)


def write_stored(path: Path, architecture: str, fields: dict, tensors: dict) -> Path:
    """Write a file of these fields, and of tensors as they are stored: codes and their type."""
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        whole = name if name.startswith(("general.", "tokenizer.", "split.")) else f"{architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(whole, value)
        elif value is not None:
            writer.add_key_value(whole, value, gguf.GGUFValueType.get_type(value))
    for name, (codes, kind) in tensors.items():
        writer.add_tensor(name, codes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def save_gguf(model: PreTrainedModel, path: Path, kind: str = "F32", **changes) -> Path:
    """Write a model with a vocabulary of its size, with these changes of fields."""
    name = OTHER_NAMES.get(model.config.model_type, model.config.model_type)
    fields = fields_of(model) | vocabulary(model.config.vocab_size) | changes
    return write_gguf(path, name, fields, tensors_of(model), kind)


def rewrite(path: Path, name: str, at: int, form: str, *values) -> None:
    """Write other bytes behind a name in a file's header, so many bytes after its end."""
    content = bytearray(path.read_bytes())
    struct.pack_into(form, content, content.index(name.encode()) + len(name) + at, *values)
    path.write_bytes(content)


def random_codes(kind: str, blocks: int) -> np.ndarray:
    """Random blocks of a type whose numbers in 16 bits are finite."""
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    return np.random.default_rng(0).integers(0, 0x3C, blocks * size, np.uint8)


def same_weights(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    """Whether two models have the same parameters, bit for bit."""
    weights, others = dict(one.named_parameters()), dict(other.named_parameters())
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
