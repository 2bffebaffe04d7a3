"""What a row says of the scheme that it was measured under."""

import math
from collections.abc import Collection

from transformers import PreTrainedModel

from outliers.models.anatomy import projections
from outliers.quantization.convert import skipped
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear, path_under, stored_weight
from outliers.quantization.schemes import Scheme, said_of, says_bits


def row_fields(
    scheme: Scheme, model: PreTrainedModel | None = None, skip: Collection[str] = (), only: Collection[str] = ()
) -> dict:
    """What identifies a scheme beside its name, and which kernels run it; nothing where it quantizes nothing.

    They are those of `said_of`; outlier_weights: whether outlier features meet exact weights or those rebuilt from
    codes; and, of other schemes than the paper's, what `bits_of` says.

    Args:
        scheme: as it runs.
        model: where it runs, under the scheme already, or not yet, when exact weights will be kept; None for a row that
            says nothing of kernels.
        skip, only: as for `outliers.quantize`.
    """
    if not scheme.quantizes:
        return {}
    modules = [] if model is None else [projection.module for projection in projections(model)]
    small = any(isinstance(module, Int8Linear) for module in modules)
    fields = said_of(scheme, skip, only)
    if model is not None and scheme.quantizes_projections:
        fields["kernels"] = kernels_of(scheme, model)
        fields |= bits_of(scheme, model, skip, only) if says_bits(scheme) else {}
    if scheme.outlier_threshold is not None:
        fields["outlier_weights"] = "exact" if scheme.exact_outliers and not small else "dequantized"
    return fields


def kernels_of(scheme: Scheme, model: PreTrainedModel) -> str:
    """Which paths of the kernels multiply a model's projections, as `outlier_kernels.dispatch.path_of` decides."""
    quantized = [one.module for one in projections(model) if isinstance(one.module, Int8Linear | QuantizedLinear)]
    paths = {module.path(model.dtype) for module in quantized} or {path_under(scheme, model.device, model.dtype)}
    return ", ".join(sorted(paths))


def bits_of(scheme: Scheme, model: PreTrainedModel, skip: Collection[str] = (), only: Collection[str] = ()) -> dict:
    """weight_bits and activation_bits of an operand that is quantized: bits that the codes of a value and its share of
    scales and zero points take, on average over the weights of a model's projections, or over their inputs.

    Outlier features in 16 bits are not counted, nor scales that all activations of a block share.
    """
    left = skipped(model, skip, scheme, only)
    modules = [projection.module for projection in projections(model) if projection.path not in left]
    own = Int8Linear | QuantizedLinear
    shapes = [module.shape if isinstance(module, own) else stored_weight(module).shape for module in modules]
    values = {
        "weight_bits": [(outputs * features, features, outputs) for outputs, features in shapes],
        "activation_bits": [(features, features, math.inf) for _, features in shapes],
    }
    quantizers = {"weight_bits": scheme.weights, "activation_bits": scheme.activations}
    return {
        field: round(sum(count * quantizer.bits(*size) for count, *size in of_field) / sum(c for c, *_ in of_field), 4)
        for field, of_field in values.items()
        if (quantizer := quantizers[field])
    }
