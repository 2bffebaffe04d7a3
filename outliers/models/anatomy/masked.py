"""Masked language models."""

from dataclasses import replace

import torch
from transformers import AutoModelForMaskedLM

from outliers.models.anatomy.examples import IGNORED, Example, labelled
from outliers.models.anatomy.family import Family
from outliers.models.anatomy.row import Anatomy, two_norms

_BERT = Anatomy(
    bidirectional=True,
    norms_of_sums=("attention.output.LayerNorm", "output.LayerNorm"),
    layers="bert.encoder.layer",
    attention="attention.self",
    norms={},
    attn_in=("attention.self.query", "attention.self.key", "attention.self.value"),
    attn_out=("attention.output.dense",),
    ffn_in=("intermediate.dense",),
    ffn_out=("output.dense",),
    positions="bert.embeddings.position_embeddings",
)

_ROBERTA = replace(
    _BERT,
    layers="roberta.encoder.layer",
    positions="roberta.embeddings.position_embeddings",
    padded_positions=True,
)
_ROWS = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "electra": replace(
        _BERT,
        layers="electra.encoder.layer",
        positions="electra.embeddings.position_embeddings",
    ),
    "distilbert": replace(
        _BERT,
        layers="distilbert.transformer.layer",
        norms_of_sums=("sa_layer_norm", "output_layer_norm"),
        attention="attention",
        attn_in=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        attn_out=("attention.out_lin",),
        ffn_in=("ffn.lin1",),
        ffn_out=("ffn.lin2",),
        positions="distilbert.embeddings.position_embeddings",
    ),
    "modernbert": Anatomy(
        bidirectional=True,
        layers="model.layers",
        attention="attn",
        norms=two_norms("attn_norm", "mlp_norm"),
        attn_in=("attn.Wqkv",),
        attn_out=("attn.Wo",),
        ffn_in=("mlp.Wi",),
        ffn_out=("mlp.Wo",),
        fused_gate=True,
    ),
}


def _unmasked(block: Example) -> tuple[torch.Tensor, torch.Tensor]:
    """The text without masks, and where these were."""
    masked = block.labels != IGNORED
    return torch.where(masked, block.labels, block.ids), masked.nonzero()[:, 0]


MASKED = Family("masked", _ROWS, AutoModelForMaskedLM, labelled, places=_unmasked)
