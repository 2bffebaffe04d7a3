"""Outlier features of known place and size, planted as a ground truth for the detector."""

import copy
from collections.abc import Callable, Iterable, Iterator
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
    check_features,
    check_plain,
    check_used_once,
    decoder_layers,
    features_of,
    input_embeddings,
    layers_of,
    norms_are_in_the_residual_stream,
    projections,
    stacks_of,
)
from outliers.models.anatomy.discovery.flow import is_projection
from outliers.models.anatomy.trust import check_planted
from outliers.models.anatomy.weights import check_in_memory
from outliers.models.decoder import in_eval_mode
from outliers.models.stream import separate_turns

SUBLAYERS = (("attn_in", "attn_out"), ("cross_in", "cross_out"), ("ffn_in", "ffn_out"))  # roles read and added


class ScaledModule(nn.Module):
    """A module, such as a norm without weights, whose first input and output are multiplied by factors.

    inputs, outputs: (features,); None for no factors.
    """

    def __init__(self, module: nn.Module, inputs: torch.Tensor | None = None, outputs: torch.Tensor | None = None):
        super().__init__()
        self.module = module
        self.register_buffer("inputs", inputs)
        self.register_buffer("outputs", outputs)

    def forward(self, states: torch.Tensor, *others: object, **named: object) -> torch.Tensor:
        states = self.module(states if self.inputs is None else states * self.inputs.to(states), *others, **named)
        return states if self.outputs is None else states * self.outputs.to(states)


class Junction(NamedTuple):
    """A norm to whose output a constant is added, and the modules that undo it.

    The output is the residual stream, or enters such a norm. readers: the projections that read the output. added: the
    projection whose output is added to it next.
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
    the factor is a power of two (and, for norms that scale by 1 + weight, if the scaled weight is representable). A
    norm without weights (OLMo) gets factors behind it, which no file of its architecture has a place for.

    If the output of a norm is the residual stream itself (BERT, OPT-350m, a variant of BLOOM), the next norm would undo
    a scaling. Instead, a constant is added to the feature: `factor` times its root mean square, √(weight² + bias²),
    with the sign of the bias. The biases of the projections that read it compensate for this, and the bias of the
    sub-layer's output removes the constant from the residual stream before the next norm. The output of a stack does
    not change.

    If there is no bias (MiniMax), or the projections read the residual stream and only what they add is normalized
    (OLMo 2), the feature is scaled in the whole residual stream: in the embedding and in all that is added to it. The
    norms of the residual stream, also the last one, get factors that undo it in front of them.

    Args:
        model: a model of any family, not quantized; it is left as it is.
        features: dimensions of the residual stream.
        factor: the multiplier, greater than 0.

    Returns:
        A new model, which shares the weights outside of its layers.

    Raises:
        UserError: a feature is out of range; the factor is not positive; a projection is more than a floating-point
            weight and a bias, such as a quantized one; or nothing could undo it, because more reads the outputs of
            norms than is known of the architecture.

    Example:
        >>> planted = outliers.plant(model, features=[3], factor=8.0)
        >>> abs(outliers.perplexity(planted, blocks) / outliers.perplexity(model, blocks) - 1) < 1e-3
        True
    """
    model = separate_turns(model, own_weights=True)
    check_used_once(model)
    check_in_memory(model, "planting")
    features = check_features(features, features_of(model))
    factor = check_threshold("factor", factor)
    for projection in projections(model):
        check_plain(projection)
    scaled = {id(parameter) for layer in decoder_layers(model) for parameter in layer.parameters()}
    shared = {id(parameter): parameter for parameter in model.parameters() if id(parameter) not in scaled}
    refused = None
    for enlarge in _ways(model):
        planted = copy.deepcopy(model, dict(shared))
        try:
            enlarge(planted, features, factor)
            with in_eval_mode(model), in_eval_mode(planted):
                check_planted(model, planted)
            return planted
        except UserError as error:
            refused = refused or error
    raise refused


