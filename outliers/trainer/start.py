"""The initial model of a recipe."""

import torch
from transformers import GPT2Config, GPTJConfig, MixtralConfig, OPTConfig, PretrainedConfig, PreTrainedModel

from outliers.config.recipe import Recipe
from outliers.models.anatomy import family_of
from outliers.models.load import load_model
from outliers.models.pocket.ladder import CONTEXT, LADDER, VOCABULARY, Rung
from outliers.trainer.architectures import modify_gpt2
from outliers.trainer.layers import train_int8


def build_config(rung: Rung) -> PretrainedConfig:
    """Return the transformers configuration of a rung, without dropout and with embeddings tied to the head."""
    return CONFIGS[rung.architecture](rung)


ENDS = {"bos_token_id": 0, "eos_token_id": 0}
TIED = {"tie_word_embeddings": True, "vocab_size": VOCABULARY}


def _gpt2(rung: Rung, kind: type = GPT2Config, **more) -> PretrainedConfig:
    shape = {"n_embd": rung.width, "n_layer": rung.layers, "n_head": rung.heads, "n_positions": CONTEXT}
    return kind(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shape, **ENDS, **TIED, **more)


def _gptj(rung: Rung) -> PretrainedConfig:
    return _gpt2(rung, GPTJConfig, rotary_dim=rung.width // rung.heads // 2)


def size_fields(rung: Rung) -> dict:
    """Return the configuration fields that define the size of most architectures."""
    return {"hidden_size": rung.width, "num_hidden_layers": rung.layers, "num_attention_heads": rung.heads}


def _opt(rung: Rung) -> PretrainedConfig:
    dropouts = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0, "pad_token_id": None}
    widths = {"ffn_dim": 4 * rung.width, "word_embed_proj_dim": rung.width, "max_position_embeddings": CONTEXT}
    return OPTConfig(**size_fields(rung), **widths, **dropouts, **ENDS, **TIED)


def _mixtral(rung: Rung) -> PretrainedConfig:
    """Return a mixture whose experts are as wide as the model, two of eight for each token."""
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": rung.width}
    # with the usual 0.02 a narrow model learns little in as few steps
    more = {"num_key_value_heads": rung.heads, "initializer_range": rung.width**-0.5}
    return MixtralConfig(**size_fields(rung), **experts, **more, max_position_embeddings=CONTEXT, **ENDS, **TIED)


CONFIGS = {"gpt2": _gpt2, "gptj": _gptj, "opt": _opt, "mixtral": _mixtral}


def initial_model(recipe: Recipe, seed: int, device: str = "cpu") -> PreTrainedModel:
    """Return the model of a recipe before its first step, in float32 with the recipe's architecture, and with int8
    products if it asks for them.

    Raises:
        UserError: the model to train further is unknown; an architecture other than GPT-2 would be changed; or as
            `train_int8`.
    """
    if recipe.from_nothing:
        torch.manual_seed(seed)
        config = build_config(LADDER[recipe.start])
        model = family_of(config).made_by.from_config(config).to(device)
    else:
        model = load_model(recipe.start, device=device)
    modify_gpt2(model, recipe.attention, recipe.gated, recipe.positions, recipe.norm)
    return set_int8(model, recipe) if recipe.int8 else model


def set_int8(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """Put the products of a model into int8 as its recipe says, in place, and return it."""
    parts = {part: part in recipe.int8 for part in ("ffn", "linear", "attention")}
    return train_int8(model, **parts, **recipe.model_dump(include={"decomposition", "outlier_threshold", "stochastic"}))
