"""Rotary position embeddings as a GGUF file has them; transformers takes no more than their base from it."""

import copy
from pathlib import Path

import torch
from transformers import ROPE_INIT_FUNCTIONS, PretrainedConfig

from outliers.errors import UserError
from outliers.models.gguf.header import Header

# Llama 3.1 and 3.2: a file has the factors of all frequencies, of which the largest is `factor`.
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FREQUENCIES = "rope_freqs.weight"


def say_rotary_parameters(config: PretrainedConfig, header: Header, file: Path) -> None:
    """Give a configuration the rotary parameters that a file has: base, how many dimensions turn, and scaling."""
    if not getattr(config, "rope_parameters", None):
        return
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)  # some have two kinds of layers
    parameters["rope_theta"] = header.of_model("rope.freq_base", parameters["rope_theta"])
    _say_dimensions(parameters, config, header, file)
    _say_scaling(parameters, header, file)
    _say_frequencies(parameters, config, header, file)


def _say_dimensions(parameters: dict, config: PretrainedConfig, header: Header, file: Path) -> None:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turning = header.of_model("rope.dimension_count", width)
    if "partial_rotary_factor" in parameters:
        parameters["partial_rotary_factor"] = turning / width
    elif turning != width:
        raise UserError(
            f"'{file}' has rotary embeddings of {turning} of {width} features a head; {config.model_type} turns all"
        )


def _say_scaling(parameters: dict, header: Header, file: Path) -> None:
    kind = header.of_model("rope.scaling.type", "none")
    if kind == "linear":
        parameters |= {"rope_type": kind, "factor": header.of_model("rope.scaling.factor")}
    elif kind == "yarn":
        length = header.of_model("rope.scaling.original_context_length")
        factor = header.of_model("rope.scaling.factor")
        parameters |= {"rope_type": kind, "factor": factor, "original_max_position_embeddings": length}
    elif kind != "none":
        raise UserError(f"'{file}' scales rotary embeddings by '{kind}'; expected none, linear or yarn")


def _say_frequencies(parameters: dict, config: PretrainedConfig, header: Header, file: Path) -> None:
    tensor = next((tensor for tensor in header.tensors if tensor.name == FREQUENCIES), None)
    if tensor is None:
        return
    factors = torch.from_numpy(header.read(tensor))
    parameters |= LLAMA3 | {"factor": float(factors.max())}
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](copy.deepcopy(config))
    plain = parameters["rope_theta"] ** -(torch.arange(0, 2 * len(frequencies), 2) / (2 * len(frequencies)))
    if factors.shape != plain.shape or not torch.allclose(plain / frequencies, factors, rtol=1e-4):
        raise UserError(f"'{file}' scales the frequencies of rotary embeddings otherwise than Llama 3; use safetensors")
