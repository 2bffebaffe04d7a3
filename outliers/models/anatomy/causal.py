"""Causal language models."""

from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, Cache
from transformers.cache_utils import DynamicLayer

from outliers.models.anatomy.examples import IGNORED, Block, Example, labelled
from outliers.models.anatomy.family import Family
from outliers.models.anatomy.row import Anatomy, one_norm, two_norms

_SELF_ATTN_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_FAIRSEQ = Anatomy(
    layers="model.layers",
    attention="self_attn",
    norms=two_norms("self_attn_layer_norm", "final_layer_norm"),
    attn_in=_SELF_ATTN_QKV,
    attn_out=("self_attn.out_proj",),
    ffn_in=("fc1",),
    ffn_out=("fc2",),
    positions="model.embed_positions",
)
_LLAMA = Anatomy(
    layers="model.layers",
    attention="self_attn",
    norms=two_norms("input_layernorm", "post_attention_layernorm"),
    attn_in=_SELF_ATTN_QKV,
    attn_out=("self_attn.o_proj",),
    ffn_in=("mlp.gate_proj", "mlp.up_proj"),
    ffn_out=("mlp.down_proj",),
)
_BEHIND = {"post_attention_layernorm": "attn_out", "post_feedforward_layernorm": "ffn_out"}
_GEMMA = replace(
    _LLAMA,
    norms=two_norms("input_layernorm", "pre_feedforward_layernorm"),
    norms_behind=_BEHIND,
    norm_offset=1.0,
)
_BLOOM = Anatomy(
    layers="transformer.h",
    attention="self_attention",
    norms=two_norms("input_layernorm", "post_attention_layernorm"),
    attn_in=("self_attention.query_key_value",),
    attn_out=("self_attention.dense",),
    ffn_in=("mlp.dense_h_to_4h",),
    ffn_out=("mlp.dense_4h_to_h",),
    by_head=True,
)
_FALCON = replace(_BLOOM, alibi="alibi")

_ROWS = {
    "gpt2": Anatomy(
        layers="transformer.h",
        attention="attn",
        norms=two_norms("ln_1", "ln_2"),
        attn_in=("attn.c_attn",),
        attn_out=("attn.c_proj",),
        ffn_in=("mlp.c_fc",),
        ffn_out=("mlp.c_proj",),
        positions="transformer.wpe",
    ),
    "gptj": Anatomy(
        layers="transformer.h",
        attention="attn",
        norms=one_norm("ln_1"),
        attn_in=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        attn_out=("attn.out_proj",),
        ffn_in=("mlp.fc_in",),
        ffn_out=("mlp.fc_out",),
    ),
    "gpt_neo": Anatomy(
        layers="transformer.h",
        attention="attn.attention",
        norms=two_norms("ln_1", "ln_2"),
        attn_in=("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj"),
        attn_out=("attn.attention.out_proj",),
        ffn_in=("mlp.c_fc",),
        ffn_out=("mlp.c_proj",),
        positions="transformer.wpe",
        window="bias",
    ),
    "gpt_neox": replace(
        _BLOOM,
        layers="gpt_neox.layers",
        attention="attention",
        attn_in=("attention.query_key_value",),
        attn_out=("attention.dense",),
    ),
    "bloom": replace(_BLOOM, embedding_norm="transformer.word_embeddings_layernorm"),
    "opt": replace(
        _FAIRSEQ, module="model.decoder", layers="model.decoder.layers", positions="model.decoder.embed_positions"
    ),
    "xglm": _FAIRSEQ,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "smollm3": _LLAMA,
    "granite": replace(_LLAMA, residual_scale="residual_multiplier"),
    "olmo2": replace(_LLAMA, norms={}, norms_behind=_BEHIND),
    "phi3": replace(_LLAMA, attn_in=("self_attn.qkv_proj",), ffn_in=("mlp.gate_up_proj",), fused_gate=True),
    "stablelm": replace(_LLAMA, others=(replace(_LLAMA, norms=one_norm("input_layernorm")),)),
    "starcoder2": replace(_LLAMA, ffn_in=("mlp.c_fc",), ffn_out=("mlp.c_proj",)),
    "gemma": replace(_LLAMA, norm_offset=1.0),
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "falcon": replace(
        _FALCON,
        others=(
            replace(_FALCON, norms=two_norms("ln_attn", "ln_mlp")),
            replace(_FALCON, norms=one_norm("input_layernorm")),
        ),
    ),
    "mpt": Anatomy(
        layers="transformer.blocks",
        attention="attn",
        norms=two_norms("norm_1", "norm_2"),
        attn_in=("attn.Wqkv",),
        attn_out=("attn.out_proj",),
        ffn_in=("ffn.up_proj",),
        ffn_out=("ffn.down_proj",),
    ),
}


class NothingBefore(Cache):
    """No keys and values of earlier positions, and none are kept. Without a cache transformers looks whether positions
    begin anew, for which the host would wait for the GPU."""

    def __init__(self):
        super().__init__(layers=[DynamicLayer()])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_arguments, **_keywords) -> tuple:
        """The states themselves."""
        return key_states, value_states


def _predicted(block: Block, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Every position predicts the next one; of an example those that have a label."""
    return labelled(block, states) if isinstance(block, Example) else (states[:-1], block[1:])


def _places(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(block, Example):
        return block.ids, 1 + (block.labels != IGNORED).nonzero()[:, 0]
    return block, torch.arange(1, len(block))


CAUSAL = Family(
    "causal",
    _ROWS,
    AutoModelForCausalLM,
    _predicted,
    keywords={"use_cache": False},
    cache=NothingBefore(),
    places=_places,
)
