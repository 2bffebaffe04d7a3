"""The quantization of whole models."""

import copy
import fnmatch
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Literal

import torch
from outlier_kernels.formats import FORMATS
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outliers.errors import UserError, shown, unknown_name
from outliers.models.anatomy import (
    Projection,
    anatomy_of,
    check_plain,
    family_of,
    inputs_of,
    layers_of,
    projections,
    shared_parts,
    stack_module,
)
from outliers.models.anatomy.experts import ExpertProjection, settle
from outliers.models.anatomy.trust import trust_copy
from outliers.models.anatomy.weights import device_of, shared_in_copies
from outliers.models.attention import attentions, eager
from outliers.models.hooks import check_hooks, hand_over_hooks
from outliers.models.stream import separate_layers, separate_turns
from outliers.quantization.attention import AttentionProducts, put_attention, take_attention_back
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.magnitudes import Calibration, stored_weight
from outliers.quantization.routers import put_routers, routers, take_routers_back
from outliers.quantization.schemes import BASELINE, SCHEMES, Scheme, get_scheme

LAYERS = {"exact": QuantizedLinear, "int8": Int8Linear}  # by the weights that they keep
# A place: a layer, consecutive layers, or an expert of one or several layers.
_LAYERS = re.compile(r"layers\.(?P<first>[0-9]{1,9})(:(?P<end>[0-9]{1,9}))?(\.experts\.(?P<expert>[0-9]{1,9}))?")


def quantize(
    model: PreTrainedModel,
    scheme: str | Scheme,
    keep: Literal["exact", "int8"] = "exact",
    skip: Collection[str] = (),
    calibration: Calibration | None = None,
    only: Collection[str] = (),
    instead: Mapping[str, Collection[str]] | Mapping[str | Scheme, Collection[str]] = MappingProxyType({}),
) -> PreTrainedModel:
    """Return `model` with every linear projection of its decoder layers under a scheme, and its attention.

    The given model is not changed; the new one shares everything that is not quantized. Embeddings, norms and the head
    stay as they are, and unless the scheme names them, routers and attention too; so do forward hooks. `fp32` quantizes
    nothing.

    Args:
        model: a causal language model, on any device, also "meta", or spread over several.
        scheme: a name, or a custom scheme.
        keep: "exact" shares the exact weights and adds codes, as in the paper's equation, where outlier features are
            multiplied with exact weights; such a model can be put under another scheme, and codes that both have in
            common are shared. "int8" keeps only the codes, one byte per weight; outlier features are multiplied with
            dequantized weights.
        skip: places that stay exact. A place is a role ("attn_in", "attn_out", "ffn_in", "ffn_out", or "attention" for
            what attention multiplies), layers ("layers.3", or "layers.9:12" for 9 to 11), an expert of these
            ("layers.3.experts.7"), or a pattern, as in names of files, of paths of modules, such as "*.down_proj" or
            "model.layers.0"; the head, which always stays exact, may be among them. What the attention "…self_attn"
            multiplies is at a place with it, or alone as "…self_attn.products".
        calibration: statistics of this model's inputs, which some remedies require; see `calibrate`.
        only: places to which quantization is limited; empty for no limit.
        instead: schemes that replace `scheme` for projections at some places, such as {"llm.int8": ["ffn_out"]};
            skipped places stay exact, and attention always follows `scheme`.

    Raises:
        UserError: no scheme has this name, the architecture is unknown, or something is wrapped around the model; a
            projection is more than a floating-point weight and a bias, such as one with an adapter, or has hooks on
            gradients or its state; only codes are left of the weights; a place is not in the model, or nothing is left
            to quantize; groups of features that share a scale do not divide those of a projection; codes of weights
            that the scheme does not quantize, or that are no int8, are to be kept, or the exact weights are not that it
            multiplies some tokens with; the scheme needs a calibration, and there is none, or one of another model; the
            scheme has attention in int8, and that of the model cannot be replaced, or trains in int8; a projection has
            two schemes instead, or one that quantizes none or needs a calibration.

    Example:
        >>> quantized = outliers.quantize(model, "llm.int8", skip=["ffn_out"])
        >>> outliers.perplexity(quantized, blocks) != outliers.perplexity(model, blocks)
        True
    """
    scheme = get_scheme(scheme)
    if keep not in LAYERS:
        raise unknown_name("way to keep weights", keep, LAYERS)
    if keep == "int8":
        check_kept(scheme)
    check_calibrated(scheme, calibration)
    calibration = calibration and calibration.under(scheme)
    model = separate_turns(model)
    exact_paths = skipped(model, skip, scheme, only)
    schemes = resolve_instead(model, scheme, exact_paths, instead)
    if keep == "int8":
        for other in set(schemes.values()):
            check_kept(other)
    if calibration or _uses_differ(model, exact_paths, schemes):
        model = separate_layers(model)
    # deepcopy builds a new module tree, but takes objects from its memo: parameters on the same storage, and for each
    # projection the layer under the new scheme.
    memo = shared_in_copies(model) | {id(old): _sharing_storage(old) for old in model.parameters()}
    memo |= {
        id(part.module): _replacement(
            schemes.get(part.path, scheme), part, memo, None if part.path in exact_paths else LAYERS[keep], calibration
        )
        for part in projections(model)
    }
    copied = copy.deepcopy(model, memo)
    settle(copied)
    trust_copy(model, copied)
    if draw := getattr(model, "draw", 0):
        for layer in quantized_layers(copied):
            layer.draw = draw
    for name in ("to", "cuda"):  # on a model that accelerate spread, these functions move the original
        vars(copied).pop(name, None)
    take_routers_back(copied)
    if scheme.routers:
        put_routers(copied, scheme, exact_paths, calibration)
    if vars(copied).pop("attention_scheme", None):  # the new scheme replaces it
        take_attention_back(copied)
    if scheme.attention is not None:
        put_attention(copied, AttentionProducts.of(scheme), exact_paths)
        copied.attention_scheme = scheme.name
    return copied


