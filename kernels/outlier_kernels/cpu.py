"""Int8 products on the int8 units of CPUs (AVX-512 VNNI), through oneDNN.

oneDNN multiplies unsigned activations (zero point 128) with weights in a layout of its own, and scales the outputs'
columns while they are in cache. That layout is all that is kept of a weight: any of its columns comes back exactly as
the product with a one-hot row.
"""

from typing import NamedTuple

import torch

from outlier_kernels.formats import ROWS, Quantizer
from outlier_kernels.reference import CODE_MAX, Quantized, outlier_columns

LARGEST_K = 66_000  # features in one sum of products of up to 255 · 127: k · 32385 < 2^31
# On AMX units oneDNN turns a sum into float32 before it takes the zero point's part, 128 times the sum of an output's
# codes, off again. Below this, sums up to 2^23 stay exact, and larger ones within the rounding of float32.
LARGEST_PART = 2**23
# Adding 1.5 · 2^23 rounds a small float to a whole number, ties to even, that its lowest bits then hold.
ROUND_TO_UINT8 = 12_582_912.0 + 128
FEW = 8  # up to so many outlier columns, one pass over the outputs for each is faster than torch's matrix product


class Packed(NamedTuple):
    """An absmax-quantized weight in oneDNN's layout.

    blocks: the codes, opaque. scale: float32 (outputs, 1) or (1, 1). shape: (outputs, features).
    """

    blocks: torch.Tensor
    scale: torch.Tensor
    shape: tuple[int, int]


def is_supported() -> bool:
    """Whether this processor has the int8 units, and torch was built with oneDNN."""
    return torch.cpu._is_vnni_supported() and torch.backends.mkldnn.is_available()


def serves(weight: Quantized, activations: Quantizer | None = ROWS) -> bool:
    """Whether a weight can be packed for activations: both int8 and absmax, its scales float32, and codes whose sums
    have room for the products."""
    if activations is None or activations.format != "int8" or not activations.symmetric:
        return False
    if not weight.has_exact_sums or weight.zero_point is not None or weight.scale.dtype != torch.float32:
        return False
    if weight.codes.shape[1] > LARGEST_K:
        return False
    sums = weight.codes.sum(1, dtype=torch.int64)
    return 128 * int(sums.abs().max() if len(sums) else 0) < LARGEST_PART


def pack(weight: Quantized) -> Packed:
    """Bring a weight (outputs, features) into oneDNN's layout."""
    # oneDNN takes the memory of a transposed weight, such as GPT-2's, for that of a plain one.
    blocks = torch.ops.onednn.qlinear_prepack(weight.codes.contiguous(), None)
    return Packed(blocks, weight.scale, tuple(weight.codes.shape))


def unpack(weight: Packed) -> Quantized:
    """The codes that were packed, exactly."""
    features = weight.shape[1]
    codes = torch.empty(weight.shape, dtype=torch.int8)
    ones = weight._replace(scale=weight.scale.new_ones(1, 1))
    for start in range(0, features, 256):
        some = torch.arange(start, min(start + 256, features))
        codes[:, some] = _product(_one_hot(some, features), ones).T.to(torch.int8)
    return Quantized(codes, weight.scale)


def linear(
    hidden_states: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    activations: Quantizer = ROWS,
    threshold: float | None = None,
) -> torch.Tensor:
    """`reference.linear` of absmax activations, (tokens, features) to (tokens, outputs)."""
    x = hidden_states.float()
    outliers = _outliers(x, threshold)
    inliers = x.index_fill(1, outliers, 0) if len(outliers) else x
    scale = _absmax(inliers, activations.per_row) / CODE_MAX
    scale = scale.masked_fill_(scale == 0, 1)
    return _finish(hidden_states, inliers / scale, scale, outliers, weight, bias)


def linear_bitsandbytes(
    hidden_states: torch.Tensor, weight: Packed, bias: torch.Tensor | None = None, threshold: float | None = None
) -> torch.Tensor:
    """`reference.linear_bitsandbytes`."""
    x = hidden_states.half().float()
    outliers = _outliers(x, threshold)
    below = x.masked_fill(x.abs() >= threshold, 0) if len(outliers) else x
    absmax = _absmax(below, per_row=True)
    absmax = absmax.masked_fill_(absmax == 0, CODE_MAX)
    scaled = (below * (CODE_MAX / absmax)).index_fill_(1, outliers, 0)
    return _finish(hidden_states, scaled, absmax / CODE_MAX, outliers, weight, bias)


# By the name of an arithmetic.
LINEAR = {
    "exact": linear,
    "bitsandbytes": lambda x, weight, bias, _activations, threshold: linear_bitsandbytes(x, weight, bias, threshold),
}


def _outliers(x: torch.Tensor, threshold: float | None) -> torch.Tensor:
    """Indices of the features with |x| ≥ threshold in some token."""
    if threshold is None:
        return torch.empty(0, dtype=torch.int64)
    return outlier_columns(x, threshold).nonzero()[:, 0]


def _absmax(x: torch.Tensor, per_row: bool) -> torch.Tensor:
    dims = 1 if per_row else (0, 1)
    return torch.maximum(x.amax(dims, keepdim=True), -x.amin(dims, keepdim=True))


def _finish(
    hidden_states: torch.Tensor,
    scaled: torch.Tensor,
    scale: torch.Tensor,
    outliers: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Round, multiply, and add the outlier features' part and the bias."""
    codes = scaled.add_(ROUND_TO_UINT8).view(torch.int32).to(torch.uint8)
    if len(outliers):
        # The outliers' columns of the weight come out of the same product, which reads the whole weight anyway.
        codes = torch.cat([codes, _one_hot(outliers, weight.shape[1])])
    product = _product(codes, weight)
    product, columns = product[: len(hidden_states)], product[len(hidden_states) :]
    torch.addcmul(product.new_zeros(1) if bias is None else bias.float(), product, scale, out=product)
    values = hidden_states[:, outliers].float()
    if len(outliers) <= FEW:
        for value, column in zip(values.unbind(1), columns, strict=True):
            product.addcmul_(value[:, None], column)
    else:
        product.addmm_(values, columns)
    return product.to(hidden_states.dtype)


def _one_hot(features: torch.Tensor, width: int) -> torch.Tensor:
    """Rows, uint8 with zero point 128, that are 1 in one feature."""
    return torch.full((len(features), width), 128, dtype=torch.uint8).scatter_(1, features[:, None], 129)


def _product(codes: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Product of uint8 codes with zero point 128 and a packed weight, times its scales: float32 (tokens, outputs)."""
    scales = weight.scale.flatten().expand(weight.shape[0]).contiguous()
    zeros = torch.zeros(weight.shape[0], dtype=torch.int32)
    operands = (codes, 1.0, 128, weight.blocks, scales, zeros, None)
    return torch.ops.onednn.qlinear_pointwise(*operands, 1.0, 0, torch.float32, "none", [], "")
