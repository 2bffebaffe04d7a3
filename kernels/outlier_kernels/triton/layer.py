"""A linear layer: one kernel for few tokens; otherwise one each for outlier features, codes of the hidden states, and
the product."""

import torch

from outlier_kernels.formats import ROWS, Quantizer, is_int8
from outlier_kernels.reference import LARGEST_K, Exact, Quantized
from outlier_kernels.states import DTYPES
from outlier_kernels.triton import few, has_int8_units
from outlier_kernels.triton.outlier_features import find_outliers
from outlier_kernels.triton.product import multiply
from outlier_kernels.triton.quantization import ALIGNMENT, quantize
from outlier_kernels.triton.tiles import FEW


def linear(
    hidden_states: torch.Tensor,
    weight: Quantized,
    bias: torch.Tensor | None = None,
    activations: Quantizer | None = ROWS,
    threshold: float | None = None,
    exact: Exact | None = None,
) -> torch.Tensor:
    """Compute `reference.linear` without synchronizing host and device.

    The int32 sums are exact, and so are the zeropoint terms, which are added in float64, however far from 0 the ranges
    are. Everything after is in float32 as in the reference, but with outliers in another order: the outputs agree to
    1e-5 of the largest. A NaN or inf in a token makes the outputs of that token NaN or inf (of all tokens if they share
    a scale), and hides no outlier of another token.

    weight: quantized like the activations, see `serves`. Codes are copied in every call unless they are contiguous with
    a multiple of 16 features, or prepared. exact: if given with a threshold, its codes are made in every call without
    the outlier features.
    """
    outliers = left_out = limits = None
    exact = None if threshold is None else exact
    if exact is None and len(hidden_states) <= FEW:
        return few.multiply(hidden_states, weight, bias, activations, threshold)
    if threshold is not None:
        outliers = find_outliers(hidden_states, threshold, not activations.per_row)
        left_out, limits = outliers.flags, outliers.limits
    quantized = quantize(hidden_states, activations, left_out, limits, buffer=0)
    if exact is None:
        return multiply(quantized, weight, hidden_states, weight.codes, outliers, bias)
    weight = quantize(exact.weight, exact.quantizer, left_out, buffer=1)
    return multiply(quantized, weight, hidden_states, exact.weight, outliers, bias)


def prepare(weight: Quantized, activations: Quantizer | None) -> Quantized | None:
    """Return a weight whose rows begin at multiples of 16 bytes, where loads are widest; None if `linear` does not take
    it."""
    if not serves(weight, activations, torch.float32):
        return None
    features = weight.codes.shape[1]
    return weight._replace(codes=torch.nn.functional.pad(weight.codes, (0, -features % ALIGNMENT))[:, :features])


def serves(weight: Quantized, activations: Quantizer | None, dtype: torch.dtype) -> bool:
    """Return whether `linear` takes a weight with activations of a dtype: both int8, and both absmax or both
    zeropoint."""
    return (
        is_int8(activations)
        and weight.has_exact_sums
        and (weight.zero_point is None) == activations.symmetric
        and dtype in DTYPES
        and weight.codes.shape[1] <= LARGEST_K
        and has_int8_units(weight.codes.device)
    )
