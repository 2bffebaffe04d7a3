"""A linear projection whose product runs in 8 bits."""

from functools import cached_property

import torch
from outlier_kernels import reference
from torch import nn
from transformers.pytorch_utils import Conv1D

from outliers.quantization.schemes import Scheme


class QuantizedLinear(nn.Module):
    """A projection under an 8-bit scheme, with the unquantized weights at hand.

    It shares the weight and bias of the projection that it replaces (`nn.Linear`, or the `Conv1D` of GPT-2, which
    stores its weight transposed) and quantizes them on first use. Outlier features are multiplied with the exact
    weights, as the paper's equation 8 has it, and both operands' scales are taken without them.
    """

    def __init__(self, projection: nn.Linear | Conv1D, scheme: Scheme):
        super().__init__()
        self.projection = projection
        self.scheme = scheme

    @property
    def weight(self) -> torch.Tensor:
        """The unquantized weight (outputs, features)."""
        return self.projection.weight.T if isinstance(self.projection, Conv1D) else self.projection.weight

    @cached_property
    def quantized_weight(self) -> reference.Quantized:
        """The whole weight, quantized by the scheme."""
        # Made as ordinary tensors also in inference mode: they are kept, and autograd refuses inference tensors.
        with torch.inference_mode(False), torch.no_grad():
            return self._quantize_weight(self.weight)

    def share_codes(self, other: "QuantizedLinear") -> None:
        """Take the codes of another layer over the same weight, if it has any and they would come out alike."""
        alike = (self.scheme.symmetric, self.scheme.weight_granularity) == (
            other.scheme.symmetric,
            other.scheme.weight_granularity,
        )
        if alike and "quantized_weight" in vars(other):
            self.quantized_weight = other.quantized_weight

    def _apply(self, fn, recurse=True):
        self.__dict__.pop("quantized_weight", None)  # the codes are no buffer: quantize again where the model moves to
        return super()._apply(fn, recurse)

    def _quantize_weight(self, weight: torch.Tensor) -> reference.Quantized:
        return reference.quantize(weight, self.scheme.symmetric, self.scheme.weight_granularity == "column")

    def _int8_product(self, hidden_states: torch.Tensor, weight: reference.Quantized) -> torch.Tensor:
        per_row = self.scheme.activation_granularity == "row"
        return reference.matmul(reference.quantize(hidden_states, self.scheme.symmetric, per_row), weight)

    def _product(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.scheme.outlier_threshold is None:
            return self._int8_product(hidden_states, self.quantized_weight)
        outliers = reference.outlier_columns(hidden_states, self.scheme.outlier_threshold)
        if not outliers.any():
            return self._int8_product(hidden_states, self.quantized_weight)
        product = _product_in_16_bits(hidden_states[:, outliers], self.weight[:, outliers])
        if outliers.all():
            return product
        weight = self._quantize_weight(self.weight[:, ~outliers])
        return self._int8_product(hidden_states[:, ~outliers], weight).add_(product)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Project (..., features) to (..., outputs) in the dtype of the input."""
        product = self._product(hidden_states.reshape(-1, hidden_states.shape[-1]))
        if self.projection.bias is not None:
            product += self.projection.bias
        return product.to(hidden_states.dtype).view(*hidden_states.shape[:-1], -1)


def _product_in_16_bits(hidden_states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(m, k) with (n, k) to (m, n): float16 on a GPU, the dtype at hand on a CPU, whose 16-bit units are too coarse
    (bfloat16) or missing (float16)."""
    if hidden_states.is_cuda and hidden_states.dtype == torch.float32:
        hidden_states, weight = hidden_states.half(), weight.half()
    return (hidden_states @ weight.T).to(torch.promote_types(hidden_states.dtype, torch.float32))
