"""What a row says of the scheme that it was measured under."""

from collections.abc import Collection

from transformers import PreTrainedModel

from outliers.models.anatomy import projections
from outliers.quantization.int8 import Int8Linear
from outliers.quantization.linear import QuantizedLinear, path_under
from outliers.quantization.schemes import Scheme, said_of


def row_fields(scheme: Scheme, model: PreTrainedModel | None = None, skip: Collection[str] = ()) -> dict:
    """What identifies a scheme beside its name, and which kernels run it; nothing where it quantizes nothing.

    They are those of `said_of`, and outlier_weights: whether outlier features meet exact weights or those rebuilt from
    codes.

    Args:
        scheme: as it runs.
        model: where it runs, under the scheme already, or not yet, when exact weights will be kept; None for a row that
            says nothing of kernels.
        skip: as for `outliers.quantize`.
    """
    if not scheme.quantizes:
        return {}
    modules = [] if model is None else [projection.module for projection in projections(model)]
    small = any(isinstance(module, Int8Linear) for module in modules)
    fields = said_of(scheme, skip)
    if model is not None:
        fields["kernels"] = kernels_of(scheme, model)
    if scheme.outlier_threshold is not None:
        fields["outlier_weights"] = "exact" if scheme.exact_outliers and not small else "dequantized"
    return fields


def kernels_of(scheme: Scheme, model: PreTrainedModel) -> str:
    """Which paths of the kernels multiply a model's projections, as `outlier_kernels.dispatch.path_of` decides."""
    quantized = [one.module for one in projections(model) if isinstance(one.module, Int8Linear | QuantizedLinear)]
    paths = {module.path(model.dtype) for module in quantized} or {path_under(scheme, model.device, model.dtype)}
    return ", ".join(sorted(paths))
