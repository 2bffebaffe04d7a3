"""Layers that have no gradient say so, when one is asked of them, or pass one on as if nothing were rounded."""

from collections.abc import Callable
from functools import partial

import torch
from outlier_kernels import dispatch
from outlier_kernels.cpu.packed import Packed
from outlier_kernels.reference import Quantized

from outliers.errors import UserError


def refuse_gradient(
    project: Callable[[torch.Tensor], torch.Tensor], hidden_states: torch.Tensor, *parameters: torch.Tensor
) -> torch.Tensor:
    """`project(hidden_states)`, which raises UserError in a backward pass that comes to it.

    Rounding has no gradient, and a result that just had none would cut the graph: the gradients of all that is before
    it would miss what passes through this layer, silently. Forward passes with gradients enabled are as they were.
    """
    with torch.no_grad():
        product = project(hidden_states)
    if not any(tensor.requires_grad for tensor in (hidden_states, *parameters)):
        return product
    return _Refused.apply(product, hidden_states, *parameters)


class _Refused(torch.autograd.Function):
    """The identity of a product, in the graph between it and what it was made of."""

    @staticmethod
    def forward(product, *_operands):
        return product.clone()  # and not itself: models add to the outputs of their layers in place

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.shapes = [tensor.shape for tensor in inputs]

    @staticmethod
    def backward(ctx, gradient):
        return tuple(_refuse(gradient, shape) for shape in ctx.shapes)


@torch.library.custom_op("outliers::refuse_gradient", mutates_args=())
def _refuse(gradient: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """An operator, so that `torch.compile`, which makes the graph of a backward pass that may never come, meets only
    its shape."""
    raise UserError(
        "a projection in 8 bits has no gradient, because its operands are rounded; expected inference only: train the "
        "exact model, or compute what needs no gradient under torch.no_grad()"
    )


@_refuse.register_fake
def _(gradient: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return gradient.new_empty(shape)


def pass_gradient(
    rows: torch.Tensor, weight: Quantized | Packed, bias: torch.Tensor | None = None, **scheme
) -> torch.Tensor:
    """`dispatch.linear` with gradients for rows (tokens, features) and bias (outputs,): the straight-through estimator
    (Bengio et al., 2013), under which rounding has the gradient of the identity.

    The weight, which has none, counts as what its codes stand for.
    """
    return _Passed.apply(rows, bias, weight, partial(dispatch.linear, **scheme))


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, bias, weight, multiply):
        ctx.weight, ctx.dtypes = weight, [None if tensor is None else tensor.dtype for tensor in (rows, bias)]
        return multiply(rows, weight, bias)

    @staticmethod
    def backward(ctx, gradient):
        of_rows, of_bias = ctx.needs_input_grad[:2]
        weight = dispatch.restore(ctx.weight).dequantize() if of_rows else None
        return (
            (gradient.to(weight.dtype) @ weight).to(ctx.dtypes[0]) if of_rows else None,
            gradient.sum(0).to(ctx.dtypes[1]) if of_bias else None,
            None,
            None,
        )
