"""Plans for llama.cpp: the type of each tensor of a GGUF file, for `llama-quantize --tensor-type-file`.

Its types share a scale between 32 values (Q6_K: 16) whatever a scheme's groups are, and it chooses the format of
activations itself, 8 bits in groups. So the file approximates a scheme.
"""

import re

import gguf
import torch
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.models.anatomy import Projection
from outliers.models.gguf.tensors import expert_names, tensor_names
from outliers.quantization.linear import stored_weight
from outliers.quantization.plans.assigned import Assigned
from outliers.quantization.schemes import Scheme

TYPES = {"int8": "Q8_0", "int6": "Q6_K", "int4": "Q4_0", "mxfp4": "MXFP4"}  # for our formats of weights
EXACT = {torch.float16: "f16", torch.bfloat16: "bf16"}
# Expressions for tensors that belong to no projection: embeddings, the head, and experts that are not projections. They
# match no projection, because versions of llama.cpp differ in which of several matching expressions counts.
OUTSIDE, EXPERTS = r"^(?!(enc\.|dec\.)?blk\.)", (r"_exps\.", r"_shexp\.")
BASE = "q8_0"  # the type for which `llama-quantize` does not mix types


def type_of(scheme: Scheme) -> gguf.GGMLQuantizationType | None:
    """Return the nearest tensor type of a scheme; None if a whole tensor shares a scale, or activations are not
    int8."""
    weights, activations = scheme.weights, scheme.activations
    if scheme.outlier_threshold is not None or not weights or not (weights.per_row and weights.symmetric):
        return None
    in_int8 = activations is None or (activations.format == "int8" and activations.per_row and activations.symmetric)
    name = TYPES.get(weights.format) if in_int8 else None
    return name and gguf.GGMLQuantizationType[name]


def lines_of(assigned: Assigned) -> str:
    """Return lines `EXPRESSION=TYPE`: one for each tensor whose type is not `BASE`, and for tensors outside of
    projections.

    They are the FILE of `llama-quantize --tensor-type-file FILE model.gguf quantized.gguf q8_0`.

    Raises:
        UserError: llama.cpp has no tensor for a projection, or a single one for projections with different types.
    """
    exact = EXACT.get(assigned.model.dtype, "f32")
    kinds = [(part, exact) for part in assigned.exact]
    kinds += [(part, _checked(kind, part).name.lower()) for kind, parts in assigned.groups for part in parts]
    names, type_of_tensor = _names(assigned.model, [part for part, _ in kinds]), {}
    for part, kind in kinds:
        for name in names[part.path]:
            if type_of_tensor.setdefault(name, kind) != kind:
                raise UserError(
                    f"'{part.path}' is of an expert, and in a GGUF file all experts of a layer are one tensor, "
                    f"'{name}', of one type; expected a plan that treats them alike"
                )
    outside = [OUTSIDE, *(end for end in EXPERTS if not any(re.search(end, name) for name in type_of_tensor))]
    lines = [f"^{re.escape(name)}$={kind}" for name, kind in type_of_tensor.items() if kind != BASE]
    return "\n".join([*lines, *(f"{expression}={exact}" for expression in outside)]) + "\n"


def _names(model: PreTrainedModel, parts: list[Projection]) -> dict[str, list[str]]:
    """Return the names of the tensors of each projection, by its path."""
    kind = model.config.model_type
    named = tensor_names(kind, [part.path for part in parts if part.expert is None])
    names = {path: [name] for path, name in named.items()}
    for part in (part for part in parts if part.expert is not None):
        names[part.path] = expert_names(kind, part.layer, part.role)
    if unnamed := [part.path for part in parts if not names.get(part.path)]:
        raise UserError(f"llama.cpp has no tensor for '{unnamed[0]}'; expected another format of an export")
    return names


def _checked(kind: gguf.GGMLQuantizationType, part: Projection) -> gguf.GGMLQuantizationType:
    """Return a type; raise UserError if a projection's width is no multiple of its block, because llama-quantize would
    use another type."""
    block, features = gguf.GGML_QUANT_SIZES[kind][0], stored_weight(part.module).shape[1]
    if features % block:
        raise UserError(
            f"'{part.path}' reads {features} features, and {kind.name} has blocks of {block}, so that llama-quantize "
            "takes another type; expected a plan that leaves it exact or has another scheme there"
        )
    return kind
