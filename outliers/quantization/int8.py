"""A linear projection that keeps nothing but its int8 weights."""

import torch
from outlier_kernels import dispatch
from outlier_kernels.reference import Quantized
from torch import nn
from transformers.pytorch_utils import Conv1D

from outliers.quantization.linear import quantize_weight
from outliers.quantization.schemes import Scheme

FIELDS = Quantized._fields  # codes, scale, zero_point, code_sums: the buffers


class Int8Linear(nn.Module):
    """A projection under an 8-bit scheme whose exact weights are gone: one byte a weight, and scales.

    Outlier features are multiplied with weights rebuilt from their codes, whose scales are over all features. On a CPU
    with int8 units, the first call brings the codes into the layout that is multiplied fastest, in the place of the
    plain ones; `state_dict` and `.to()` bring them back.
    """

    def __init__(self, projection: nn.Linear | Conv1D, scheme: Scheme):
        super().__init__()
        self.scheme = scheme
        self.bias = projection.bias
        for name in FIELDS:
            self.register_buffer(name, None)
        self.transposed = isinstance(projection, Conv1D)
        self.set_weight(projection.weight)

    @torch.no_grad()
    def set_weight(self, weight: torch.Tensor) -> None:
        """Quantize a weight, in the orientation of the projection, and keep its codes."""
        self._keep(quantize_weight(weight.T if self.transposed else weight, self.scheme))

    def _keep(self, quantized: Quantized) -> None:
        for name, value in quantized._asdict().items():
            setattr(self, name, value if value is None else value.contiguous())
        self.prepared = None

    def _plain(self) -> Quantized:
        """The plain codes and scales, brought back if they were prepared."""
        if self.prepared is not None:
            self._keep(dispatch.restore(self.prepared))
        return Quantized(*(getattr(self, name) for name in FIELDS))

    def _apply(self, fn, recurse=True):
        before = self._plain()
        super()._apply(fn, recurse)
        if not before.scale.is_meta:  # scales follow to another device, but not to another dtype
            self._keep(Quantized(*(None if value is None else value.to(self.codes.device) for value in before)))
        return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        self._plain()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def __getstate__(self) -> dict:
        self._plain()  # the fast layout can be neither copied nor pickled
        return self.__dict__

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Project (..., features) to (..., outputs) in the dtype of the input."""
        if self.prepared is None:
            plain = self._plain()
            self.prepared = dispatch.prepare(plain)
            if self.prepared is not plain:
                self.codes = None
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        product = dispatch.linear(rows, self.prepared, self.bias, **self.scheme.kernel_arguments)
        return product.view(*hidden_states.shape[:-1], -1)
