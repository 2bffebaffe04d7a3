"""Encoder-decoders: two stacks, of which the second reads what the first puts out."""

from dataclasses import replace

import torch
from transformers import AutoModelForSeq2SeqLM, PreTrainedModel

from outliers.models.anatomy.examples import IGNORED, Example, labelled
from outliers.models.anatomy.family import Family
from outliers.models.anatomy.row import Anatomy, Norms, two_norms


def _three_norms(attention: str, cross_attention: str, feed_forward: str) -> Norms:
    return two_norms(attention, feed_forward) | {cross_attention: ("cross_in",)}


def _names(*suffixes: str, of: str) -> tuple[str, ...]:
    return tuple(f"{of}.{suffix}" for suffix in suffixes)


_T5_FEED_FORWARD = "layer.1.DenseReluDense"
_T5_ENCODER = Anatomy(
    bidirectional=True,
    stack="encoder",
    module="encoder",
    layers="encoder.block",
    attention="layer.0.SelfAttention",
    norms=two_norms("layer.0.layer_norm", "layer.1.layer_norm"),
    attn_in=_names("q", "k", "v", of="layer.0.SelfAttention"),
    attn_out=("layer.0.SelfAttention.o",),
    ffn_in=_names("wi", of=_T5_FEED_FORWARD),
    ffn_out=_names("wo", of=_T5_FEED_FORWARD),
)
_T5_DECODER = replace(
    _T5_ENCODER,
    bidirectional=False,
    stack="decoder",
    module="decoder",
    layers="decoder.block",
    norms=_three_norms("layer.0.layer_norm", "layer.1.layer_norm", "layer.2.layer_norm"),
    cross_attention="layer.1.EncDecAttention",
    cross_in=("layer.1.EncDecAttention.q",),
    cross_kv=_names("k", "v", of="layer.1.EncDecAttention"),
    cross_out=("layer.1.EncDecAttention.o",),
    ffn_in=("layer.2.DenseReluDense.wi",),
    ffn_out=("layer.2.DenseReluDense.wo",),
)


def _t5(gates: tuple[str, ...] = ("wi_0", "wi_1"), **changes) -> Anatomy:
    """T5 with and without a gate, which layers of either stack have or have not."""
    encoder, decoder = (replace(stack, **changes) for stack in (_T5_ENCODER, _T5_DECODER))
    feed_forwards = [(stack, stack.ffn_out[0].removesuffix(".wo")) for stack in (encoder, decoder)]
    gated = [replace(stack, ffn_in=_names(*gates, of=path)) for stack, path in feed_forwards]
    return replace(encoder, others=(gated[0],), decoder=replace(decoder, others=(gated[1],)))


def _fairseq(norms_of_sums: bool, **changes) -> Anatomy:
    """BART and its kin; norms_of_sums: whether norms come behind the sub-layers; changes: of both stacks."""
    norms = two_norms("self_attn_layer_norm", "final_layer_norm")
    encoder = Anatomy(
        bidirectional=True,
        stack="encoder",
        module="model.encoder",
        layers="model.encoder.layers",
        attention="self_attn",
        norms={} if norms_of_sums else norms,
        norms_of_sums=tuple(norms) if norms_of_sums else (),
        attn_in=_names("q_proj", "k_proj", "v_proj", of="self_attn"),
        attn_out=("self_attn.out_proj",),
        ffn_in=("fc1",),
        ffn_out=("fc2",),
        positions="model.encoder.embed_positions",
    )
    encoder = replace(encoder, **changes)
    norms = _three_norms("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
    decoder = replace(
        encoder,
        bidirectional=False,
        stack="decoder",
        module="model.decoder",
        layers="model.decoder.layers",
        norms={} if norms_of_sums else norms,
        norms_of_sums=("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm") if norms_of_sums else (),
        cross_attention="encoder_attn",
        cross_in=("encoder_attn.q_proj",),
        cross_kv=_names("k_proj", "v_proj", of="encoder_attn"),
        cross_out=("encoder_attn.out_proj",),
        positions="model.decoder.embed_positions",
    )
    return replace(encoder, decoder=decoder)


_BEHIND = {"post_self_attn_layernorm": "attn_out", "post_feedforward_layernorm": "ffn_out"}
_T5GEMMA = _fairseq(
    False,
    attn_out=("self_attn.o_proj",),
    ffn_in=_names("gate_proj", "up_proj", of="mlp"),
    ffn_out=("mlp.down_proj",),
    norm_offset=1.0,
)

_ROWS = {
    "t5": _t5(),
    "mt5": _t5(),
    "umt5": _t5(),
    "bart": _fairseq(True),
    "mbart": _fairseq(False),
    "marian": _fairseq(True),
    "pegasus": _fairseq(False),
    "t5gemma": replace(
        _T5GEMMA,
        norms=two_norms("pre_self_attn_layernorm", "pre_feedforward_layernorm"),
        norms_behind=_BEHIND,
        positions=None,
        config="encoder",
        decoder=replace(
            _T5GEMMA.decoder,
            norms=_three_norms("pre_self_attn_layernorm", "pre_cross_attn_layernorm", "pre_feedforward_layernorm"),
            norms_behind=_BEHIND | {"post_cross_attn_layernorm": "cross_out"},
            cross_attention="cross_attn",
            cross_in=("cross_attn.q_proj",),
            cross_kv=_names("k_proj", "v_proj", of="cross_attn"),
            cross_out=("cross_attn.o_proj",),
            positions=None,
            config="decoder",
        ),
    ),
}


def _shifted(model: PreTrainedModel, block: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """The encoder's input; and for the decoder its labels one position later, behind a first token."""
    return block.ids, model.prepare_decoder_input_ids_from_labels(labels=block.labels[None])[0]


SEQ2SEQ = Family(
    "seq2seq",
    _ROWS,
    AutoModelForSeq2SeqLM,
    labelled,
    _shifted,
    {"use_cache": False},
    places=lambda block: (block.labels, (block.labels != IGNORED).nonzero()[:, 0]),  # all targets
)
