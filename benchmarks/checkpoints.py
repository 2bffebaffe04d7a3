"""Checkpoints of random weights in the shapes of real models, with a tokenizer of the pocket family."""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outliers.models.load import load_tokenizer

OPT = {"model_type": "opt", "num_hidden_layers": 24, "vocab_size": 50272}
SHAPES = {
    "gpt2-124m": {"model_type": "gpt2"},
    "opt-350m": OPT | {"hidden_size": 1024, "ffn_dim": 4096, "num_attention_heads": 16, "word_embed_proj_dim": 1024},
    "llama-640m": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5504,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "vocab_size": 16000,
        "tie_word_embeddings": True,
    },
    "opt-1.3b": OPT | {"hidden_size": 2048, "ffn_dim": 8192, "num_attention_heads": 32, "word_embed_proj_dim": 2048},
}


def checkpoint(name: str, work: Path) -> Path:
    """The folder of a shape in bfloat16, with at most 200 MB a file; written if it is not there."""
    folder = work / name
    if not (folder / "tokenizer_config.json").exists():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[name]), dtype=torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="200MB")
        load_tokenizer("pocket/gpt2-1.7m").save_pretrained(folder)  # last: a folder with it is whole
    return folder
