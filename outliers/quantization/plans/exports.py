"""The export of plans to the formats of other libraries."""

import importlib.util
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import yaml
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from outliers.errors import UserError, unknown_name
from outliers.models.anatomy import Projection, check_plain, projections
from outliers.quantization.convert import resolve_instead
from outliers.quantization.plans import compressed_tensors, llama_quantize, torchao
from outliers.quantization.plans.assigned import Assigned
from outliers.quantization.plans.plan import Plan
from outliers.quantization.schemes import SCHEMES, Scheme, get_scheme, parse_grouped

IN_GROUPS = "g64"  # example of a group size, for messages


class Export(NamedTuple):
    """A format in which a plan can be written.

    file: name of an exported file. express: returns the library's object or text that stands for a scheme without
    remedies; None if it has none. write: returns the library's object for a whole plan, whose schemes are expressed.
    text: returns that object as the content of a file. layer_types: the layers that the library quantizes. package: the
    library, if the export consists of its objects. experts: returns the plan with the projections of experts under the
    library's names.
    """

    file: str
    express: Callable[[Scheme], object | None]
    write: Callable[[Assigned], object]
    text: Callable[[object], str]
    layer_types: tuple[type[nn.Module], ...] = (nn.Linear, Conv1D)
    package: str | None = None
    experts: Callable[[Assigned], Assigned] = lambda assigned: assigned


def _as_json(exported: dict) -> str:
    return json.dumps(exported, indent=2) + "\n"


def _threshold(scheme: Scheme) -> float | None:
    """Return the outlier threshold of bitsandbytes for a scheme, 0 without one; None unless the scheme is
    vector-wise int8."""
    vector_wise = str(scheme.activations), str(scheme.weights)
    return (scheme.outlier_threshold or 0.0) if vector_wise == ("int8 row absmax", "int8 column absmax") else None


def _bits_and_bytes(assigned: Assigned) -> dict:
    """Return the arguments of `transformers.BitsAndBytesConfig`.

    A list of modules to skip replaces the default, the head, so the list includes all layers that are not projections.
    """
    threshold, *others = dict.fromkeys(threshold for threshold, _ in assigned.groups)
    if others:
        raise UserError(
            f"'bitsandbytes' stores one scheme per model, and this plan has {len(assigned.groups)}; expected a plan "
            "without schemes in the place of another, or a format such as compressed-tensors"
        )
    skipped = [*assigned.exact_paths, *assigned.outside((nn.Linear, Conv1D))]
    return {"load_in_8bit": True, "llm_int8_threshold": threshold, "llm_int8_skip_modules": skipped}


def _without_experts(assigned: Assigned) -> Assigned:
    """Leave out experts, because bitsandbytes does not quantize the tensor with all experts of a layer; warn of
    them."""
    remaining = assigned.renamed(lambda part: [part.path] if part.expert is None else [])
    before, after = (sum(len(parts) for _, parts in plan.groups) for plan in (assigned, remaining))
    count = before - after
    if count:
        warnings.warn(
            f"bitsandbytes leaves all experts exact, {count} projections that the plan quantizes: it has no 8-bit "
            "weights of three dimensions",
            stacklevel=2,
        )
    return replace(remaining, groups=[group for group in remaining.groups if group[1]])


#: Every format of an export by its name.
EXPORTS = {
    "compressed-tensors": Export(
        "compressed-tensors.json",
        compressed_tensors.arguments_of,
        compressed_tensors.compressed_tensors_config,
        _as_json,
        layer_types=(nn.Linear,),
        experts=compressed_tensors.experts_apart,
    ),
    "llm-compressor": Export(
        "recipe.yaml",
        compressed_tensors.arguments_of,
        compressed_tensors.recipe_of,
        partial(yaml.safe_dump, sort_keys=False, width=120),
        layer_types=(nn.Linear,),
        experts=compressed_tensors.experts_apart,
    ),
    "torchao": Export(
        "torchao.json",
        torchao.torchao_config,
        torchao.by_name,
        torchao.as_json,
        layer_types=(nn.Linear,),
        package="torchao",
        experts=torchao.stacked,
    ),
    "bitsandbytes": Export("bitsandbytes.json", _threshold, _bits_and_bytes, _as_json, experts=_without_experts),
    "llama-quantize": Export("tensor-types.txt", llama_quantize.type_of, llama_quantize.lines_of, str),
}


