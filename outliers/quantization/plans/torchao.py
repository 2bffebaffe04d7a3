"""Plans for torchao: a configuration for the full name of each layer.

Like compressed-tensors, torchao uses one more code for signed integers than we do, −128 to 127 at a scale of max/127.5.
"""

import json
from collections import OrderedDict
from typing import TYPE_CHECKING

from outlier_kernels.formats import Quantizer

from outliers.errors import UserError
from outliers.models.anatomy import Projection
from outliers.quantization.plans.assigned import Assigned
from outliers.quantization.schemes import Scheme

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig
    from torchao.quantization import FqnToConfig

INT8 = "int8 absmax"
FEW_BITS = {"int6 absmax": "int6", "int4 absmax": "int4"}  # dtypes of torch


def torchao_config(scheme: Scheme) -> "AOBaseConfig | None":
    """Return the torchao configuration of a scheme; None if there is none, or torchao computes it differently."""
    import torch
    from torchao import quantization

    if scheme.outlier_threshold is not None or scheme.weights is None:
        return None
    shares = {"tensor": quantization.PerTensor(), "row": quantization.PerRow(), "column": quantization.PerRow()}
    group = quantization.PerGroup(scheme.weights.group) if scheme.weights.group else None
    weights = group or shares.get(scheme.weights.granularity)
    activations = scheme.activations and shares.get(scheme.activations.granularity)
    match _format_and_scale(scheme.activations), _format_and_scale(scheme.weights):
        case None, numbers if numbers == INT8:
            return quantization.Int8WeightOnlyConfig(granularity=weights)
        case None, numbers if numbers in FEW_BITS and scheme.weights.per_row:
            kind = getattr(torch, FEW_BITS[numbers])
            return quantization.IntxWeightOnlyConfig(kind, group or quantization.PerAxis(0))
        case inputs, numbers if inputs == numbers == INT8 and activations and not group:
            return quantization.Int8DynamicActivationInt8WeightConfig(granularity=[activations, weights])
    return None


def _format_and_scale(quantizer: Quantizer | None) -> str | None:
    """Return a quantizer's format and kind of scale, such as "int8 absmax"."""
    return quantizer and f"{quantizer.format} {'absmax' if quantizer.symmetric else 'zeropoint'}"


def stacked(assigned: Assigned) -> Assigned:
    """Name the projections of all experts of a layer as the one parameter that holds their weights.

    torchao multiplies by one expert of such a parameter in `linear`, as transformers' experts function `eager` does.
    Parameters without a name stay exact.

    Raises:
        UserError: a plan treats the experts of a layer differently, or torchao cannot multiply by them.
    """
    from torchao.quantization import IntxWeightOnlyConfig, PerTensor

    under = {part.path: config for config, parts in assigned.groups for part in parts}
    found: dict[str, AOBaseConfig | None] = {}

    def names(part: Projection) -> list[str]:
        if part.expert is None:
            return [part.path]
        owner, _, projection = part.path.rsplit(".", 2)
        name, config = f"{owner}.{projection}", under.get(part.path)
        if found.setdefault(name, config) != config:
            raise UserError(
                f"'{part.path}' is of an expert, and for torchao all experts of a layer are one parameter, '{name}'; "
                "expected a plan that treats them alike, or format llm-compressor"
            )
        if config is None:
            return []
        *_, share = config.granularity if isinstance(config.granularity, list) else [config.granularity]
        transposed = part.module.is_transposed
        if transposed or isinstance(config, IntxWeightOnlyConfig) or isinstance(share, PerTensor):
            fault = "weights of (inputs, outputs)" if transposed else "weights of three dimensions by this scheme"
            raise UserError(
                f"'{part.path}' is of an expert, and torchao cannot multiply by {fault}; expected a plan that leaves "
                "experts exact or has int8 weights by column or group there, or format llm-compressor"
            )
        return [name]

    return assigned.renamed(names)


def by_name(assigned: Assigned) -> "FqnToConfig":
    """Return the configuration of each projection, None for exact ones; `quantize_` leaves unnamed layers alone."""
    from torchao.quantization import FqnToConfig

    by_path = OrderedDict((part.path, config) for config, parts in assigned.groups for part in parts)
    return FqnToConfig(by_path | dict.fromkeys(assigned.exact_paths))


def as_json(config: "FqnToConfig") -> str:
    """Return a configuration as JSON for `torchao.core.config.config_from_dict`."""
    from torchao.core.config import config_to_dict

    return json.dumps(config_to_dict(config), indent=2) + "\n"
