"""A linear projection that keeps nothing but its int8 weights."""

import threading
from itertools import zip_longest

import torch
from outlier_kernels import dispatch
from outlier_kernels.cpu.packed import Packed
from outlier_kernels.reference import Quantized
from torch import nn
from transformers.pytorch_utils import Conv1D

from outliers.quantization.layer import SchemeLinear, StraightThrough
from outliers.quantization.linear import operand_of, prepared
from outliers.quantization.magnitudes import Magnitudes
from outliers.quantization.schemes import MOST, Scheme

# The buffers: codes, scale, zero_point, code_sums, and what each of the scheme's transforms made of the weight, and
# behind that what a search made of its inputs.
FITTED = tuple(f"fitted{'' if number == 1 else f'_{number}'}" for number in range(1, MOST + 2))
FIELDS = (*Quantized._fields, *FITTED)
_LAYOUT = threading.RLock()  # held while a layer changes between its layouts; one for all, for locks cannot be copied


class Int8Linear(SchemeLinear):
    """A projection under a scheme whose exact weights are gone: their codes, one byte a weight in int8, and scales.

    Outlier features are multiplied with weights rebuilt from their codes, whose scales are over all features. On a CPU
    with int8 units, the first call brings the codes into the layout that is multiplied fastest, in the place of the
    plain ones (there they are the buffer `blocks`, which no state has); `state_dict`, `load_state_dict` and `.to()`
    bring the plain ones back. Several threads may call it at once.

    Where `straight_through` is set, it has a gradient for its input and its bias, which takes rounding for the identity
    and the weight for what its codes stand for, and so adapters train beside it.
    """

    def __init__(
        self,
        projection: nn.Linear | Conv1D,
        scheme: Scheme,
        role: str | None = None,
        magnitudes: Magnitudes | None = None,
    ):
        super().__init__(scheme, role, magnitudes)
        self.prepared: Quantized | Packed | None = None
        bias = projection.bias  # of an expert a view
        own = bias is None or isinstance(bias, nn.Parameter)
        self.bias = bias if own else nn.Parameter(bias.detach(), requires_grad=False)
        for name in FIELDS:
            self.register_buffer(name, None)
        self.register_buffer("blocks", None, persistent=False)
        self.transposed = isinstance(projection, Conv1D)
        self.set_weight(projection.weight)

    def set_weight(self, weight: torch.Tensor) -> None:
        """Quantize a weight, in the orientation of the projection, and keep its codes."""
        with torch.inference_mode(False), torch.no_grad():
            operand = operand_of(weight.T if self.transposed else weight, self.here, self.magnitudes)
            self._keep(operand.codes._asdict() | dict(zip_longest(FITTED, operand.fitted)))
        if not weight.is_meta:  # where the weight is yet to come
            self.magnitudes = None

    def _keep(self, values: dict[str, torch.Tensor | None]) -> None:
        with _LAYOUT:
            for name, value in values.items():
                self._buffers[name] = None if value is None else value.contiguous()
            self._buffers["blocks"] = self.prepared = None

    def _plain(self) -> dict[str, torch.Tensor | None]:
        """The buffers with the plain codes, brought back if they were prepared."""
        with _LAYOUT:
            if self.prepared is not None:
                with torch.inference_mode(False):
                    self._keep(dispatch.restore(self.prepared)._asdict())
            return {name: self._buffers[name] for name in FIELDS}

    def _quantized(self) -> Quantized:
        """The plain codes and scales."""
        plain = self._plain()
        return Quantized(*(plain[name] for name in Quantized._fields))

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and features."""
        return dispatch.shape_of(self.prepared or self._quantized())

    @property
    def out_features(self) -> int:
        """Outputs."""
        return self.shape[0]

    @property
    def in_features(self) -> int:
        """Features."""
        return self.shape[1]

    @property
    def weight(self) -> torch.Tensor:
        """Type, shape and device of the codes without values, for who looks at them, as T5 and adapters do."""
        weight = torch.zeros((), dtype=torch.int8, device=self.scale.device).expand(self.shape)
        weight._is_hf_initialized = True  # else transformers would draw its values
        return weight

    @property
    def dequantized(self) -> torch.Tensor | None:
        """The weight (outputs, features) that the codes stand for; None under remedies, which change it."""
        return None if self.here.transforms else self._quantized().dequantize()

    def path(self, dtype: torch.dtype) -> str:
        """The path of the kernels that multiplies it with hidden states of a dtype, see `dispatch.backend_of`."""
        scheme, weight = self.here, self.prepared or self._quantized()
        return dispatch.backend_of(weight, scheme.activations, scheme.arithmetic, dtype).path

    @torch.compiler.assume_constant_result
    def _prepare(self) -> None:
        """Bring the codes into the layout that is multiplied fastest."""
        with _LAYOUT:
            if self.prepared is not None:
                return
            plain, scheme = self._quantized(), self.here
            with torch.inference_mode(False), torch.no_grad():
                self.prepared = dispatch.prepare(plain, scheme.activations, scheme.arithmetic)
            if self.prepared is not plain:
                self._buffers["codes"] = None
                self._buffers["blocks"] = self.prepared[0]  # in the place of the codes

    def __setattr__(self, name: str, value: object) -> None:
        if name in FIELDS:
            self._plain()  # of which it replaces a part
        super().__setattr__(name, value)

    def _apply(self, fn, recurse=True):
        with _LAYOUT:
            before = self._plain()
            super()._apply(fn, recurse)
            if not before["scale"].is_meta:  # scales follow to another device, but not to another dtype
                device = self.codes.device
                self._keep({name: None if value is None else value.to(device) for name, value in before.items()})
            return self

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        with _LAYOUT:
            self._plain()
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        with _LAYOUT:
            expected = {name for name, value in self._plain().items() if value is not None}
            given = {name for name in ("weight", *FIELDS) if prefix + name in state_dict}
            # whether strict or not, for these codes do not go with the scales of others, nor with their bias
            if given and given != expected and not self.scale.is_meta:
                errors.append(
                    f"'{prefix[:-1]}' is under '{self.scheme.name}' and takes {', '.join(sorted(expected))}, got "
                    f"{', '.join(sorted(given))}; quantize the exact model that has these weights, under this scheme"
                )
            else:
                super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def __getstate__(self) -> dict:
        with _LAYOUT:  # the fast layout can be neither copied nor pickled
            return {**vars(self), "_buffers": {**self._plain(), "blocks": None}, "prepared": None}

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            self._prepare()  # now, while the graph is made, so that it has the layout that this leaves
        while (weight := self.prepared) is None:  # once, unless another thread brings the plain codes back
            self._prepare()
        fitted = tuple(value for name in FITTED if (value := self._buffers[name]) is not None)
        rows = prepared(rows, self.here, fitted)
        if self.straight_through and torch.is_grad_enabled():
            return StraightThrough.apply(rows, self.bias, weight, self.here)
        return dispatch.linear(rows, weight, self.bias, **self.here.kernel_arguments)
