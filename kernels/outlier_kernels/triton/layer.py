"""A linear layer: outlier features, codes of the hidden states, and the product."""

import torch

from outlier_kernels import reference
from outlier_kernels.formats import ROWS, Quantizer
from outlier_kernels.reference import LARGEST_K, Exact, Quantized
from outlier_kernels.triton import has_int8_units
from outlier_kernels.triton.outlier_features import find_outliers
from outlier_kernels.triton.product import multiply
from outlier_kernels.triton.quantization import ALIGNMENT, DTYPES, is_int8, quantize_rows


def linear(
    hidden_states: torch.Tensor,
    weight: Quantized,
    bias: torch.Tensor | None = None,
    activations: Quantizer | None = ROWS,
    threshold: float | None = None,
    exact: Exact | None = None,
) -> torch.Tensor:
    """`reference.linear` without synchronising host and device.

    The int32 sums are exact, and so are the zeropoint terms, which are added in float64, however far from 0 the ranges
    are. Everything after is in float32, as in the reference, but where there are outliers in another order: the outputs
    agree to 1e-5 of the largest. A NaN or inf in a token makes the outputs of that token NaN or inf (of all tokens
    where they share a scale), and hides no outlier of another.

    weight: quantized like the activations, see `serves`. Codes are copied in every call unless they are contiguous with
    a multiple of 16 features, or prepared. exact: where it is given, the host waits for the outliers, and the weight is
    quantized again without them.
    """
    if exact is not None:
        return reference.linear(hidden_states, weight, bias, activations, threshold, exact, linear)
    with torch.cuda.device_of(hidden_states):  # Triton launches on the current device, whatever the tensors are on
        outliers = None if threshold is None else find_outliers(hidden_states, threshold)
        left_out = None if outliers is None else outliers.flags
        quantized = quantize_rows(hidden_states, activations.symmetric, activations.per_row, left_out)
        return multiply(quantized, weight, hidden_states, weight.codes, outliers, bias)


def prepare(weight: Quantized, activations: Quantizer | None) -> Quantized | None:
    """A weight whose rows begin at multiples of 16 bytes, where loads are widest; None if `linear` does not take it."""
    if not serves(weight, activations, torch.float32):
        return None
    features = weight.codes.shape[1]
    return weight._replace(codes=torch.nn.functional.pad(weight.codes, (0, -features % ALIGNMENT))[:, :features])


def serves(weight: Quantized, activations: Quantizer | None, dtype: torch.dtype) -> bool:
    """Whether `linear` takes a weight with activations of a dtype: both int8, and both absmax or both zeropoint."""
    return (
        is_int8(activations)
        and weight.has_exact_sums
        and (weight.zero_point is None) == activations.symmetric
        and dtype in DTYPES
        and weight.codes.shape[1] <= LARGEST_K
        and has_int8_units(weight.codes.device)
    )
