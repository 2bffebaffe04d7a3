"""A linear projection that keeps only the int8 codes of its weights."""

import threading
from itertools import zip_longest

import torch
from outlier_kernels import dispatch
from outlier_kernels.cpu.packed import Packed
from outlier_kernels.formats import ROWS, Quantizer
from outlier_kernels.reference import Quantized
from torch import nn
from transformers.pytorch_utils import Conv1D

from outliers.quantization.layer import SchemeLinear, StraightThrough
from outliers.quantization.linear import operand_of, transform_input, version_of
from outliers.quantization.magnitudes import InputSummary, PlainLinear
from outliers.quantization.schemes import MOST_TRANSFORMS, Scheme

# Buffers after those of `Quantized`: the tensor that each of the scheme's transforms fitted to the weight, then the
# searched quantile of its inputs.
FITTED = tuple(f"fitted{'' if number == 1 else f'_{number}'}" for number in range(1, MOST_TRANSFORMS + 2))
FIELDS = (*Quantized._fields, *FITTED)
COLUMNS = Quantizer("int8", "column")
_LAYOUT = threading.RLock()  # held while a layer changes its layout; one for all layers, because locks cannot be copied


class Int8Linear(SchemeLinear):
    """A projection under a scheme that keeps only codes and scales of its weights, one byte per weight.

    Outlier features are multiplied with dequantized weights, whose scales are computed over all features. On a CPU with
    int8 units, the first call repacks the codes into the fastest layout and drops the plain ones (the repacked buffer
    `blocks` is in no state); `state_dict`, `load_state_dict` and `.to()` restore the plain codes. The layer is
    thread-safe.

    If `straight_through` is set, its input and bias have gradients, computed with the dequantized weight as if rounding
    were the identity, so that adapters can be trained beside it.
    """

    def __init__(
        self, projection: PlainLinear, scheme: Scheme, role: str | None = None, magnitudes: InputSummary | None = None
    ):
        super().__init__(scheme, role, magnitudes)
        self.prepared: Quantized | Packed | None = None
        self.stacked: Quantized | None = None  # of this and other layers, see `multiply_all`
        self.stacked_bias: torch.Tensor | None = None
        self.biases: tuple[list, list] = [], []  # those stacked, and by what changes of them are seen
        bias = projection.bias  # the bias of an expert is a view of a larger tensor
        own = bias is None or isinstance(bias, nn.Parameter)
        self.bias = bias if own else nn.Parameter(bias.detach(), requires_grad=False)
        for name in FIELDS:
            self.register_buffer(name, None)
        self.register_buffer("blocks", None, persistent=False)
        self.transposed = isinstance(projection, Conv1D)
        self.set_weight(projection.weight)

    def set_weight(self, weight: torch.Tensor) -> None:
        """Quantize a weight, oriented as in the projection, and keep its codes."""
        with torch.inference_mode(False), torch.no_grad():
            operand = operand_of(weight.T if self.transposed else weight, self.here, self.magnitudes)
            self._keep(operand.codes._asdict() | dict(zip_longest(FITTED, operand.fitted)))
        if not weight.is_meta:  # else the weight is set later
            self.magnitudes = None

    def _keep(self, values: dict[str, torch.Tensor | None]) -> None:
        with _LAYOUT:
            for name, value in values.items():
                self._buffers[name] = None if value is None else value.contiguous()
            self._buffers["blocks"] = self.prepared = None

    def _plain(self) -> dict[str, torch.Tensor | None]:
        """Return the buffers with plain codes, restored if the codes were repacked."""
        with _LAYOUT:
            if self.prepared is not None:
                with torch.inference_mode(False):
                    self._keep(dispatch.restore(self.prepared)._asdict())
            return {name: self._buffers[name] for name in FIELDS}

    def _quantized(self) -> Quantized:
        plain = self._plain()
        return Quantized(*(plain[name] for name in Quantized._fields))

    @property
    def shape(self) -> tuple[int, int]:
        return dispatch.shape_of(self.prepared or self._quantized())

    @property
    def out_features(self) -> int:
        return self.shape[0]

    @property
    def in_features(self) -> int:
        return self.shape[1]

    @property
    def weight(self) -> torch.Tensor:
        """A tensor with the dtype, shape and device of the codes but no values, for code that inspects weights, such as
        T5 and PEFT."""
        weight = torch.zeros((), dtype=torch.int8, device=self.scale.device).expand(self.shape)
        weight._is_hf_initialized = True  # else transformers would draw its values
        return weight

    @property
    def dequantized(self) -> torch.Tensor | None:
        """The dequantized weight (outputs, features); None under transforms, which change the weight."""
        return None if self.here.transforms else self._quantized().dequantize()

    def kernels(self, dtype: torch.dtype) -> str:
        """Return the name of the kernels that multiply the weight with hidden states of a dtype, see
        `dispatch.backend_of`."""
        scheme, weight = self.here, self.prepared or self._quantized()
        return dispatch.backend_of(weight, scheme.activations, scheme.arithmetic, dtype).row_name

    @torch.compiler.assume_constant_result
    def _prepare(self) -> None:
        with _LAYOUT:
            if self.prepared is not None:
                return
            plain, scheme = self._quantized(), self.here
            with torch.inference_mode(False), torch.no_grad():
                self.prepared = dispatch.prepare(plain, scheme.activations, scheme.arithmetic)
            if self.prepared is not plain:
                self._buffers["codes"] = None
                self._buffers["blocks"] = self.prepared[0]  # they replace the codes

    def multiplies_all(self, rows: torch.Tensor) -> bool:
        """Return whether `multiply_all` can multiply rows with layers like this one."""
        scheme = self.here
        alike = (scheme.activations, scheme.weights, scheme.outlier_threshold) == (ROWS, COLUMNS, None)
        plain = self.prepared is None and alike and not scheme.remedies and scheme.arithmetic == "exact"
        return plain and not torch.is_grad_enabled() and dispatch.has_grouped_kernel(rows, self._quantized())

    def multiply_all(
        self, layers: tuple["Int8Linear", ...], rows: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor | None:
        """Multiply rows, sorted by layer, with several layers at once; return None if the layers are not alike.

        The codes of the layers are moved to one tensor, and each layer keeps a view of its part.

        layers: this one is the first. ends: how many rows the layers up to each one have together, int64 (layers,).
        """
        if not all(type(one) is Int8Linear and one.here == self.here and one.prepared is None for one in layers):
            return None
        with _LAYOUT, torch.inference_mode(False):
            parts = [] if self.stacked is None else [*self.stacked.codes]
            if not parts or any(
                one.codes.data_ptr() != part.data_ptr() for one, part in zip(layers, parts, strict=True)
            ):
                self.stacked = Quantized(
                    *(torch.stack([getattr(one, field) for one in layers]) for field in ("codes", "scale"))
                )
                for layer, codes in zip(layers, self.stacked.codes, strict=True):
                    layer._buffers["codes"] = codes
            if self.bias is not None:
                biases = [layer.bias for layer in layers]
                state = [(id(bias), bias.data_ptr(), version_of(bias)) for bias in biases]
                if state != self.biases[1] or self.bias.is_inference():  # edits of which are not counted
                    self.stacked_bias, self.biases = torch.stack(biases), (biases, state)
        return dispatch.grouped_linear(rows, ends, self.stacked, self.stacked_bias)

    def __setattr__(self, name: str, value: object) -> None:
        if name in FIELDS:
            self._plain()  # restore all, because the assignment replaces one of them
        super().__setattr__(name, value)

    def _apply(self, fn, recurse=True):
        with _LAYOUT:
            before, self.stacked, self.stacked_bias, self.biases = self._plain(), None, None, ([], [])
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
            # even if not strict, because codes do not fit the scales or the bias of another layer
            if given and given != expected and not self.scale.is_meta:
                errors.append(
                    f"'{prefix[:-1]}' is under '{self.scheme.name}' and takes {', '.join(sorted(expected))}, got "
                    f"{', '.join(sorted(given))}; quantize the exact model that has these weights, under this scheme"
                )
            else:
                super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)

    def __getstate__(self) -> dict:
        with _LAYOUT:  # the fast layout can be neither copied nor pickled
            without = {"prepared": None, "stacked": None, "stacked_bias": None, "biases": ([], [])}
            return {**vars(self), "_buffers": {**self._plain(), "blocks": None}, **without}

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            self._prepare()  # during tracing, so that the graph sees the final layout
        while (weight := self.prepared) is None:  # once, unless another thread restores the plain codes
            self._prepare()
        fitted = tuple(value for name in FITTED if (value := self._buffers[name]) is not None)
        rows = transform_input(rows, self.here, fitted)
        if self.straight_through and torch.is_grad_enabled():
            return StraightThrough.apply(rows, self.bias, weight, self.here)
        return dispatch.linear(rows, weight, self.bias, **self.here.kernel_arguments)
