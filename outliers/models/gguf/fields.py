"""The header fields of a GGUF file that define a model's computation, and the attributes that they set.

transformers reads some of them, for some architectures, and ignores the others. A field that llama.cpp knows and that
sets nothing here is refused, unless its value has no effect.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import gguf
from transformers import PretrainedConfig

from outliers.errors import UserError, shown
from outliers.models.gguf.header import GGUFHeader
from outliers.models.gguf.rotary import READ as ROTARY

OTHER_NAMESPACES = ("adapter.", "clip.", "diffusion.", "xielu.")  # of files that are no models of transformers
EPSILON = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")


def _any(_value, _config: PretrainedConfig) -> bool:
    return True


def _only(*values) -> Callable:
    return lambda value, _config: value in values


def _head_width(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _is_head_width(value, config: PretrainedConfig) -> bool:
    return value == _head_width(config)


def _key_heads(config: PretrainedConfig) -> int:
    return 1 if getattr(config, "multi_query", False) else config.num_attention_heads


def _has_windows(config: PretrainedConfig) -> bool:
    return "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])


def _layer_types(value, config: PretrainedConfig) -> list[str]:
    """Return the kind of attention of each layer, from a list of flags for windows, or a period.

    In a period of n layers, the last one has no window.
    """
    layers = range(config.num_hidden_layers)
    windows = value if isinstance(value, list) else [bool(value) and layer % value < value - 1 for layer in layers]
    return ["sliding_attention" if window else "full_attention" for window in windows]


class Field(NamedTuple):
    """A header field and what it sets in a configuration.

    attributes: its names in configurations, of which the first that a configuration has is set. harmless: whether a
    value has no effect in a model whose configuration lacks the attributes. made: converts the value to that of the
    attribute. used: whether a model of a configuration reads the attribute.
    """

    attributes: tuple[str, ...] = ()
    harmless: Callable[[object, PretrainedConfig], bool] = _only(0)
    made: Callable[[object, PretrainedConfig], object] = lambda value, _config: value
    used: Callable[[PretrainedConfig], bool] = lambda _config: True


# Fields in which llama.cpp takes 0 for an absent one.
SCALES = ("attention.scale", "logit_scale", "residual_scale", "embedding_scale")
GATES = dict.fromkeys(("glm4_moe", "deepseek_v3", "llama4_text"), 2)  # gates that are sigmoids; others are a softmax, 1
FIELDS = {
    "block_count": Field(("num_hidden_layers",)),
    "decoder_block_count": Field(("num_decoder_layers",)),
    "context_length": Field(("max_position_embeddings",), _any),
    "embedding_length": Field(("hidden_size",)),
    "feed_forward_length": Field(
        ("intermediate_size", "n_inner", "d_ff", "ffn_hidden_size"),
        lambda value, config: value == 4 * config.hidden_size,
    ),
    "vocab_size": Field(("vocab_size",)),
    "attention.head_count": Field(("num_attention_heads",)),
    "attention.head_count_kv": Field(("num_key_value_heads",), lambda value, config: value == _key_heads(config)),
    "attention.key_length": Field(("head_dim",), _is_head_width),
    "attention.key_length_swa": Field((), _is_head_width),
    "attention.value_length": Field((), _is_head_width),
    "attention.value_length_swa": Field((), _is_head_width),
    "attention.layer_norm_epsilon": Field(EPSILON),
    "attention.layer_norm_rms_epsilon": Field(EPSILON),
    "attention.relative_buckets_count": Field(("relative_attention_num_buckets",)),
    "attention.causal": Field((), _only(True)),
    "attention.scale": Field(
        ("query_pre_attn_scalar", "attention_multiplier"),
        lambda value, config: abs(value * _head_width(config) ** 0.5 - 1) < 1e-6,
        lambda value, config: round(value**-2) if "query_pre_attn_scalar" in class_fields(config) else value,
    ),
    "attention.sliding_window_pattern": Field(("layer_types",), made=_layer_types),  # before fields that depend on it
    "attention.sliding_window": Field(
        ("sliding_window",),
        lambda value, config: value == 0 or value >= (getattr(config, "max_position_embeddings", None) or value + 1),
        lambda value, _config: value or None,
        _has_windows,
    ),
    "attention.clamp_kqv": Field(("clip_qkv",)),
    "attention.max_alibi_bias": Field((), lambda value, config: value == (8 if config.model_type == "bloom" else 0)),
    "attention.output_scale": Field((), _only(0, 1)),
    "attention.shared_kv_layers": Field(("num_kv_shared_layers",)),
    "attention.temperature_length": Field(),
    "attention.temperature_scale": Field(),
    "attn_logit_softcapping": Field(("attn_logit_softcapping",), made=lambda value, _config: value or None),
    "final_logit_softcapping": Field(("final_logit_softcapping",), made=lambda value, _config: value or None),
    "router_logit_softcapping": Field(),
    "logit_scale": Field(("logits_scaling", "logit_scale"), _only(1)),
    "residual_scale": Field(("residual_multiplier",), _only(1)),
    "embedding_scale": Field(("embedding_multiplier",), _only(1)),
    "swin_norm": Field((), _only(False)),
    "use_parallel_residual": Field(("use_parallel_residual",), _only(False)),
    "decoder_start_token_id": Field(("decoder_start_token_id",), _any),
    "expert_count": Field(("num_experts", "num_local_experts")),
    "expert_used_count": Field(("num_experts_per_tok",)),
    "expert_feed_forward_length": Field(
        ("moe_intermediate_size",), lambda value, config: value == config.intermediate_size
    ),
    "expert_shared_feed_forward_length": Field(("shared_expert_intermediate_size",)),
    "expert_shared_count": Field(("n_shared_experts",)),
    "expert_weights_norm": Field(
        ("norm_topk_prob",), _only(False), used=lambda config: config.model_type != "deepseek_v2"
    ),
    "expert_weights_scale": Field(("routed_scaling_factor",), _only(0, 1)),
    "expert_gating_func": Field((), lambda value, config: value in (0, GATES.get(config.model_type, 1))),
    "expert_group_count": Field(("n_group",), _only(0, 1)),
    "expert_group_used_count": Field(("topk_group",), _only(0, 1)),
    "leading_dense_block_count": Field(("first_k_dense_replace",)),
    "interleave_moe_layer_step": Field(("interleave_moe_layer_step",), _only(0, 1)),
    "moe_every_n_layers": Field((), _only(0, 1)),
    "nextn_predict_layers": Field(),
    "rope.dimension_sections": Field(),
    "rope.scaling.yarn_attn_factor": Field((), _only(1)),
    # fields that do not affect the logits of llama.cpp
    "tensor_data_layout": Field((), _any),
    "pooling_type": Field((), _any),
    "classifier.output_labels": Field((), _any),
}
# Fields that transformers converts by an architecture's own rules; that of stablelm follows from its tensors.
BY_TRANSFORMERS = {
    "stablelm": ("use_parallel_residual",),
    "lfm2": ("attention.head_count_kv", "shortconv.l_cache"),
    "mamba": ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"),
    "minimax-m2": ("expert_gating_func",),
    **dict.fromkeys(
        ("qwen35", "qwen35moe"),
        (
            *("block_count", "nextn_predict_layers", "full_attention_interval", "rope.dimension_sections"),
            *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
        ),
    ),
}
# Attributes for biases of projections, which no field gives: whether a tensor has a name that ends so.
BIASES = {
    "attention_bias": ("attn_q.bias", "attn_qkv.bias"),
    "use_qkv_bias": ("attn_q.bias",),
    "qkv_bias": ("attn_q.bias",),
    "mlp_bias": ("ffn_up.bias",),
    "use_bias": ("attn_q.bias",),
    "bias": ("attn_qkv.bias",),
}


def class_fields(config: PretrainedConfig) -> set[str]:
    """Return the attribute names of a configuration's class; an object may have others, which no model reads."""
    return {*type(config).__dataclass_fields__, *config.attribute_map}


