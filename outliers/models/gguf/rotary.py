"""The rotary position embeddings of a GGUF file; transformers reads only their base."""

import copy
import math
from pathlib import Path

import torch
from transformers import ROPE_INIT_FUNCTIONS, PretrainedConfig

from outliers.errors import UserError
from outliers.models.gguf.header import GGUFHeader

# Llama 3.1 and 3.2: the file has a factor for each frequency, of which the largest is `factor`.
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
HIGH = (4.0, 1.0)  # values of "high_freq_factor", the second one of Llama 4
FREQUENCIES = "rope_freqs.weight"
SCALING = "rope.scaling."
# Fields that are read here, including the name of a linear factor in files of 2023.
READ = (
    *("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.dimension_count_swa", "rope.scale_linear"),
    *(f"{SCALING}{name}" for name in ("type", "factor", "attn_factor", "original_context_length", "finetuned")),
    *(f"{SCALING}yarn_{name}" for name in ("ext_factor", "beta_fast", "beta_slow", "log_multiplier")),
)


def set_rotary_parameters(config: PretrainedConfig, header: GGUFHeader, file: Path) -> None:
    """Set a configuration's rotary parameters from a file: base, number of rotated dimensions, and scaling."""
    if not getattr(config, "rope_parameters", None):
        if found := [key for key in READ if header.of_model(key) is not None]:
            raise UserError(f"'{file}' says {found[0]}, and {config.model_type} has no rotary embeddings")
        return
    # some models have two kinds of layers, of which those with a window are not scaled
    parameters = config.rope_parameters.get("full_attention", config.rope_parameters)
    _set_base(parameters, "rope.freq_base", header, file)
    if "sliding_attention" in config.rope_parameters:
        _set_base(config.rope_parameters["sliding_attention"], "rope.freq_base_swa", header, file)
    elif header.of_model("rope.freq_base_swa") not in (None, parameters["rope_theta"]):
        raise UserError(f"'{file}' has rotary embeddings of two bases; {config.model_type} has one")
    _set_dimensions(parameters, config, header, file)
    _set_scaling(parameters, config, header, file)
    _set_frequencies(parameters, config, header, file)


def _set_base(parameters: dict, key: str, header: GGUFHeader, file: Path) -> None:
    base = header.of_model(key, parameters["rope_theta"])
    if not 0 < base < math.inf:
        raise UserError(f"'{file}' is damaged: its '{key}' is {base}; download it again")
    parameters["rope_theta"] = base


def _set_dimensions(parameters: dict, config: PretrainedConfig, header: GGUFHeader, file: Path) -> None:
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turning = header.of_model("rope.dimension_count", width)
    if "partial_rotary_factor" in parameters:
        parameters["partial_rotary_factor"] = turning / width
    elif turning != width:
        raise UserError(
            f"'{file}' has rotary embeddings of {turning} of {width} features a head; {config.model_type} turns all"
        )
    if header.of_model("rope.dimension_count_swa", turning) != turning:
        raise UserError(f"'{file}' has rotary embeddings of two widths; {config.model_type} has one")


def _set_scaling(parameters: dict, config: PretrainedConfig, header: GGUFHeader, file: Path) -> None:
    """Set the scaling as llama.cpp reads it: linear if no type is given, none if the factor is 0 or absent."""

    def number(name: str, default):
        value = header.of_model(f"{SCALING}{name}", default)
        if value is not None and not (isinstance(value, int | float) and 0 <= value < math.inf):
            raise UserError(f"'{file}' is damaged: its '{SCALING}{name}' is {value}; download it again")
        return value

    kind = header.of_model(f"{SCALING}type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise UserError(f"'{file}' scales rotary embeddings by '{kind}'; expected none, linear or yarn")
    factor = number("factor", None)
    factor = header.of_model("rope.scale_linear", 0) if factor is None else factor
    factor = 1.0 if kind == "none" or not factor else factor
    attention = number("attn_factor", 1.0)
    mixing = header.of_model(f"{SCALING}yarn_ext_factor", -1.0)  # negative for the default of the type
    if mixing >= 0 and mixing != (kind == "yarn"):
        raise UserError(
            f"'{file}' mixes YaRN by a share of {mixing} into rotary embeddings that are scaled by '{kind}'; use "
            "safetensors"
        )
    latent, logarithm = hasattr(config, "kv_lora_rank"), number("yarn_log_multiplier", 0.0)
    if logarithm and not (latent and kind == "yarn"):
        raise UserError(
            f"'{file}' says {SCALING}yarn_log_multiplier {logarithm:.6g}, which {config.model_type} as transformers "
            "computes it has no place for; use safetensors"
        )
    if kind == "yarn":
        if latent:  # YaRN then scales the logits instead of keys and queries
            parameters |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * logarithm, 6))
        parameters |= {
            "rope_type": kind,
            "factor": factor,
            "original_max_position_embeddings": number("original_context_length", config.max_position_embeddings),
            "attention_factor": attention if latent else attention * (1 + 0.1 * math.log(max(factor, 1))),
            "beta_fast": number("yarn_beta_fast", 32.0),
            "beta_slow": number("yarn_beta_slow", 1.0),
        }
    elif attention != 1:
        raise UserError(
            f"'{file}' multiplies rotary embeddings by {attention:.6g} (its '{SCALING}attn_factor'), which "
            "transformers computes with YaRN alone; use safetensors"
        )
    else:
        parameters |= {"rope_type": "default"} if factor == 1 else {"rope_type": kind, "factor": factor}


def _set_frequencies(parameters: dict, config: PretrainedConfig, header: GGUFHeader, file: Path) -> None:
    tensor = next((tensor for tensor in header.tensors if tensor.name == FREQUENCIES), None)
    if tensor is None:
        return
    if parameters["rope_type"] != "default":
        raise UserError(
            f"'{file}' scales rotary embeddings twice, by '{SCALING}*' and by {FREQUENCIES}; use safetensors"
        )
    factors = torch.from_numpy(header.read(tensor))
    for high in HIGH:
        parameters |= LLAMA3 | {"factor": float(factors.max()), "high_freq_factor": high}
        frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](copy.deepcopy(config))
        plain = parameters["rope_theta"] ** -(torch.arange(0, 2 * len(frequencies), 2) / (2 * len(frequencies)))
        if factors.shape == plain.shape and torch.allclose(plain / frequencies, factors, rtol=1e-4):
            return
    raise UserError(f"'{file}' scales the frequencies of rotary embeddings otherwise than Llama 3; use safetensors")