def export(plan: Plan, format: str, model: PreTrainedModel) -> Any:
    """Return a plan in the format of another library.

    Args:
        plan: a plan of this model.
        format: "compressed-tensors", a quantization configuration as a dict; "llm-compressor", the recipe of that
            library as a dict; "torchao", its `FqnToConfig`; "bitsandbytes", the arguments of `BitsAndBytesConfig` of
            transformers, with `llm_int8_skip_modules`; "llama-quantize", the lines of a file for its option
            `--tensor-type-file`, where exact weights keep the model's dtype.
        model: the unquantized model of transformers; it is not changed, and may be on the meta device.

    Raises:
        UserError: the format is unknown; the plan is of another model, or leaves all of it exact; the format cannot
            express a scheme, several at once, or that of an expert; its library does not quantize the layers of this
            architecture, or is needed and not installed.

    Warns of experts that bitsandbytes leaves exact.
    """
    if format not in EXPORTS:
        raise unknown_name("format of an export", format, EXPORTS)
    target, parts = EXPORTS[format], list(projections(model))
    plan.check(part.path for part in parts)
    if target.package and importlib.util.find_spec(target.package) is None:
        raise UserError(f"format '{format}' needs the library {target.package}; expected it installed: pip install it")
    for part in parts:
        check_plain(part)
        if not isinstance(part.module, target.layer_types):
            raise UserError(
                f"'{part.path}' is a {type(part.module).__name__}, and '{format}' quantizes "
                f"{' and '.join(kind.__name__ for kind in target.layer_types)} alone; expected another format or model"
            )
    assigned = target.experts(_assigned(plan, format, model, parts))
    if not assigned.groups:
        raise UserError(f"the plan of '{plan.model}' leaves every projection exact; expected one under a scheme")
    return target.write(assigned)


def export_text(plan: Plan, format: str, model: PreTrainedModel) -> str:
    """Return the result of `export` as the text of a file: JSON, YAML or lines. Raises as `export` does."""
    exported = export(plan, format, model)
    return EXPORTS[format].text(exported)


def _assigned(plan: Plan, format: str, model: PreTrainedModel, parts: list[Projection]) -> Assigned:
    scheme = get_scheme(plan.scheme)
    schemes = resolve_instead(model, scheme, set(plan.exact), plan.instead)
    exact: list[Projection] = []
    groups: dict[Scheme, list[Projection]] = {scheme: []}
    for part in parts:
        part_scheme = schemes.get(part.path, scheme)
        kept = part.path in plan.exact or not part_scheme.quantizes
        (exact if kept else groups.setdefault(part_scheme, [])).append(part)
    return Assigned(model, [(_expression(scheme, format), group) for scheme, group in groups.items() if group], exact)


def _expression(scheme: Scheme, format: str) -> object:
    """Return the format's expression of a scheme; raise UserError if there is none, because a substitute would be
    another plan."""
    express = EXPORTS[format].express
    expression = None if scheme.remedies else express(scheme)  # no library knows our remedies
    if expression is None:
        grouped = filter(None, [parse_grouped(f"{name}-{IN_GROUPS}") for name in SCHEMES])
        known = [one.name for one in [*SCHEMES.values(), *grouped] if one.quantizes and express(one) is not None]
        raise UserError(
            f"'{format}' cannot express scheme '{scheme.name}' ({scheme.description}); expected one that it can "
            f"express: {', '.join(known)}"
        )
    return expression
