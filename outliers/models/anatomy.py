"""What the parts of each architecture are called; the only place that knows architecture names."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from outliers.errors import unknown_name


@dataclass(frozen=True)
class Anatomy:
    """Where the decoder layers are, and the projections of one layer by the role of their input.

    attn_in: the q/k/v projection, fused or not. attn_out: the attention output projection. ffn_in: the first
    feed-forward projection, gate included. ffn_out: the second feed-forward projection.
    """

    layers: str
    attn_in: tuple[str, ...]
    attn_out: tuple[str, ...]
    ffn_in: tuple[str, ...]
    ffn_out: tuple[str, ...]


ROLES = ("attn_in", "attn_out", "ffn_in", "ffn_out")

_SELF_ATTN_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FAIRSEQ = Anatomy("model.layers", _SELF_ATTN_QKV, ("self_attn.out_proj",), ("fc1",), ("fc2",))
_LLAMA = Anatomy(
    "model.layers", _SELF_ATTN_QKV, ("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",)
)

ANATOMIES = {
    "gpt2": Anatomy("transformer.h", ("attn.c_attn",), ("attn.c_proj",), ("mlp.c_fc",), ("mlp.c_proj",)),
    "gptj": Anatomy(
        "transformer.h",
        ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        ("attn.out_proj",),
        ("mlp.fc_in",),
        ("mlp.fc_out",),
    ),
    "gpt_neo": Anatomy(
        "transformer.h",
        ("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        ("attn.attention.out_proj",),
        ("mlp.c_fc",),
        ("mlp.c_proj",),
    ),
    "gpt_neox": Anatomy(
        "gpt_neox.layers",
        ("attention.query_key_value",),
        ("attention.dense",),
        ("mlp.dense_h_to_4h",),
        ("mlp.dense_4h_to_h",),
    ),
    "bloom": Anatomy(
        "transformer.h",
        ("self_attention.query_key_value",),
        ("self_attention.dense",),
        ("mlp.dense_h_to_4h",),
        ("mlp.dense_4h_to_h",),
    ),
    "opt": Anatomy("model.decoder.layers", _FAIRSEQ.attn_in, _FAIRSEQ.attn_out, _FAIRSEQ.ffn_in, _FAIRSEQ.ffn_out),
    "xglm": _FAIRSEQ,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


class Projection(NamedTuple):
    """One linear projection of a decoder layer: `path` is its name in the model, `module` a `Linear` or `Conv1D`."""

    layer: int
    role: str
    path: str
    module: nn.Module


def anatomy_of(config: PretrainedConfig) -> Anatomy:
    """The anatomy of a model by its configuration.

    Raises:
        UserError: the architecture is in no row of the table.
    """
    if config.model_type not in ANATOMIES:
        raise unknown_name("architecture", config.model_type, ANATOMIES)
    return ANATOMIES[config.model_type]


def projections(model: PreTrainedModel) -> Iterator[Projection]:
    """Every linear projection of the decoder layers, layer by layer in the order of `ROLES`."""
    anatomy = anatomy_of(model.config)
    for layer, block in enumerate(model.get_submodule(anatomy.layers)):
        for role in ROLES:
            for name in getattr(anatomy, role):
                yield Projection(layer, role, f"{anatomy.layers}.{layer}.{name}", block.get_submodule(name))


def context_length(config: PretrainedConfig) -> int | None:
    """The longest block that the model takes, in tokens; None where positions are unbounded (ALiBi)."""
    return getattr(config, "max_position_embeddings", None)
