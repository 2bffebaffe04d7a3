"""The base class of quantized layers, which refuse gradients or apply the straight-through estimator."""

import torch
from outlier_kernels import dispatch
from torch import nn

from outliers.errors import UserError
from outliers.quantization.magnitudes import InputSummary
from outliers.quantization.schemes import Scheme


class SchemeLinear(nn.Module):
    """A linear projection under a scheme.

    role: the role of its input, which selects the remedies that apply. magnitudes: calibration statistics of its input,
    for remedies that require them. straight_through: whether products pass gradients through as if nothing were
    rounded.

    Without `straight_through` a backward pass raises UserError. Rounding has no gradient, and a result without one
    would cut the graph silently: everything before the layer would lose the gradient that passes through it. Forward
    passes with gradients enabled work as usual.
    """

    straight_through = False

    def __init__(self, scheme: Scheme, role: str | None, magnitudes: InputSummary | None):
        super().__init__()
        self.scheme, self.here, self.magnitudes = scheme, scheme.at(role), magnitudes

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Project (..., features) to (..., outputs) in the dtype of the input."""
        if self.straight_through or not torch.is_grad_enabled():
            return self._project(hidden_states)
        operands = hidden_states, *self.parameters()
        if not any(one.requires_grad for one in operands):  # not under no_grad: its views cannot be edited in place
            return self._project(hidden_states)
        with torch.no_grad():
            product = self._project(hidden_states)
        return _Refused.apply(product, *operands)

    def _project(self, hidden_states: torch.Tensor) -> torch.Tensor:
        product = self._product(hidden_states.reshape(-1, hidden_states.shape[-1]))
        return product.to(hidden_states.dtype).view(*hidden_states.shape[:-1], -1)


class _Refused(torch.autograd.Function):
    """The identity, as a node of the autograd graph whose backward pass raises UserError."""

    @staticmethod
    def forward(product, *_operands):
        return product.clone()  # a copy: models add to the outputs of their layers in place

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.shapes = [tensor.shape for tensor in inputs]

    @staticmethod
    def backward(ctx, gradient):
        return tuple(_refuse(gradient, shape) for shape in ctx.shapes)


@torch.library.custom_op("outliers::refuse_gradient", mutates_args=())
def _refuse(gradient: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Raise UserError in a backward pass.

    This is a custom operator, because `torch.compile` traces a backward graph even if no backward pass ever runs: it
    sees only the shape.
    """
    raise UserError(
        "a projection in 8 bits has no gradient, because its operands are rounded; expected inference only: train the "
        "exact model, or compute what needs no gradient under torch.no_grad()"
    )


@_refuse.register_fake
def _(gradient: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return gradient.new_empty(shape)


class StraightThrough(torch.autograd.Function):
    """`dispatch.linear` with gradients for rows (tokens, features) and bias (outputs,) by the straight-through
    estimator.

    Rounding has the gradient of the identity (Bengio et al., 2013). The weight has no gradient and enters with its
    dequantized values.
    """

    @staticmethod
    def forward(ctx, rows, bias, weight, scheme):
        ctx.weight, ctx.dtypes = weight, [None if tensor is None else tensor.dtype for tensor in (rows, bias)]
        return dispatch.linear(rows, weight, bias, **scheme.kernel_arguments)

    @staticmethod
    def backward(ctx, gradient):
        needs_rows, needs_bias = ctx.needs_input_grad[:2]
        weight = dispatch.restore(ctx.weight).dequantize() if needs_rows else None
        return (
            (gradient.to(weight.dtype) @ weight).to(ctx.dtypes[0]) if needs_rows else None,
            gradient.sum(0).to(ctx.dtypes[1]) if needs_bias else None,
            None,
            None,
        )
