"""Products in int8 whose gradients are products in int8 as well, for training (LLM.int8(), appendix E).

A linear layer Y = X·Wᵀ takes three: itself, and from the gradient G of Y those of its input, G·W, and of its weight,
Gᵀ·X. Each has absmax scales for the rows of its left operand and the columns of its right one (vector-wise, equation
6). So have the products of attention, those of queries with keys and of probabilities with values.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce, wraps

import torch
from outlier_kernels import dispatch, reference
from outlier_kernels.formats import ROWS, Quantizer
from outlier_kernels.reference import CODE_MAX, EXACT_IN_FLOATS, Quantized

from outliers.criterion import check_threshold
from outliers.errors import UserError, shown

COLUMNS = Quantizer("int8", "column")


@dataclass(frozen=True)
class Products:
    """How the products of a layer and of its gradients are computed.

    decomposition: of the inner dimension of a product the share that is multiplied in 16 bits, those with the largest
    magnitudes in the left operand (appendix E has 0, 0.02, 0.05 and 0.1); of Gᵀ·X, whose inner dimension are tokens,
    instead the columns of such features of X. outlier_threshold: the features of X with an entry of at least this
    magnitude instead, in X·Wᵀ and Gᵀ·X; gradients have another scale and are not compared with it. stochastic: whether
    gradients are rounded up as often as they are near to it, so that their codes are right on average. exact: whether
    nothing is quantized.

    Raises:
        UserError: a number is out of range, or both kinds of decomposition are asked for.
    """

    decomposition: float = 0.0
    outlier_threshold: float | None = None
    stochastic: bool = False
    exact: bool = False

    def __post_init__(self):
        if not isinstance(self.decomposition, (int, float)) or not 0 <= self.decomposition < 1:
            raise UserError(f"decomposition is {shown(self.decomposition)}; expected a share of the features, below 1")
        object.__setattr__(self, "decomposition", float(self.decomposition))
        if self.outlier_threshold is not None:
            object.__setattr__(self, "outlier_threshold", check_threshold("outlier_threshold", self.outlier_threshold))
            if self.decomposition:
                raise UserError("decomposition by a share of the features and by a threshold; expected one of the two")


def product(left: torch.Tensor, right: torch.Tensor, how: Products) -> torch.Tensor:
    """left · rightᵀ as `how` says, with gradients for both.

    Args:
        left: float (m, k), such as hidden states (tokens, features); or (..., m, k), each matrix for itself.
        right: float (n, k), such as a weight (outputs, features); or (..., n, k).

    Returns:
        (..., m, n) in the dtype of `left`.
    """
    return _Product.apply(left, right, how)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(left, right, how):
        return left @ right.mT if how.exact else forward_product(left, right, how.decomposition, how.outlier_threshold)

    @staticmethod
    def setup_context(ctx, inputs, output):
        left, right, ctx.how = inputs
        ctx.save_for_backward(left, right)

    @staticmethod
    def backward(ctx, gradient):
        (left, right), how = ctx.saved_tensors, ctx.how
        products = EXACT_GRADIENTS if how.exact else (gradient_of_left, gradient_of_right)
        arguments = () if how.exact else (how.decomposition, how.outlier_threshold, how.stochastic)
        operands = (right, left)
        found = [
            of_one(gradient, operand, *arguments) if needed else None
            for of_one, operand, needed in zip(products, operands, ctx.needs_input_grad, strict=False)
        ]
        return *found, None


EXACT_GRADIENTS = (lambda gradient, right: gradient @ right, lambda gradient, left: gradient.mT @ left)


def _without_autocast(compute: Callable) -> Callable:
    """The same with products in the dtypes of their operands, also where somebody asks for others."""

    @wraps(compute)
    def computing(first: torch.Tensor, *others):
        with torch.autocast(first.device.type, enabled=False):
            return compute(first, *others)

    return computing


# Operators, so that a compiler, which cannot know how many features are outliers, meets only shapes.


@torch.library.custom_op("outliers::forward_product", mutates_args=())
@_without_autocast
def forward_product(left: torch.Tensor, right: torch.Tensor, share: float, threshold: float | None) -> torch.Tensor:
    """X·Wᵀ, in the dtype of X."""
    return _decomposed(left, right, outliers_of(left, share, threshold), False).to(left.dtype)


@forward_product.register_fake
def _(left, right, _share, _threshold):
    return left.new_empty(*left.shape[:-1], right.shape[-2])


@torch.library.custom_op("outliers::gradient_of_left", mutates_args=())
@_without_autocast
def gradient_of_left(
    gradient: torch.Tensor, right: torch.Tensor, share: float, _threshold: float | None, stochastic: bool
) -> torch.Tensor:
    """G·W, in the dtype of G."""
    return _decomposed(gradient, right.mT, outliers_of(gradient, share), stochastic).to(gradient.dtype)


@gradient_of_left.register_fake
def _(gradient, right, *_how):
    return gradient.new_empty(*gradient.shape[:-1], right.shape[-1])


@torch.library.custom_op("outliers::gradient_of_right", mutates_args=())
@_without_autocast
def gradient_of_right(
    gradient: torch.Tensor, left: torch.Tensor, share: float, threshold: float | None, stochastic: bool
) -> torch.Tensor:
    """Gᵀ·X, in the dtype of G; autograd brings it into that of W."""
    found, outliers = _vector_wise(gradient.mT, left.mT, stochastic), outliers_of(left, share, threshold)
    if outliers is not None and outliers.ndim == 1:
        found[:, outliers] = _in_16_bits(gradient.mT, left[:, outliers].mT).to(found.dtype)
    elif outliers is not None:  # of each matrix others
        found = torch.where(outliers[..., None, :], _in_16_bits(gradient.mT, left.mT), found)
    return found.to(gradient.dtype)


@gradient_of_right.register_fake
def _(gradient, left, *_how):
    return gradient.new_empty(*gradient.shape[:-2], gradient.shape[-1], left.shape[-1])


def outliers_of(left: torch.Tensor, share: float, threshold: float | None = None) -> torch.Tensor | None:
    """Which inner dimensions of a left operand (..., m, k) are multiplied in 16 bits, bool (..., k); None for none.

    share: of them, those with the largest magnitudes, of equal ones the first; at least one where it is above 0.
    threshold: those with an entry of at least this magnitude, instead.
    """
    magnitudes = left.abs().amax(-2)
    if threshold is not None:
        found = magnitudes >= threshold
        return found if found.any() else None
    count = math.ceil(share * magnitudes.shape[-1])
    if not count:
        return None
    largest = magnitudes.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(magnitudes, dtype=torch.bool).scatter_(-1, largest, True)


def _decomposed(
    left: torch.Tensor, right: torch.Tensor, outliers: torch.Tensor | None, stochastic: bool
) -> torch.Tensor:
    """left · rightᵀ, the outliers (equation 8) in 16 bits: float (..., m, n)."""
    if outliers is None:
        return _vector_wise(left, right, stochastic)
    of_rows = outliers[..., None, :]
    rest = [operand.masked_fill(of_rows, 0) for operand in (left, right)]  # zeros change no absmax scale
    if outliers.ndim == 1:
        in_16_bits = _in_16_bits(left[:, outliers], right[:, outliers])
    else:  # of each matrix others
        in_16_bits = _in_16_bits(left.masked_fill(~of_rows, 0), right)
    return _vector_wise(*rest, stochastic) + in_16_bits


def _in_16_bits(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """left · rightᵀ: in float16 on a GPU, in float32 at least on a CPU, as `reference.outlier_product` has it."""
    dtype = torch.promote_types(left.dtype, torch.float32)
    narrow = torch.float16 if left.is_cuda and dtype == torch.float32 else dtype
    return (left.to(narrow) @ right.to(narrow).mT).to(dtype)


def _vector_wise(left: torch.Tensor, right: torch.Tensor, stochastic: bool) -> torch.Tensor:
    """left · rightᵀ in int8, with a scale for each row of either: float (..., m, n).

    stochastic: whether the left operand is rounded by chance.
    """
    if left.ndim == 2 and not stochastic:
        left = left.to(torch.promote_types(left.dtype, torch.float32))
        return dispatch.linear(left, dispatch.quantize_weight(right, COLUMNS), activations=ROWS)
    of_left, of_right = quantize_rows(left, stochastic), quantize_rows(right)
    if left.ndim == 2:
        return reference.matmul(of_left, of_right)
    return _batched_sums(of_left.codes, of_right.codes) * of_left.scale * of_right.scale.mT


def quantize_rows(matrix: torch.Tensor, stochastic: bool = False) -> Quantized:
    """Absmax codes of (..., m, k) with a scale a row (..., m, 1); stochastic: rounded up with a chance of how near the
    value is to the code above it."""
    if not stochastic:
        made = reference.quantize(matrix.reshape(-1, matrix.shape[-1]), ROWS)
        return Quantized(made.codes.view(matrix.shape), made.scale.view(*matrix.shape[:-1], 1))
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    scale = reference.absmax_scale(matrix.amin(-1, keepdim=True), matrix.amax(-1, keepdim=True))
    codes = (matrix / scale).add_(torch.rand_like(matrix)).floor_().clamp_(-CODE_MAX, CODE_MAX)
    return Quantized(codes.to(torch.int8), scale)


def _batched_sums(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Products of codes (..., m, k) and (..., n, k), int32 (..., m, n): float32 holds sums of so few exactly."""
    parts = zip(left.split(EXACT_IN_FLOATS, -1), right.split(EXACT_IN_FLOATS, -1), strict=True)
    return reduce(torch.add, ((some.float() @ others.float().mT).to(torch.int32) for some, others in parts))