def _ways(model: PreTrainedModel) -> Iterator[Callable[[PreTrainedModel, list[int], float], None]]:
    """Yield the functions that can plant features, first the one that enlarges the most hidden states of this model."""
    sums = list(_junctions(model)) if norms_are_in_the_residual_stream(model.config) else []
    inside = list(_junctions_within_layers(model))
    if sums and all(map(_has_biases, sums)):
        yield lambda *of: _shift(_junctions, *of)
    elif not sums and any(layer.anatomy.norms for layer in layers_of(model)):
        yield _scale_norms
    yield _scale_stream
    if inside and all(map(_has_biases, inside)):
        yield lambda *of: _shift(_junctions_within_layers, *of)


def _scale_norms(model: PreTrainedModel, features: list[int], factor: float) -> None:
    if not sum(_scale(layer, features, factor) for layer in layers_of(model)):
        raise UserError("all norms of this model are read by projections that read more; plant in another model")


def _scale(layer: Layer, features: list[int], factor: float) -> int:
    """Scale the outputs of norms before sub-layers, and divide the weights that read them; return the number of norms.

    A norm is left unchanged if one of its readers also reads something else, such as keys of two stacks.
    """
    anatomy, count = layer.anatomy, 0
    for path, roles in anatomy.norms.items():
        norm = layer.module.get_submodule(path)
        names = anatomy.read_by.get(path) or [one for role in roles for one in getattr(anatomy, role)]
        readers = {name: layer.module.get_submodule(name) for name in names}
        shared = any(name in anatomy.apart and is_projection(module) for name, module in readers.items())
        if shared or isinstance(norm, nn.Identity):  # ModernBERT has none before its first attention
            continue
        count += 1
        _scale_norm(layer, path, features, factor)
        for name, module in readers.items():
            weight = getattr(module, "weight", None)
            if weight is None or weight.ndim != 2:  # such as another norm, or experts that are not projections
                undone = 1 / _factors(layer.module, anatomy.width, features, factor)
                layer.module.set_submodule(name, ScaledModule(module, undone))
            else:
                weight = _inputs(module)
                weight[_of_streams(features, layer, len(weight))] /= factor
    return count


def _scale_norm(layer: Layer, path: str, features: list[int], factor: float) -> None:
    """Scale the output of a norm by its weight and bias, or by factors behind it if it has none."""
    norm = layer.module.get_submodule(path)
    parameters = list(norm.named_parameters())
    for name, parameter in parameters:
        offset = layer.anatomy.norm_offset if name.endswith("weight") else 0.0
        of_all = _of_streams(features, layer, len(parameter))
        parameter[of_all] = factor * (offset + parameter[of_all]) - offset
    if not parameters:
        factors = _factors(layer.module, layer.anatomy.width, features, factor)
        layer.module.set_submodule(path, ScaledModule(norm, outputs=factors))


def _of_streams(features: list[int], layer: Layer, count: int) -> list[int]:
    """Return the indices of features in a vector of `count` entries, in which the streams of a model with several, as
    with hyper-connections, follow each other."""
    return [start + feature for start in range(0, count, layer.anatomy.width) for feature in features]


def _factors(module: nn.Module, width: int, features: list[int], factor: float) -> torch.Tensor:
    factors = torch.ones(width, device=next(module.parameters()).device)
    factors[features] = factor
    return factors


