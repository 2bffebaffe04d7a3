"""The names of a model's weights in GGUF files."""

import re
from collections.abc import Iterable

import gguf

from outliers.errors import UserError

# The names in llama.cpp of architectures with other names in configurations.
ARCHITECTURES = {
    "gemma3_text": "gemma3",
    "glm4_moe": "glm4moe",
    "gpt_neox": "gptneox",
    "gpt_oss": "gpt-oss",
    "llama4_text": "llama4",
    "mistral": "llama",
    "mixtral": "llama",
    "modernbert": "modern-bert",
    "mt5": "t5",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "umt5": "t5",
}
OF_EXPERTS = {
    "ffn_in": (gguf.MODEL_TENSOR.FFN_GATE_EXP, gguf.MODEL_TENSOR.FFN_UP_EXP),
    "ffn_out": (gguf.MODEL_TENSOR.FFN_DOWN_EXP,),
}


def architecture_of(model_type: str) -> gguf.MODEL_ARCH:
    """Return the llama.cpp architecture of a model type.

    Raises:
        UserError: llama.cpp does not know the type.
    """
    known = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    name = ARCHITECTURES.get(model_type, model_type)
    if name not in known:
        raise UserError(f"llama.cpp has no architecture '{model_type}'; expected a model that it can run")
    return known[name]


def tensor_names(model_type: str, modules: Iterable[str]) -> dict[str, str]:
    """Return the GGUF names of modules' weights: blk.3.ffn_down.weight for model.layers.3.mlp.down_proj.

    Modules without a name are left out, such as experts, whose weights are stacked: see `expert_names`.

    Raises:
        UserError: llama.cpp does not know the architecture.
    """
    modules = list(modules)
    layers = 1 + max(int(number) for module in modules for number in re.findall(r"\.(\d+)\.", module))
    names = gguf.get_tensor_name_map(architecture_of(model_type), layers)
    by_module = {module: names.get_name(f"{module}.weight", (".weight",)) for module in modules}
    return {module: name for module, name in by_module.items() if name}


def expert_names(model_type: str, layer: int, role: str) -> list[str]:
    """Return the names of the weights of all experts of a layer that read a role, "ffn_in" or "ffn_out"."""
    known = gguf.MODEL_TENSORS[architecture_of(model_type)]
    return [f"{gguf.TENSOR_NAMES[kind].format(bid=layer)}.weight" for kind in OF_EXPERTS[role] if kind in known]
