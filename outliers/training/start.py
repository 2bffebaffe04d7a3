"""The model with which a recipe starts."""

import torch
from transformers import (
    BertConfig,
    GPT2Config,
    GPTJConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    ViTConfig,
)

from outliers.models.anatomy import anatomy_of, family_of
from outliers.models.load import load_model
from outliers.models.pocket.ladder import CONTEXT, LADDER, VOCABULARY, Rung
from outliers.specification.recipe import Recipe
from outliers.text.digits import CLASSES, SIDE
from outliers.training.architectures import change
from outliers.training.layers import train_int8


def build_config(rung: Rung) -> PretrainedConfig:
    """The transformers configuration of one rung; no dropout, embeddings tied to the head."""
    return CONFIGS[rung.architecture](rung)


ENDS = {"bos_token_id": 0, "eos_token_id": 0}
TIED = {"tie_word_embeddings": True, "vocab_size": VOCABULARY}


def _gpt2(rung: Rung, kind: type = GPT2Config, **more) -> PretrainedConfig:
    shape = {"n_embd": rung.width, "n_layer": rung.layers, "n_head": rung.heads, "n_positions": CONTEXT}
    return kind(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shape, **ENDS, **TIED, **more)


def _gptj(rung: Rung) -> PretrainedConfig:
    return _gpt2(rung, GPTJConfig, rotary_dim=rung.width // rung.heads // 2)


def _shape(rung: Rung) -> dict:
    return {"hidden_size": rung.width, "num_hidden_layers": rung.layers, "num_attention_heads": rung.heads}


def _opt(rung: Rung) -> PretrainedConfig:
    dropouts = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0, "pad_token_id": None}
    widths = {"ffn_dim": 4 * rung.width, "word_embed_proj_dim": rung.width, "max_position_embeddings": CONTEXT}
    return OPTConfig(**_shape(rung), **widths, **dropouts, **ENDS, **TIED)


def _t5(rung: Rung) -> PretrainedConfig:
    """The first T5, as the paper and its blog post measure it: ReLU, and embeddings that are the head."""
    shape = {"d_model": rung.width, "num_layers": rung.layers, "num_heads": rung.heads, "d_ff": 4 * rung.width}
    return T5Config(**shape, d_kv=rung.width // rung.heads, dropout_rate=0.0, decoder_start_token_id=0, **TIED)


def _encoder(rung: Rung) -> dict:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {
        **_shape(rung),
        **dropouts,
        "intermediate_size": 4 * rung.width,
        "initializer_range": rung.width**-0.5,  # with the usual 0.02 narrow models attend evenly for most of a training
    }


def _bert(rung: Rung) -> PretrainedConfig:
    return BertConfig(**_encoder(rung), max_position_embeddings=CONTEXT, **TIED)


def _vit(rung: Rung) -> PretrainedConfig:
    names = {number: str(number) for number in range(CLASSES)}
    return ViTConfig(
        **_encoder(rung),
        image_size=SIDE,
        patch_size=2,
        id2label=names,
        label2id={name: number for number, name in names.items()},
    )


CONFIGS = {"gpt2": _gpt2, "gptj": _gptj, "opt": _opt, "t5": _t5, "bert": _bert, "vit": _vit}


def start(recipe: Recipe, seed: int, device: str = "cpu") -> PreTrainedModel:
    """The model of a recipe before its first step, in float32 with the architecture and the products that it says.

    Raises:
        UserError: the model that is trained further is unknown; another architecture than GPT-2 is to be changed; or
            as `train_int8`.
    """
    if recipe.from_nothing:
        torch.manual_seed(seed)
        rung = LADDER[recipe.start]
        config = build_config(rung)
        model = family_of(config).made_by.from_config(config).to(device)
        _begin(model, rung)
    else:
        model = load_model(recipe.start, device=device)
    change(model, recipe.attention, recipe.gated, recipe.positions, recipe.norm)
    return in_int8(model, recipe) if recipe.int8 else model


@torch.no_grad()
def _begin(model: PreTrainedModel, rung: Rung) -> None:
    """Change the first embeddings of a model that was just built, where its rung says so."""
    if rung.embedding != 1:
        model.get_input_embeddings().weight.mul_(rung.embedding)
    if rung.sinusoids:  # Vaswani et al., 2017, section 3.5
        weight = model.get_submodule(anatomy_of(model.config).positions).weight
        count, features = weight.shape
        angles = torch.arange(count)[:, None] * 10_000.0 ** (-torch.arange(0, features, 2) / features)
        weight.copy_(rung.sinusoids * torch.stack([angles.sin(), angles.cos()], -1).flatten(1))


def in_int8(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """The same model, whose products are those of a recipe from now on."""
    parts = {part: part in recipe.int8 for part in ("ffn", "linear", "attention")}
    return train_int8(model, **parts, **recipe.model_dump(include={"decomposition", "outlier_threshold", "stochastic"}))
