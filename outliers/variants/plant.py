"""Outlier features of known place and size, planted as a ground truth for the detector."""

import copy
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import NamedTuple

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
    check_used_once,
    decoder_layers,
    features_of,
    layers_of,
    norms_are_in_the_residual_stream,
    projections,
)
from outliers.models.anatomy.trust import check_planted
from outliers.models.anatomy.weights import check_in_memory
from outliers.models.decoder import in_eval_mode

SUBLAYERS = (("attn_in", "attn_out"), ("cross_in", "cross_out"), ("ffn_in", "ffn_out"))  # roles read and added


class Sum(NamedTuple):
    """A norm whose output is the residual stream.

    readers: the projections that read it. added: the projection whose output is added to it next.
    """

    norm: nn.Module
    readers: list[nn.Module]
    added: nn.Module


@torch.no_grad()
def plant(model: PreTrainedModel, features: Iterable[int], factor: float) -> PreTrainedModel:
    """Return a model with enlarged features at the outputs of norms, compensated in the weights that read them.

    The model computes the same function up to rounding, while the inputs of the attention and feed-forward projections
    are about `factor` times as large in these features.

    If norms precede the sub-layers, their output is scaled and the weights that read it are divided. This is exact if
    the factor is a power of two (and, for norms that scale by 1 + weight, if the scaled weight is representable).

    If the output of a norm is the residual stream itself (BERT, OPT-350m, a variant of BLOOM), the next norm would undo
    a scaling. Instead, a constant is added to the feature: `factor` times its root mean square, √(weight² + bias²),
    with the sign of the bias. The biases of the projections that read it compensate for this, and the bias of the
    sub-layer's output removes the constant from the residual stream before the next norm. The output of a stack does
    not change.

    Args:
        model: a model of any family, not quantized; it is left as it is.
        features: dimensions of the residual stream.
        factor: the multiplier, greater than 0.

    Returns:
        A new model, which shares the weights outside of its layers.

    Raises:
        UserError: a feature is out of range; the factor is not positive; a projection is more than a floating-point
            weight and a bias, such as a quantized one; or nothing could undo it: the norms are of what sub-layers add
            (OLMo 2), or their outputs are the residual stream and a projection has no bias, or more reads the outputs
            of norms than is known of the architecture (Llama 4).

    Example:
        >>> planted = outliers.plant(model, features=[3], factor=8.0)
        >>> abs(outliers.perplexity(planted, blocks) / outliers.perplexity(model, blocks) - 1) < 1e-3
        True
    """
    check_used_once(model)
    check_in_memory(model, "planting")
    features = check_features(features, features_of(model))
    factor = check_threshold("factor", factor)
    for projection in projections(model):
        check_plain(projection)
    scaled = {id(parameter) for layer in decoder_layers(model) for parameter in layer.parameters()}
    planted = copy.deepcopy(
        model, {id(parameter): parameter for parameter in model.parameters() if id(parameter) not in scaled}
    )
    if norms_are_in_the_residual_stream(model.config):
        for junction in _sums(planted):
            _shift(junction, features, factor)
    elif anatomy_of(model.config).norms:
        norms = [layer.module.get_submodule(path) for layer in layers_of(planted) for path in layer.anatomy.norms]
        if all(next(norm.parameters(), None) is None for norm in norms):
            raise UserError(
                "this model's norms have no weights, which could make a feature larger; plant in a model whose norms "
                "have weights"
            )
        for layer in layers_of(planted):
            _scale(layer, features, factor)
    else:
        raise UserError(
            "this model's projections read its residual stream (its norms are of what sub-layers add), where a planted "
            "feature cannot be undone; plant in a model with norms before or behind the sums"
        )
    with in_eval_mode(model), in_eval_mode(planted):
        check_planted(model, planted)
    return planted


def _scale(layer: Layer, features: list[int], factor: float) -> None:
    """Scale the outputs of norms before sub-layers, and divide the weights that read them."""
    for path, roles in layer.anatomy.norms.items():
        parameters = list(layer.module.get_submodule(path).named_parameters())  # weight, and a bias if any
        for name, parameter in parameters:
            offset = layer.anatomy.norm_offset if name == "weight" else 0.0
            parameter[features] = factor * (offset + parameter[features]) - offset
        if parameters:  # ModernBERT has none before its first attention
            for weight in _readers_of(layer, path) or (one for role in roles for one in _readers(layer, role)):
                weight[features] /= factor


def _shift(junction: Sum, features: list[int], factor: float) -> None:
    """Add a constant to the output of a norm, and subtract it from what reads the output."""
    if any(getattr(module, "bias", None) is None for module in (junction.norm, *junction.readers, junction.added)):
        raise UserError(
            "this model's projections read its residual stream and have no biases, which could undo a planted feature; "
            "plant in a model with biases, or with norms before its sub-layers"
        )
    weight, bias = junction.norm.weight[features], junction.norm.bias[features]
    constant = factor * torch.hypot(weight, bias) * torch.where(bias < 0, -1.0, 1.0)
    junction.norm.bias[features] += constant
    for reader in junction.readers:
        reader.bias -= constant @ _inputs(reader)[features]
    junction.added.bias[features] -= constant


def _sums(model: PreTrainedModel) -> Iterator[Sum]:
    """Yield the norms of the residual stream, except the last one of each stack."""
    before = getattr(model.config, "apply_residual_connection_post_layernorm", False)  # sums start at norms' outputs
    for _, layers in groupby(layers_of(model), lambda layer: layer.stack):
        steps = []
        for layer in layers:
            norms = layer.anatomy.norms_of_sums or layer.anatomy.norms
            parts = [(reads, adds) for reads, adds in SUBLAYERS if getattr(layer.anatomy, reads)]
            if len(norms) != len(parts):
                raise UserError(
                    f"layer {layer.number} has {len(parts)} sub-layers, and norms of {len(norms)} of their sums; "
                    "nothing could undo a planted feature: plant in a model with a norm before or behind each sub-layer"
                )
            steps += [
                (layer, norm, getattr(layer.anatomy, reads), getattr(layer.anatomy, adds)[0])
                for norm, (reads, adds) in zip(norms, parts, strict=True)
            ]
        for (layer, norm, *_), (other, _, readers, added) in zip(steps, steps if before else steps[1:], strict=False):
            modules = [other.module.get_submodule(name) for name in (*readers, added)]
            yield Sum(layer.module.get_submodule(norm), modules[:-1], modules[-1])


def _readers_of(layer: Layer, norm: str) -> list[torch.Tensor]:
    """Return the weights that a traced forward pass found to read a norm's output, input features first, sharing
    memory."""
    readers = {name: layer.module.get_submodule(name) for name in layer.anatomy.read_by.get(norm, ())}
    for name, module in readers.items():
        if getattr(module, "weight", None) is None:
            raise UserError(
                f"'{layer.path}.{name}' reads the output of a norm and is no projection, so that a planted feature "
                "cannot be undone; plant in another model"
            )
    return [_inputs(module) for module in readers.values()]


def _readers(layer: Layer, role: str) -> list[torch.Tensor]:
    return [_inputs(layer.module.get_submodule(name)) for name in getattr(layer.anatomy, role)]


def _inputs(projection: nn.Module) -> torch.Tensor:
    """Return the weight of a projection as (inputs, outputs), sharing memory."""
    return projection.weight if isinstance(projection, Conv1D) else projection.weight.T
