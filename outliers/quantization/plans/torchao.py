"""Plans for torchao: a configuration by the full name of each layer.

Like compressed-tensors, it codes signed integers by one more than we do, −128 to 127 at a scale of max/127.5.
"""

import json
from collections import OrderedDict
from typing import TYPE_CHECKING

from outlier_kernels.formats import Quantizer

from outliers.quantization.plans.assigned import Assigned
from outliers.quantization.schemes import Scheme

if TYPE_CHECKING:
    from torchao.core.config import AOBaseConfig
    from torchao.quantization import FqnToConfig

INT8 = "int8 absmax"
FEW_BITS = {"int6 absmax": "int6", "int4 absmax": "int4"}  # types of torch


def config_of(scheme: Scheme) -> "AOBaseConfig | None":
    """The configuration of a layer; None for a scheme that has none, or one that torchao computes otherwise."""
    import torch
    from torchao import quantization

    if scheme.outlier_threshold is not None or scheme.weights is None:
        return None
    shares = {"tensor": quantization.PerTensor(), "row": quantization.PerRow(), "column": quantization.PerRow()}
    group = quantization.PerGroup(scheme.weights.group) if scheme.weights.group else None
    weights = group or shares.get(scheme.weights.granularity)
    activations = scheme.activations and shares.get(scheme.activations.granularity)
    match _numbers(scheme.activations), _numbers(scheme.weights):
        case None, numbers if numbers == INT8:
            return quantization.Int8WeightOnlyConfig(granularity=weights)
        case None, numbers if numbers in FEW_BITS and scheme.weights.per_row:
            kind = getattr(torch, FEW_BITS[numbers])
            return quantization.IntxWeightOnlyConfig(kind, group or quantization.PerAxis(0))
        case inputs, numbers if inputs == numbers == INT8 and activations and not group:
            return quantization.Int8DynamicActivationInt8WeightConfig(granularity=[activations, weights])
    return None


def _numbers(quantizer: Quantizer | None) -> str | None:
    """A format and its kind of scale, whatever shares it."""
    return quantizer and f"{quantizer.format} {'absmax' if quantizer.symmetric else 'zeropoint'}"


def by_name(assigned: Assigned) -> "FqnToConfig":
    """A configuration for each projection, None for the exact ones; `quantize_` leaves all that is not named."""
    from torchao.quantization import FqnToConfig

    by_path = OrderedDict((part.path, config) for config, parts in assigned.groups for part in parts)
    return FqnToConfig(by_path | dict.fromkeys(assigned.exact_paths))


def as_json(config: "FqnToConfig") -> str:
    """A configuration as `torchao.core.config.config_from_dict` reads it."""
    from torchao.core.config import config_to_dict

    return json.dumps(config_to_dict(config), indent=2) + "\n"