def _uses_differ(model: PreTrainedModel, exact_paths: Collection[str], schemes: Mapping[str, Scheme]) -> bool:
    """Return whether a module that occurs in several places of a model would be quantized differently in them.

    schemes: the schemes that replace the common one, by path.
    """

    def treatment(path: str) -> tuple:
        return path in exact_paths, f"{path}.products" in exact_paths, schemes.get(path)

    return any(treatment(path) != treatment(first) for path, first in shared_parts(layers_of(model)).items())


def quantized_layers(model: PreTrainedModel) -> list[QuantizedLinear]:
    """Return the projections of a model that are under a scheme and keep exact weights."""
    return [part.module for part in projections(model) if isinstance(part.module, QuantizedLinear)]


def make_codes(model: PreTrainedModel) -> PreTrainedModel:
    """Quantize the weights of a model under a scheme before its first pass, so that models made from it share the
    codes; return the model."""
    for projection in projections(model):
        getattr(projection.module, "quantized_weight", None)
    return model


def check_kept(scheme: Scheme) -> None:
    """Raise UserError if a scheme quantizes projections but has no int8 codes of weights to keep."""
    if not scheme.quantizes_projections:
        return
    if scheme.weights is None:
        raise UserError(f"scheme '{scheme.name}' quantizes no weights, whose codes could be kept; use keep='exact'")
    if not FORMATS[scheme.weights.format].integers:
        kept = " or ".join(name for name, format in FORMATS.items() if format.integers)
        raise UserError(
            f"scheme '{scheme.name}' has weights in {scheme.weights.format}, whose codes are no int8; expected {kept}, "
            "or use keep='exact'"
        )
    if scheme.routers:
        raise UserError(f"scheme '{scheme.name}' quantizes routers, which keep their weights; use keep='exact'")
    if scheme.remedies_with("around"):
        raise UserError(f"scheme '{scheme.name}' multiplies some tokens with exact weights; use keep='exact'")


def check_groups(model: PreTrainedModel, scheme: Scheme, exact_paths: Collection[str] = ()) -> None:
    """Raise UserError if a scheme's groups of features do not divide the features of a projection."""
    if scheme.group is None:
        return
    kinds = nn.Linear, Conv1D, ExpertProjection, QuantizedLinear
    exact = [part for part in projections(model) if part.path not in exact_paths and type(part.module) in kinds]
    features = {part.path: stored_weight(part.module).shape[1] for part in exact}
    common = math.gcd(*features.values())
    for path, width in features.items():
        if width % scheme.group:
            fitting = max(size for size in range(1, scheme.group + 1) if common % size == 0)
            raise UserError(
                f"groups of {scheme.group} features, as scheme '{scheme.name}' has them, do not divide the {width} of "
                f"'{path}'; expected groups such as {fitting}, which divide all, or skip what they do not divide"
            )