def _scale_stream(model: PreTrainedModel, features: list[int], factor: float) -> None:
    """Scale features of the residual stream, from the embeddings to the last norm."""
    stack, *others = stacks_of(model.config)
    *_, end = layers_of(model)
    last = stack.last_norm or next((f"{end.path}.{norm}" for norm in reversed(end.anatomy.norms_of_sums)), None)
    if others or last is None:
        raise UserError(
            "this model's projections read its residual stream, and no norm behind the layers could undo a planted "
            "feature; plant in a model with norms in front of its projections, or behind its layers"
        )
    begins = [stack.embedding_norm] if stack.embedding_norm else [None, *filter(None, [stack.positions])]
    for path in begins:
        module = input_embeddings(model)[0] if path is None else model.get_submodule(path)
        for name, parameter in list(module._parameters.items()):
            scaled = parameter.clone()
            scaled[..., features] *= factor
            module._parameters[name] = nn.Parameter(scaled, requires_grad=False)
    model.config.tie_word_embeddings, model.all_tied_weights_keys = False, {}  # the head keeps the original weight
    for layer in layers_of(model):
        anatomy, factors = layer.anatomy, _factors(layer.module, layer.anatomy.width, features, factor)
        reads = {*anatomy.attn_in, *anatomy.ffn_in, *anatomy.router}
        through = [norm for norm, readers in anatomy.read_by.items() if reads & {*readers}]
        for path in dict.fromkeys((*anatomy.norms_of_sums, *through)):
            norm = layer.module.get_submodule(path)
            layer.module.set_submodule(path, ScaledModule(norm, 1 / factors, factors))
        for name in reads:
            _inputs(layer.module.get_submodule(name))[features] /= factor
        behind = {role: norm for norm, role in anatomy.norms_behind.items()}
        for role in ("attn_out", "ffn_out"):
            if role in behind:
                _scale_norm(layer, behind[role], features, factor)
                continue
            for name in getattr(anatomy, role):
                module = layer.module.get_submodule(name)
                _inputs(module)[:, features] *= factor
                if module.bias is not None:
                    module.bias[features] *= factor
    inner = model.get_submodule(last)
    undone = ScaledModule(inner, 1 / _factors(model, stack.width, features, factor))
    model.set_submodule(last, ScaledModule(inner.module, undone.inputs) if isinstance(inner, ScaledModule) else undone)


def _shift(junctions_of: Callable, model: PreTrainedModel, features: list[int], factor: float) -> None:
    """Add a constant to features in the outputs of norms, and subtract it in the modules that read them.

    junctions_of: yields the junctions of a model. factor: the constant relative to the norm's weight and bias.
    """
    for junction in junctions_of(model):
        weight, bias = junction.norm.weight[features], junction.norm.bias[features]
        constant = factor * torch.hypot(weight, bias) * torch.where(bias < 0, -1.0, 1.0)
        junction.norm.bias[features] += constant
        for reader in junction.readers:
            reader.bias -= constant @ _inputs(reader)[features]
        junction.added.bias[features] -= constant


def _has_biases(junction: Junction) -> bool:
    """Return whether biases can undo a constant that is added to the output of a norm of a sum."""
    modules = junction.norm, *junction.readers, junction.added
    return all(getattr(module, "bias", None) is not None for module in modules)


def _junctions(model: PreTrainedModel) -> Iterator[Junction]:
    """Yield the norms of the residual stream, except the last one of each stack; stop if a sub-layer has no norm."""
    # whether sums start at the outputs of norms
    before = getattr(model.config, "apply_residual_connection_post_layernorm", False)
    for _, layers in groupby(layers_of(model), lambda layer: layer.stack):
        steps = []
        for layer in layers:
            norms = layer.anatomy.norms_of_sums or layer.anatomy.norms
            parts = [(reads, adds) for reads, adds in SUBLAYERS if getattr(layer.anatomy, reads)]
            if len(norms) != len(parts):
                return
            steps += [
                (layer, norm, getattr(layer.anatomy, reads), getattr(layer.anatomy, adds)[0])
                for norm, (reads, adds) in zip(norms, parts, strict=True)
            ]
        for (layer, norm, *_), (other, _, readers, added) in zip(steps, steps if before else steps[1:], strict=False):
            modules = [other.module.get_submodule(name) for name in (*readers, added)]
            yield Junction(layer.module.get_submodule(norm), modules[:-1], modules[-1])


def _junctions_within_layers(model: PreTrainedModel) -> Iterator[Junction]:
    """Yield the norms whose output enters a norm of the residual stream of the same layer."""
    for layer in layers_of(model):
        anatomy = layer.anatomy
        for norm, names in anatomy.read_by.items():
            for reads, adds in SUBLAYERS if {*names} & {*anatomy.norms_of_sums} else ():
                readers = [name for name in getattr(anatomy, reads) if name in names]
                if readers:
                    modules = (*readers, getattr(anatomy, adds)[0])
                    *into, added = map(layer.module.get_submodule, modules)
                    yield Junction(layer.module.get_submodule(norm), into, added)


def _inputs(projection: nn.Module) -> torch.Tensor:
    """Return the weight of a projection as (inputs, outputs), sharing memory."""
    return projection.weight if isinstance(projection, Conv1D) else projection.weight.T
