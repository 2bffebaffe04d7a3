"""Plans for compressed-tensors and llm-compressor: groups of layers with their arguments, and the layers to ignore.

The library uses one more code for signed integers than we do, −128 to 127 at a scale of max/127.5 (int4: −8 to 7,
max/7.5).
"""

from outlier_kernels.formats import Quantizer
from torch import nn

from outliers.models.anatomy import Projection
from outliers.quantization.plans.assigned import Assigned, patterns
from outliers.quantization.schemes import Scheme

# Our names of formats and granularities, as arguments of `QuantizationArgs`.
NUMBERS = {
    "int8": {"num_bits": 8, "type": "int"},
    "int6": {"num_bits": 6, "type": "int"},
    "int4": {"num_bits": 4, "type": "int"},
    "fp8-e4m3": {"num_bits": 8, "type": "float"},
}
STRATEGIES = {"tensor": "tensor", "row": "token", "column": "channel"}
LINEAR = (nn.Linear,)
FUSED = {"gate_up_proj": ("gate_proj", "up_proj")}  # by our name, the layers of an expert in llm-compressor


def arguments_of(scheme: Scheme) -> dict | None:
    """Return the operands of a scheme as those of a `QuantizationScheme`; None if that cannot express the scheme."""
    operands = {"weights": scheme.weights, "input_activations": scheme.activations}
    operands = {operand: quantizer for operand, quantizer in operands.items() if quantizer}
    if scheme.outlier_threshold is not None or any(used.format not in NUMBERS for used in operands.values()):
        return None
    return {operand: _arguments(used, dynamic=operand == "input_activations") for operand, used in operands.items()}


def _arguments(quantizer: Quantizer, dynamic: bool) -> dict:
    group = {"strategy": "group", "group_size": quantizer.group}
    share = group if quantizer.group else {"strategy": STRATEGIES[quantizer.granularity]}
    return {**NUMBERS[quantizer.format], "symmetric": quantizer.symmetric, **share, "dynamic": dynamic}


def experts_apart(assigned: Assigned) -> Assigned:
    """Rename the projections of experts to the linear layers that llm-compressor splits them into before it
    quantizes."""

    def names(part: Projection) -> list[str]:
        owner, _, name = part.path.rpartition(".")
        layers = (name,) if part.expert is None else FUSED.get(name, (name,))
        return [f"{owner}.{layer}" for layer in layers]

    return assigned.renamed(names)


def compressed_tensors_config(assigned: Assigned) -> dict:
    """Return a `QuantizationConfig` as a dict, for `model_validate` and for a model's configuration.

    The largest group targets every linear layer except those of the other groups and those to ignore.
    """
    rest = max(assigned.groups, key=lambda group: len(group[1]))
    groups = {
        f"group_{number}": {"targets": ["Linear"] if group is rest else patterns(part.path for part in group[1])}
        | group[0]
        for number, group in enumerate(assigned.groups)
    }
    ignored = patterns([*assigned.outside(LINEAR), *assigned.exact_paths])
    return {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ignored}


def recipe_of(assigned: Assigned) -> dict:
    """Return a recipe of llm-compressor, which calibrates and saves: `oneshot(model, recipe=FILE)`."""
    config = compressed_tensors_config(assigned)
    modifier = {name: config[name] for name in ("config_groups", "ignore")}
    return {"quantization_stage": {"quantization_modifiers": {"QuantizationModifier": modifier}}}
