"""Weights of experts in GGUF files: one tensor of all experts of a layer for each kind of projection."""

import re
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from outliers.models.anatomy import layers_of
from outliers.models.gguf.header import GGUFHeader, Tensor

NAME = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<kind>gate|up|gate_up|down)_exps\.(?P<end>weight|bias)")

FUSED = "gate_up"  # in newer files: the gate of each expert, followed by the projection that it multiplies


def expert_tensors(model: PreTrainedModel, tensors: Iterable[Tensor]) -> dict[str, tuple[list[Tensor], nn.Module]]:
    """Return the stored tensors of each parameter of experts, by its name, and the module of the parameter.

    Gates come before the projections that they multiply. A parameter with a missing tensor is left out.
    """
    found = defaultdict(dict)
    for tensor in tensors:
        if match := NAME.fullmatch(tensor.name):
            found[int(match["layer"]), match["end"]][match["kind"]] = tensor
    parts = {}
    for layer in (layer for layer in layers_of(model) if layer.anatomy.experts):
        path = f"{layer.path}.{layer.anatomy.experts}"
        experts = model.get_submodule(path)
        kinds = {"gate_up_proj": ("gate", "up")} if experts.has_gate else {"up_proj": ("up",)}
        for name, needed in {**kinds, "down_proj": ("down",)}.items():
            for end, suffix in (("weight", ""), ("bias", "_bias")):
                by_kind = found[layer.number, end]
                stored = (FUSED,) if name == "gate_up_proj" and FUSED in by_kind else needed
                if by_kind.keys() >= {*stored}:
                    parts[f"{path}.{name}{suffix}"] = [by_kind[kind] for kind in stored], experts
    return parts


def joined_experts(experts: nn.Module, header: GGUFHeader, parts: list[Tensor]) -> torch.Tensor:
    """Join stored tensors to a parameter of all experts, in the layout of its module."""
    tensors = [torch.from_numpy(header.read(part)) for part in parts]
    if NAME.fullmatch(parts[0].name)["kind"] == FUSED:
        tensors = tensors[0].chunk(2, 1)
    if len(tensors) > 1:
        whole = torch.cat(tensors, 1) if experts.is_concatenated else torch.stack(tensors, 2).flatten(1, 2)
    else:
        (whole,) = tensors
    return whole.mT.contiguous() if experts.is_transposed and whole.ndim > 2 else whole