def resolve_instead(
    model: PreTrainedModel, scheme: Scheme, exact_paths: set[str], instead: Mapping[str | Scheme, Collection[str]]
) -> dict[str, Scheme]:
    """Return the schemes that replace the common one, by the path of a projection, from the option `instead` of
    `quantize`.

    exact_paths: of projections that stay exact. Raises UserError if a scheme does not fit a projection.
    """
    schemes, parts = {}, list(projections(model))
    for other, places in instead.items():
        other = get_scheme(other)
        if not other.quantizes_projections or other.needs_calibration or other.attention is not None:
            raise UserError(
                f"scheme '{other.name}' in the place of '{scheme.name}'; expected one that quantizes projections "
                "alone, without a calibration, such as llm.int8 (what stays exact is skipped)"
            )
        paths = _paths_at(model, parts, "instead", places)
        if repeated := sorted(paths & schemes.keys()):
            raise UserError(f"'{repeated[0]}' has two schemes in the place of '{scheme.name}'; expected one")
        schemes |= dict.fromkeys(paths, other)
    for quantizing in {scheme, *schemes.values()}:
        elsewhere = {part.path for part in parts if schemes.get(part.path, scheme) != quantizing}
        check_groups(model, quantizing, {*exact_paths, *elsewhere})
    return schemes


def check_attends(model: PreTrainedModel, scheme: Scheme) -> None:
    """Raise UserError if a scheme has attention in int8 and a model's attention is more than a masked softmax.

    This takes a pass of the shortest input. model: possibly on the meta device.
    """
    if scheme.attention is None:
        return
    alone = replace(SCHEMES[BASELINE], remedies=(scheme.attention,))
    with torch.inference_mode(), eager(model):
        changed, stack, family = quantize(model, alone), anatomy_of(model.config), family_of(model.config)
        (read,) = inputs_of(model, family.smallest(model.config).to(device_of(model)))
        # without a mask, transformers searches the positions of causal models for starts of sequences
        mask = {} if stack.bidirectional else {"attention_mask": torch.ones_like(read)[None]}
        stack_module(changed, stack)(read[None], **mask, **family.keywords)


def check_calibrated(scheme: Scheme, calibration: Calibration | None) -> None:
    """Raise UserError if a scheme needs a calibration, or statistics, that are missing."""
    if calibration is None and scheme.needs_calibration:
        raise UserError(
            f"scheme '{scheme.name}' needs the magnitudes of the inputs; expected a calibration: "
            "quantize(model, scheme, calibration=outliers.calibrate(model, blocks"
            f"{', [scheme]' if scheme.needs or scheme.learns else ''})), or measure it in a sweep"
        )
    if calibration is not None and (lacking := calibration.lacks(scheme)):
        raise UserError(
            f"scheme '{scheme.name}' needs the {' and '.join(lacking)} of the inputs, which this calibration did "
            "not keep; expected outliers.calibrate(model, blocks, [scheme])"
        )


def skipped(model: PreTrainedModel, skip: Collection[str], scheme: Scheme, only: Collection[str] = ()) -> set[str]:
    """Return the paths that stay exact: all at places of `skip`, and all outside the places of `only` unless it is
    empty.

    Paths are of projections and of attention products. Raises UserError if nothing is left to quantize.
    """
    parts = [*projections(model), *attentions(model), *(routers(model) if scheme.routers else ())]
    exact_paths = _paths_at(model, parts, "skip", skip)
    if only:
        exact_paths |= {part.path for part in parts} - _paths_at(model, parts, "only", only)
    if scheme.quantizes and exact_paths.issuperset(part.path for part in quantized_parts(model, scheme)):
        places = f"skip={shown(list(skip))}" + (f" and only={shown(list(only))}" if only else "")
        raise UserError(f"{places} leaves nothing for scheme '{scheme.name}' to quantize; use 'fp32'")
    return exact_paths


def _paths_at(model: PreTrainedModel, parts: list[Projection], option: str, places: Collection[str]) -> set[str]:
    """Return the paths of the parts of a model at some places; raise UserError if a place is not in the model."""
    listed = isinstance(places, Collection) and not isinstance(places, str)
    if not listed or not all(isinstance(place, str) for place in places):
        raise UserError(f"{option} is {shown(places)}; expected a list of places, such as ['ffn_out', '*.down_proj']")
    modules = [name for name, _ in model.named_modules() if name] if places else []
    return {part.path for place in places for part in _parts_at(place, parts, modules, option)}


