"""Row fields that describe a scheme."""

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

from outlier_kernels.formats import Quantizer
from transformers import PreTrainedModel

from outliers.models.anatomy import Projection, projections
from outliers.models.anatomy.weights import device_of
from outliers.quantization.convert import resolve_instead, skipped
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear, kernels_of, stored_weight
from outliers.quantization.schemes import Scheme, reports_bits, scheme_fields


def row_fields(
    scheme: Scheme,
    model: PreTrainedModel | None = None,
    skip: Collection[str] = (),
    only: Collection[str] = (),
    instead: Mapping[Scheme, Collection[str]] = MappingProxyType({}),
) -> dict:
    """Return the row fields that identify a scheme beside its name; empty if nothing is quantized.

    These are the fields of `scheme_fields`; kernels: the names of the kernels that run it; outlier_weights: whether
    outlier features are multiplied with exact weights or dequantized ones; and for schemes other than the paper's the
    fields of `bits_of`.

    Args:
        scheme: the scheme that runs.
        model: the model it runs in, already under the scheme, or still exact if exact weights will be kept; None for a
            row without kernels.
        skip, only, instead: as for `outliers.quantize`.
    """
    if not scheme.quantizes and not instead:
        return {}
    modules = [] if model is None else [projection.module for projection in projections(model)]
    small = any(isinstance(module, Int8Linear) for module in modules)
    fields = scheme_fields(scheme, skip, only)
    if instead:
        fields["instead"] = [f"{other.name}@{'/'.join(sorted(places))}" for other, places in instead.items()]
    if model is not None and scheme.quantizes_projections:
        layers = [module for module in modules if isinstance(module, Int8Linear | QuantizedLinear)]
        names = {layer.kernels(model.dtype) for layer in layers} or {kernels_of(scheme, device_of(model), model.dtype)}
        fields["kernels"] = ", ".join(sorted(names))
        if reports_bits(scheme):
            exact_paths = skipped(model, skip, scheme, only)
            fields |= bits_of(scheme, model, exact_paths, resolve_instead(model, scheme, exact_paths, instead))
    if scheme.outlier_threshold is not None:
        fields["outlier_weights"] = "exact" if scheme.exact_outliers and not small else "dequantized"
    return fields


def bits_of(scheme: Scheme, model: PreTrainedModel, exact_paths: set[str], schemes: Mapping[str, Scheme]) -> dict:
    """Return weight_bits and activation_bits of the quantized operands: average bits per value, with scales and zero
    points.

    The average is over the weights, or the inputs, of a model's projections. Outlier features in 16 bits are not
    counted, nor scales that all activations of a block share.

    schemes: those that replace `scheme`, by path.
    """
    quantized = [projection for projection in projections(model) if projection.path not in exact_paths]
    averages = {}
    for operand, field in (("weights", "weight_bits"), ("activations", "activation_bits")):
        if getattr(scheme, operand):
            quantizers = [getattr(schemes.get(part.path, scheme).at(part.role), operand) for part in quantized]
            pairs = zip(quantized, quantizers, strict=True)
            counts = [_count(part, quantizer, operand) for part, quantizer in pairs if quantizer]
            values, bits = map(sum, zip(*counts, strict=True))
            averages[field] = round(bits / values, 4)
    return averages


def _count(projection: Projection, quantizer: Quantizer, operand: str) -> tuple[int, float]:
    """Return the number of values of a projection's operand, and the number of their bits; for activations per
    token."""
    module, ours = projection.module, Int8Linear | QuantizedLinear
    outputs, features = module.shape if isinstance(module, ours) else stored_weight(module).shape
    rows, all_rows = (outputs, outputs) if operand == "weights" else (1, math.inf)
    return rows * features, rows * features * quantizer.bits(features, all_rows)
