"""Plant outlier features of a known place and size: a ground truth for the detector."""

import copy
from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outliers.errors import UserError
from outliers.models.anatomy import anatomy_of, check_features, decoder_layers, norms_are_in_the_residual_stream


@torch.no_grad()
def plant(model: PreTrainedModel, features: Iterable[int], factor: float) -> PreTrainedModel:
    """Scale features of the output of every norm of the decoder layers, and divide the weights that read them.

    The function of the model stays what it was, up to rounding (exactly, if the factor is a power of two), while the
    hidden states that enter the attention and feed-forward projections are `factor` times as large in these features.

    Args:
        model: a causal language model, not quantized; it is left as it is.
        features: dimensions of the residual stream.
        factor: what to multiply with, greater than 0.

    Returns:
        A new model.

    Raises:
        UserError: a feature is out of range; the factor is not positive; the norms' outputs are the residual stream
            itself (OPT-350m, BLOOM's variant of that kind), so that nothing could undo the scaling.
    """
    features = check_features(features, model.config.hidden_size)
    if not factor > 0:
        raise UserError(f"factor is {factor}; expected a positive number")
    if norms_are_in_the_residual_stream(model.config):
        raise UserError(
            "this model's norms are in its residual stream (not before each sub-layer), where scaling a feature cannot "
            "be undone; plant in a model with norms before its sub-layers"
        )
    planted = copy.deepcopy(model)
    anatomy = anatomy_of(planted.config)
    for layer in decoder_layers(planted):
        for path, roles in anatomy.norms.items():
            norm = layer.get_submodule(path)
            for parameter in norm.parameters():  # weight, and bias where it has one
                parameter[features] *= factor
            for name in (name for role in roles for name in getattr(anatomy, role)):
                _inputs(layer.get_submodule(name))[features] /= factor
    return planted


def _inputs(projection: nn.Module) -> torch.Tensor:
    """The weights as (inputs, outputs), sharing memory."""
    return projection.weight if isinstance(projection, Conv1D) else projection.weight.T