def _parts_at(place: str, parts: list[Projection], modules: list[str], option: str) -> list[Projection]:
    """Return the parts of a model at a place, such as "ffn_out", "layers.3", "layers.9:12", "layers.3.experts.7" or
    "*.down_proj".

    modules: the paths of all modules. option: the name of the option in messages.
    """
    if layers := _LAYERS.fullmatch(place):
        first, count = int(layers["first"]), parts[-1].layer + 1
        end = int(layers["end"] or first + 1)
        if not first < end <= count:
            expected = f"of a model with {count} layers; expected some of layers.0:{count}"
            raise UserError(f"{option} has '{place}', {expected}")
        in_layers = [part for part in parts if first <= part.layer < end]
        if layers["expert"] is None:
            return in_layers
        matching = [part for part in in_layers if part.expert == int(layers["expert"])]
        if not matching:
            count = len({part.expert for part in in_layers} - {None})
            expected = f"experts.0 to experts.{count - 1}" if count else "places of a model with experts"
            raise UserError(f"{option} has '{place}', of layers with {count} experts; expected {expected}")
        return matching
    at_role = [part for part in parts if part.role == place]
    paths = [part.path for part in parts]
    if not at_role and not fnmatch.filter([*modules, *paths], place):
        hint = "(patterns match whole paths: '*' matches any text)"
        raise unknown_name(f"place in {option}", place, [*paths, *dict.fromkeys(part.role for part in parts)], hint)
    matches = partial(fnmatch.fnmatchcase, pat=place)  # a path, or one of its parents
    return at_role or [part for part in parts if any(map(matches, accumulate(part.path.split("."), "{}.{}".format)))]


def quantized_parts(model: PreTrainedModel, scheme: Scheme) -> list[Projection]:
    """Return the parts of a model that a scheme quantizes if nothing is skipped: projections, and attention
    products."""
    return [
        *(projections(model) if scheme.quantizes_projections else ()),
        *(routers(model) if scheme.routers else ()),
        *(attentions(model) if scheme.attention is not None else ()),
    ]


def _replacement(
    scheme: Scheme, projection: Projection, memo: dict, kind: type | None, calibration: Calibration | None
) -> nn.Module:
    """Return the layer that replaces a projection, quantized or not, under a scheme.

    kind: the class of the layer; None for an exact one. memo: that of `copy.deepcopy` for the model, by which the copy
    of the projection shares its parameters.
    """
    module = projection.module
    if isinstance(module, Int8Linear):
        raise UserError("this model keeps only int8 codes of its weights; quantize the original model")
    quantized = isinstance(module, QuantizedLinear)
    if not quantized:
        check_plain(projection)
    check_hooks(projection.path, module, same_weights=not (kind and scheme.quantizes_projections))
    exact = _without_hooks(module.projection if quantized else module, memo)
    new = exact
    if kind and scheme.quantizes_projections:
        calibrated = scheme.at(projection.role).needs_calibration
        new = kind(exact, scheme, projection.role, calibration.of(projection) if calibrated else None)
    if quantized and kind is QuantizedLinear and new is not exact:
        new.share_codes(module)
    hand_over_hooks(module, new)
    return new.train(module.training)


def _sharing_storage(parameter: nn.Parameter) -> nn.Parameter:
    """Return a new parameter on the same storage; a normal one if accelerate emptied the parameter in inference
    mode."""
    emptied = parameter.is_meta and parameter.is_inference()
    learns = parameter.requires_grad and not parameter.is_inference()  # torch refuses others
    return nn.Parameter(torch.empty_like(parameter) if emptied else parameter.detach(), learns)


def _without_hooks(module: nn.Module, memo: dict) -> nn.Module:
    """Return a copy of a plain projection with the parameters of the memo and without hooks.

    It is not a deep copy, because hooks may refer to the whole model, which would be copied before its projections are
    known.
    """
    bare = type(module).__new__(type(module))
    nn.Module.__init__(bare)
    vars(bare).update({name: value for name, value in vars(module).items() if name[0] != "_" and name != "forward"})
    for name, parameter in module._parameters.items():
        bare.register_parameter(name, None if parameter is None else memo[id(parameter)])
    return bare
