"""The model with which a recipe starts."""

import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPTJConfig, OPTConfig, PretrainedConfig, PreTrainedModel

from outliers.models.load import load_model
from outliers.models.pocket.ladder import CONTEXT, LADDER, VOCABULARY, Rung
from outliers.specification.recipe import Recipe
from outliers.training.architectures import change
from outliers.training.layers import train_int8


def build_config(rung: Rung) -> PretrainedConfig:
    """The transformers configuration of one rung; no dropout, embeddings tied to the head."""
    architecture, width, layers, heads = rung[:4]
    ends = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": True, "vocab_size": VOCABULARY}
    if architecture == "opt":
        dropouts = {"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0, "pad_token_id": None}
        shape = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
        widths = {"ffn_dim": 4 * width, "word_embed_proj_dim": width, "max_position_embeddings": CONTEXT}
        return OPTConfig(**shape, **widths, **dropouts, **ends)
    shape = {"n_embd": width, "n_layer": layers, "n_head": heads, "n_positions": CONTEXT}
    dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    if architecture == "gptj":
        return GPTJConfig(rotary_dim=width // heads // 2, **shape, **dropouts, **ends)
    return GPT2Config(**shape, **dropouts, **ends)


def start(recipe: Recipe, seed: int, device: str = "cpu") -> PreTrainedModel:
    """The model of a recipe before its first step, in float32 with the architecture and the products that it says.

    Raises:
        UserError: the model that is trained further is unknown; another architecture than GPT-2 is to be changed; or
            as `train_int8`.
    """
    if recipe.from_nothing:
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(build_config(LADDER[recipe.start])).to(device)
    else:
        model = load_model(recipe.start, device=device)
    change(model, recipe.attention, recipe.gated, recipe.positions, recipe.norm)
    return in_int8(model, recipe) if recipe.int8 else model


def in_int8(model: PreTrainedModel, recipe: Recipe) -> PreTrainedModel:
    """The same model, whose products are those of a recipe from now on."""
    parts = {part: part in recipe.int8 for part in ("ffn", "linear", "attention")}
    return train_int8(model, **parts, **recipe.model_dump(include={"decomposition", "outlier_threshold", "stochastic"}))
