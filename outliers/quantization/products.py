"""Int8 matrix products whose gradients are int8 products as well, for training (LLM.int8(), appendix E).

A linear layer Y = X·Wᵀ takes three products: the forward one, and from the gradient G of Y those of its input, G·W, and
of its weight, Gᵀ·X. Each has absmax scales for the rows of its left operand and the columns of its right one
(vector-wise, equation 6). The products of attention, queries with keys and probabilities with values, are computed in
the same way.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, wraps

import torch
from outlier_kernels import dispatch

from outliers.criterion import check_threshold
from outliers.errors import UserError, shown


@dataclass(frozen=True)
class ProductNumerics:
    """The numerics of a layer's products and of their gradients.

    decomposition: share of the inner dimension of a product that is multiplied in 16 bits, namely the features with the
    largest magnitudes in the left operand (appendix E tests 0, 0.02, 0.05 and 0.1). The inner dimension of Gᵀ·X is
    tokens; there, the columns of these features of X are multiplied in 16 bits. outlier_threshold: multiply the
    features of X with an entry of at least this magnitude in 16 bits instead, in X·Wᵀ and Gᵀ·X; gradients have another
    scale and are not compared with it. stochastic: whether gradients are rounded stochastically, so that their codes
    are unbiased. exact: whether nothing is quantized.

    Raises:
        UserError: a number is out of range, or both kinds of decomposition are given.
    """

    decomposition: float = 0.0
    outlier_threshold: float | None = None
    stochastic: bool = False
    exact: bool = False
    written: str = field(init=False, repr=False, compare=False)  # the same as text, which operators take: see `_read`

    def __post_init__(self):
        if not isinstance(self.decomposition, (int, float)) or not 0 <= self.decomposition < 1:
            raise UserError(f"decomposition is {shown(self.decomposition)}; expected a share of the features, below 1")
        object.__setattr__(self, "decomposition", float(self.decomposition))
        if self.outlier_threshold is not None:
            object.__setattr__(self, "outlier_threshold", check_threshold("outlier_threshold", self.outlier_threshold))
            if self.decomposition:
                raise UserError("decomposition by a share of the features and by a threshold; expected one of the two")
        given = self.decomposition, self.outlier_threshold, self.stochastic, self.exact
        object.__setattr__(self, "written", json.dumps(given))


@cache
def _read(written: str) -> ProductNumerics:
    """Parse the text argument of an operator.

    torch.compile treats a number that differs between two models as a variable, and cannot pass it to a custom autograd
    function; text stays a constant.
    """
    return ProductNumerics(*json.loads(written))


def product(left: torch.Tensor, right: torch.Tensor, how: ProductNumerics) -> torch.Tensor:
    """Return left · rightᵀ, computed as `how` says, with gradients for both operands.

    Args:
        left: float (m, k), such as hidden states (tokens, features), or a batch of matrices (..., m, k).
        right: float (n, k), such as a weight (outputs, features), or a batch of matrices (..., n, k).
        how: which operands are quantized, and how.

    Returns:
        (..., m, n) in the dtype of `left`.
    """
    return _Product.apply(left, right, how)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(left, right, how):
        return left @ right.mT if how.exact else forward_product(left, right, how.written)

    @staticmethod
    def setup_context(ctx, inputs, output):
        left, right, ctx.how = inputs
        ctx.save_for_backward(left, right)

    @staticmethod
    def backward(ctx, gradient):
        (left, right), (exact, written) = ctx.saved_tensors, (ctx.how.exact, ctx.how.written)
        for_left = for_right = None
        if ctx.needs_input_grad[0]:
            for_left = gradient @ right if exact else gradient_of_left(gradient, right, written)
        if ctx.needs_input_grad[1]:
            for_right = gradient.mT @ left if exact else gradient_of_right(gradient, left, written)
        return for_left, for_right, None


def _without_autocast(compute: Callable) -> Callable:
    """Disable autocast in a function, so that products keep the dtypes of their operands."""

    @wraps(compute)
    def computing(first: torch.Tensor, *others):
        with torch.autocast(first.device.type, enabled=False):
            return compute(first, *others)

    return computing


# Custom operators, because a compiler cannot trace a data-dependent number of outlier features: it sees shapes only.


@torch.library.custom_op("outliers::forward_product", mutates_args=())
@_without_autocast
def forward_product(left: torch.Tensor, right: torch.Tensor, written: str) -> torch.Tensor:
    """Return X·Wᵀ in the dtype of X."""
    how = _read(written)
    return dispatch.product(left, right, outlier_dimensions(left, how.decomposition, how.outlier_threshold))


@forward_product.register_fake
def _(left, right, _written):
    return left.new_empty(*left.shape[:-1], right.shape[-2])


@torch.library.custom_op("outliers::gradient_of_left", mutates_args=())
@_without_autocast
def gradient_of_left(gradient: torch.Tensor, right: torch.Tensor, written: str) -> torch.Tensor:
    """Return G·W in the dtype of G."""
    how = _read(written)
    return dispatch.product(
        gradient, right.mT, outlier_dimensions(gradient, how.decomposition), seed=_seed(how.stochastic)
    )


@gradient_of_left.register_fake
def _(gradient, right, _written):
    return gradient.new_empty(*gradient.shape[:-1], right.shape[-1])


@torch.library.custom_op("outliers::gradient_of_right", mutates_args=())
@_without_autocast
def gradient_of_right(gradient: torch.Tensor, left: torch.Tensor, written: str) -> torch.Tensor:
    """Return Gᵀ·X in the dtype of G; autograd casts it to the dtype of W."""
    how = _read(written)
    exact = outlier_dimensions(left, how.decomposition, how.outlier_threshold)
    return dispatch.product(gradient.mT, left.mT, exact_columns=exact, seed=_seed(how.stochastic))


@gradient_of_right.register_fake
def _(gradient, left, _written):
    return gradient.new_empty(*gradient.shape[:-2], gradient.shape[-1], left.shape[-1])


def _seed(stochastic: bool) -> int | None:
    """Draw the seed of stochastic rounding from torch's generator; None rounds to nearest."""
    return int(torch.randint(2**63 - 1, (), device="cpu")) if stochastic else None


def outlier_dimensions(left: torch.Tensor, share: float, threshold: float | None = None) -> torch.Tensor | None:
    """Return the inner dimensions of a left operand (..., m, k) that are multiplied in 16 bits, or None for none.

    The result is int64 (..., count), ascending, padded with -1 in front where a matrix has fewer than the others of its
    batch.

    share: select this share of the dimensions, rounded up: those with the largest magnitudes, the first ones among
    equals. threshold: select the dimensions with an entry of at least this magnitude instead.
    """
    count = math.ceil(round(share * left.shape[-1], 9))  # 0.07 · 100 is more than 7 in binary
    if threshold is None and not count:
        return None
    magnitudes = left.abs().amax(-2)
    if threshold is None:
        return magnitudes.sort(dim=-1, descending=True, stable=True).indices[..., :count].sort(-1).values
    is_outlier = magnitudes.float() >= threshold
    count = int(is_outlier.sum(-1).max())
    places = torch.arange(left.shape[-1], device=left.device)
    return torch.where(is_outlier, places, -1).sort(-1).values[..., -count:] if count else None