def _known_to_llama_cpp(keys: type = gguf.Keys) -> Iterator[str]:
    """Yield the fields of an architecture, without its name, that the package gguf lists."""
    for value in vars(keys).values():
        if isinstance(value, type):
            yield from _known_to_llama_cpp(value)
        elif isinstance(value, str) and value.startswith("{arch}."):
            yield value.removeprefix("{arch}.")


def with_one_value(header: GGUFHeader) -> GGUFHeader:
    """Replace per-layer lists of equal values in a header by the value; refuse a list with different values."""
    kept = BY_TRANSFORMERS.get(header.architecture, ())
    fields = dict(header.fields)
    for key in FIELDS:
        value = header.of_model(key)
        if isinstance(value, list) and value and key not in kept and FIELDS[key].attributes != ("layer_types",):
            if value.count(value[0]) < len(value):
                name = f"{header.architecture}.{key}"
                raise UserError(
                    f"'{header.file.path}' says {name} {shown(value)}, and transformers computes {header.architecture} "
                    "with one for all layers; use safetensors"
                )
            fields[f"{header.architecture}.{key}"] = value[0]
    return header._replace(fields=fields)


def set_fields(config: PretrainedConfig, header: GGUFHeader, file: Path) -> list[str]:
    """Set a configuration's attributes from the fields of a header; return the names of fields that neither this
    function nor llama.cpp knows.

    Raises:
        UserError: a field has a value that a model of the configuration does not compute with, or one is missing.
    """
    prefix, own = f"{header.architecture}.", class_fields(config)
    known, settled = set(_known_to_llama_cpp()), (*ROTARY, *BY_TRANSFORMERS.get(header.architecture, ()))
    _check_required(config, header, file)
    if "head_dim" in own and header.of_model("attention.key_length") is None:
        config.head_dim = config.hidden_size // config.num_attention_heads
    for key in FIELDS:
        value = header.of_model(key)
        absent = value is None or (key in SCALES and value == 0)
        if not absent and key not in settled and not _set(config, FIELDS[key], value, own):
            raise _unsupported_field(file, prefix + key, value, config)
    for attribute in BIASES.keys() & own:
        setattr(config, attribute, any(tensor.name.endswith(BIASES[attribute]) for tensor in header.tensors))
    unknown = []
    for name in header.fields:
        key = name.removeprefix(prefix)
        if name.startswith(OTHER_NAMESPACES) or (name.startswith(prefix) and key in known - {*FIELDS, *settled}):
            raise _unsupported_field(file, name, header.fields[name], config)
        if name.startswith(prefix) and key not in {*known, *FIELDS, *settled}:
            unknown.append(name)
    return unknown


def _check_required(config: PretrainedConfig, header: GGUFHeader, file: Path) -> None:
    """Raise UserError if a field is missing for which transformers would assume a value."""
    needed = [("embedding_length",), ("attention.head_count",)] if hasattr(config, "num_attention_heads") else []
    needed += [tuple(key for key, field in FIELDS.items() if field.attributes is EPSILON)]
    for keys in needed:
        if all(header.of_model(key) is None for key in keys):
            raise UserError(f"'{file}' is incomplete: it has no field {header.architecture}.{keys[-1]}; get it again")


def _set(config: PretrainedConfig, field: Field, value, own: set[str]) -> bool:
    """Set an attribute of a configuration from a field; return False if a model cannot compute with the value."""
    attribute = next((name for name in field.attributes if name in own), None)
    if attribute is None or not field.used(config):
        return field.harmless(value, config)
    made = field.made(value, config)
    if getattr(config, attribute) != made:
        setattr(config, attribute, made)
    return True


def _unsupported_field(file: Path, name: str, value, config: PretrainedConfig) -> UserError:
    return UserError(
        f"'{file}' says {name} {shown(value)}, and {config.model_type} as transformers computes it has no place for "
        "it; use safetensors"
    )
