"""What the parts of each architecture are called; the only place that knows architecture names."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from outliers.errors import UserError, unknown_name


@dataclass(frozen=True)
class Anatomy:
    """Where the decoder layers are, and the parts of one layer; projections by the role of their input.

    attention: the module that returns the attention probabilities. norms: each norm, and the roles whose projections
    read its output. attn_in: the q/k/v projection, fused or not. attn_out: the attention output projection. ffn_in: the
    first feed-forward projection, gate included. ffn_out: the second feed-forward projection.
    """

    layers: str
    attention: str
    norms: dict[str, tuple[str, ...]]
    attn_in: tuple[str, ...]
    attn_out: tuple[str, ...]
    ffn_in: tuple[str, ...]
    ffn_out: tuple[str, ...]


ROLES = ("attn_in", "attn_out", "ffn_in", "ffn_out")


def _two_norms(attention: str, feed_forward: str) -> dict[str, tuple[str, ...]]:
    return {attention: ("attn_in",), feed_forward: ("ffn_in",)}


_SELF_ATTN_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FAIRSEQ = Anatomy(
    layers="model.layers",
    attention="self_attn",
    norms=_two_norms("self_attn_layer_norm", "final_layer_norm"),
    attn_in=_SELF_ATTN_QKV,
    attn_out=("self_attn.out_proj",),
    ffn_in=("fc1",),
    ffn_out=("fc2",),
)
_LLAMA = Anatomy(
    layers="model.layers",
    attention="self_attn",
    norms=_two_norms("input_layernorm", "post_attention_layernorm"),
    attn_in=_SELF_ATTN_QKV,
    attn_out=("self_attn.o_proj",),
    ffn_in=("mlp.gate_proj", "mlp.up_proj"),
    ffn_out=("mlp.down_proj",),
)
_BLOOM = Anatomy(
    layers="transformer.h",
    attention="self_attention",
    norms=_two_norms("input_layernorm", "post_attention_layernorm"),
    attn_in=("self_attention.query_key_value",),
    attn_out=("self_attention.dense",),
    ffn_in=("mlp.dense_h_to_4h",),
    ffn_out=("mlp.dense_4h_to_h",),
)

ANATOMIES = {
    "gpt2": Anatomy(
        layers="transformer.h",
        attention="attn",
        norms=_two_norms("ln_1", "ln_2"),
        attn_in=("attn.c_attn",),
        attn_out=("attn.c_proj",),
        ffn_in=("mlp.c_fc",),
        ffn_out=("mlp.c_proj",),
    ),
    "gptj": Anatomy(
        layers="transformer.h",
        attention="attn",
        norms={"ln_1": ("attn_in", "ffn_in")},
        attn_in=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        attn_out=("attn.out_proj",),
        ffn_in=("mlp.fc_in",),
        ffn_out=("mlp.fc_out",),
    ),
    "gpt_neo": Anatomy(
        layers="transformer.h",
        attention="attn.attention",
        norms=_two_norms("ln_1", "ln_2"),
        attn_in=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        attn_out=("attn.attention.out_proj",),
        ffn_in=("mlp.c_fc",),
        ffn_out=("mlp.c_proj",),
    ),
    "gpt_neox": replace(
        _BLOOM,
        layers="gpt_neox.layers",
        attention="attention",
        attn_in=("attention.query_key_value",),
        attn_out=("attention.dense",),
    ),
    "bloom": _BLOOM,
    "opt": replace(_FAIRSEQ, layers="model.decoder.layers"),
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


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder layers, in their order."""
    return model.get_submodule(anatomy_of(model.config).layers)


def projections(model: PreTrainedModel) -> Iterator[Projection]:
    """Every linear projection of the decoder layers, layer by layer in the order of `ROLES`."""
    anatomy = anatomy_of(model.config)
    for layer, block in enumerate(decoder_layers(model)):
        for role in ROLES:
            for name in getattr(anatomy, role):
                yield Projection(layer, role, f"{anatomy.layers}.{layer}.{name}", block.get_submodule(name))


def context_length(config: PretrainedConfig) -> int | None:
    """The longest block that the model takes, in tokens; None where positions are unbounded (ALiBi)."""
    return getattr(config, "max_position_embeddings", None)


def check_block(config, block: int, largest_id: int = 0) -> None:
    """Raise UserError if a block of so many tokens does not fit a model's context, or its ids not the vocabulary."""
    limit = context_length(config)
    if limit is not None and block > limit:
        raise UserError(f"blocks of {block} tokens are longer than the model's context of {limit}; use --block {limit}")
    if largest_id >= config.vocab_size:
        raise UserError(
            f"token id {largest_id} is outside the model's vocabulary of {config.vocab_size}; the text was "
            "tokenised by another model's tokenizer"
        )


def check_features(features: Iterable[int], width: int) -> list[int]:
    """The features in ascending order; raise UserError if there is none, or one is no feature of so many."""
    features = sorted(set(features))
    if not features:
        raise UserError(f"the list of features is empty; expected some of 0 to {width - 1}")
    if features[0] < 0 or features[-1] >= width:
        wrong = features[0] if features[0] < 0 else features[-1]
        raise UserError(f"feature {wrong} is out of range; the model's hidden states have features 0 to {width - 1}")
    return features


def norms_are_in_the_residual_stream(config: PretrainedConfig) -> bool:
    """Whether the output of a norm is itself added to what the sub-layer computes (OPT-350m, a variant of BLOOM)."""
    return not getattr(config, "do_layer_norm_before", True) or getattr(
        config, "apply_residual_connection_post_layernorm", False
    )
