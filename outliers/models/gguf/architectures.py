"""Architectures whose GGUF files transformers cannot read: their configurations, made from the fields of a header.

`outliers.models.gguf.fields` completes them. Fields that it cannot set one by one are set here, and left out of the
header that it gets.
"""

import re
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy import layers_of
from outliers.models.gguf.header import GGUFHeader, Tensor

SIGMOID = 2  # a function of routers
MAVERICK = 128  # experts of the Llama 4 whose queries and keys have no norm
# Llama 4's configuration uses the usual name of the dense layers' width for that of the experts.
WIDTHS = {"feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size"}
LATENT = ("attention.q_lora_rank", "attention.kv_lora_rank", "attention.key_length", "attention.value_length")
LATENT += ("attention.key_length_mla", "attention.value_length_mla", "attention.head_count_kv")


def made_by_fields(header: GGUFHeader) -> tuple[PretrainedConfig, GGUFHeader]:
    """Return the configuration of an architecture of `BY_FIELDS`, and the header without the fields that were used."""
    kind, more = BY_FIELDS[header.architecture](header)
    tokens = {f"{name}_token_id": header.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    tied = all(tensor.name != "output.weight" for tensor in header.tensors)
    layers = {"num_hidden_layers": header.of_model("block_count")}
    config = AutoConfig.for_model(kind, **tokens, pad_token_id=None, tie_word_embeddings=tied, **layers, **more)
    read = (*WIDTHS, "attention.sliding_window") if kind == "llama4_text" else LATENT if "kv_lora_rank" in more else ()
    remaining = {name: value for name, value in header.fields.items() if name.partition(".")[2] not in read}
    if "kv_lora_rank" in more:
        # other code reads the width of a head there
        remaining[f"{header.architecture}.attention.key_length"] = config.qk_rope_head_dim
    return config, header._replace(fields=remaining)


def _deepseek(header: GGUFHeader) -> tuple[str, dict]:
    """Return the type and the widths of latent attention, which makes keys and values from a narrower state.

    Newer files give the widths of this state as those of keys and values, and the widths of a head in fields of their
    own.
    """
    names = ("key_length", "value_length")
    head = [header.of_model(f"attention.{name}_mla") or header.of_model(f"attention.{name}") for name in names]
    rank, turned = header.of_model("attention.kv_lora_rank"), header.of_model("rope.dimension_count")
    if None in (*head, rank, turned):
        raise UserError(f"'{header.file.path}' lacks widths of its latent attention; get it again")
    groups, sigmoid = header.of_model("expert_group_count", 1), header.of_model("expert_gating_func") == SIGMOID
    return "deepseek_v3" if sigmoid else "deepseek_v2", {
        "kv_lora_rank": rank,
        "q_lora_rank": header.of_model("attention.q_lora_rank") or None,
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": head[0] - turned,
        "v_head_dim": head[1],
        "num_attention_heads": header.of_model("attention.head_count"),
        "num_key_value_heads": header.of_model("attention.head_count"),
    } | ({} if sigmoid else {"topk_method": "group_limited_greedy" if groups > 1 else "greedy"})


def _llama4(header: GGUFHeader) -> tuple[str, dict]:
    if header.of_model("attention.sliding_window") is not None:
        raise UserError(f"'{header.file.path}' says a window of attention, which Llama 4 has not; use safetensors")
    return "llama4_text", {
        **{name: header.of_model(field) for field, name in WIDTHS.items()},
        "interleave_moe_layer_step": header.of_model("interleave_moe_layer_step", 1),
        "use_qk_norm": header.of_model("expert_count") != MAVERICK,
    }


BY_FIELDS: dict[str, Callable[[GGUFHeader], tuple[str, dict]]] = {
    "olmoe": lambda _header: ("olmoe", {}),
    "glm4moe": lambda header: ("glm4_moe", {"use_qk_norm": any("attn_q_norm" in one.name for one in header.tensors)}),
    "deepseek2": _deepseek,
    "llama4": _llama4,
}


def without_next_tokens(header: GGUFHeader) -> GGUFHeader:
    """Leave out a file's last layers that predict further tokens, which transformers does not run."""
    field = f"{header.architecture}.nextn_predict_layers"
    if header.architecture not in BY_FIELDS or not (count := header.fields.get(field)):
        return header
    layers = header.of_model("block_count") - count
    numbers = ((tensor, re.match(r"blk\.(\d+)\.", tensor.name)) for tensor in header.tensors)
    tensors = tuple(tensor for tensor, number in numbers if not number or int(number[1]) < layers)
    fields = header.fields | {f"{header.architecture}.block_count": layers, field: 0}
    return header._replace(fields=fields, tensors=tensors)


def latent_tensors(model: PreTrainedModel, tensors: Iterable[Tensor]) -> Iterator[tuple[str, list[Tensor]]]:
    """Yield the names of weights of latent attention that newer files store in two tensors, for keys and for values."""
    by_name = {tensor.name: tensor for tensor in tensors}
    for layer in layers_of(model):
        parts = [by_name.get(f"blk.{layer.number}.attn_{name}_b.weight") for name in "kv"]
        for path, module in layer.module.named_modules() if None not in parts else ():
            if path.endswith("kv_b_proj") and isinstance(module, nn.Linear):
                yield f"{layer.path}.{path}.weight", parts


def keys_and_values(header: GGUFHeader, parts: list[Tensor]) -> torch.Tensor:
    """Join two stored tensors to a weight of latent attention, head by head, keys before values."""
    keys, values = (torch.from_numpy(header.read(part)) for part in parts)
    return torch.cat([keys.mT, values], 1).flatten(0, 1)
