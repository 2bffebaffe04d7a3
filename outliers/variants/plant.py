"""Plant outlier features of a known place and size: a ground truth for the detector."""

import copy
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outliers.criterion import check_threshold
from outliers.errors import UserError
from outliers.models.anatomy import (
    Layer,
    anatomy_of,
    check_features,
    check_plain,
    decoder_layers,
    layers_of,
    norms_are_in_the_residual_stream,
    projections,
    width_of,
)


@torch.no_grad()
def plant(model: PreTrainedModel, features: Iterable[int], factor: float) -> PreTrainedModel:
    """Scale features of the output of every norm of the decoder layers, and divide the weights that read them.

    The function of the model stays what it was, up to rounding (exactly, if the factor is a power of two; where norms
    scale by 1 + weight, if that fits the weight), while the hidden states that enter the attention and feed-forward
    projections are `factor` times as large in these features.

    Args:
        model: a causal language model, not quantized; it is left as it is.
        features: dimensions of the residual stream.
        factor: what to multiply with, greater than 0.

    Returns:
        A new model, which shares the weights outside of its decoder layers.

    Raises:
        UserError: a feature is out of range; the factor is not positive; a projection is more than a floating-point
            weight and a bias, such as a quantized one; the projections read the residual stream
            itself, so that nothing could undo the scaling: the norms come after the sub-layers (OLMo 2), or their
            outputs are the residual stream (OPT-350m, BLOOM's variant of that kind).
    """
    features = check_features(features, width_of(model.config))
    factor = check_threshold("factor", factor)
    if not anatomy_of(model.config).norms or norms_are_in_the_residual_stream(model.config):
        raise UserError(
            "this model's projections read its residual stream (its norms are not before its sub-layers), where "
            "scaling a feature cannot be undone; plant in a model with norms before its sub-layers"
        )
    for projection in projections(model):
        check_plain(projection)
    scaled = {id(parameter) for layer in decoder_layers(model) for parameter in layer.parameters()}
    planted = copy.deepcopy(model, {id(one): one for one in model.parameters() if id(one) not in scaled})
    for layer in layers_of(planted):
        for path, roles in layer.anatomy.norms.items():
            for name, parameter in layer.module.get_submodule(path).named_parameters():  # weight, and a bias if any
                offset = layer.anatomy.norm_offset if name == "weight" else 0.0
                parameter[features] = factor * (offset + parameter[features]) - offset
            for weight in (weight for role in roles for weight in _readers(layer, role)):
                weight[features] /= factor
    return planted


def _readers(layer: Layer, role: str) -> list[torch.Tensor]:
    """The weights of a layer that are multiplied with a role, input features first, sharing memory."""
    if role == "ffn_in" and layer.anatomy.mixture:
        reads = layer.anatomy.mixture.reads
        return [layer.module.get_parameter(path).transpose(0, axis) for path, axis in reads.items()]
    return [_inputs(layer.module.get_submodule(name)) for name in getattr(layer.anatomy, role)]


def _inputs(projection: nn.Module) -> torch.Tensor:
    """The weights as (inputs, outputs), sharing memory."""
    return projection.weight if isinstance(projection, Conv1D) else projection.weight.T
