"""The kernels' interface: an operation runs on the first backend of `BACKENDS` that serves its operands."""

import os
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch

from outlier_kernels import cpu, reference, states, triton
from outlier_kernels.cpu import packed
from outlier_kernels.cpu.packed import Packed
from outlier_kernels.formats import ROWS, Quantizer
from outlier_kernels.reference import Exact, Quantized

FORCED = "OUTLIERS_KERNELS"  # variable that selects one backend, beside the reference for unsupported operands


class Backend(NamedTuple):
    """One implementation of the kernels.

    name: its name for OUTLIERS_KERNELS. row_name: its name in rows, which the variable accepts too. runs_on: whether it
    is available on a type of device; the flag says whether the variable selects it. linear, product, quantize,
    states, attention, losses, grouped: the module that computes each operation, imported on first use; its `serves`
    tests operands. The reference serves all operands.
    """

    name: str
    row_name: str
    runs_on: Callable[[str, bool], bool]
    linear: str
    product: str | None = None
    quantize: str | None = None
    states: str | None = None
    attention: str | None = None
    losses: str | None = None
    grouped: str | None = None


BACKENDS = (
    Backend(
        *("triton", "triton", triton.runs_on),
        *("triton.layer", "triton.product", "triton.quantization"),
        *("triton.states", "triton.attention", "triton.losses", "triton.grouped"),
    ),
    Backend("formats", "triton", triton.runs_on, "triton.formats", None, "triton.formats"),
    Backend("packed", "cpu", lambda device, _asked: device == "cpu" and cpu.has_int8_units(), "cpu.packed"),
    Backend(
        *("plain", "cpu", lambda device, _asked: device == "cpu"),
        *("cpu.plain", "cpu.products", "cpu.codes", "cpu.states"),
    ),
    Backend(
        *("reference", "reference", lambda _device, _asked: True),
        *("reference", "reference_products", "reference", "reference_states", "reference_states", "reference_losses"),
        "reference",
    ),
)


def backends(device: torch.device) -> tuple[Backend, ...]:
    """Return the backends that run on a device, the reference last: all of them, or the one that OUTLIERS_KERNELS
    selects.

    Raises:
        ValueError: the variable names no backend, or one that does not run on this device.
    """
    return _backends(device.type, os.environ.get(FORCED))


def _backends(device: str, forced: str | None) -> tuple[Backend, ...]:
    named = [one for one in BACKENDS if not forced or forced in (one.name, one.row_name)]
    if not named:
        names = dict.fromkeys(name for one in BACKENDS for name in (one.name, one.row_name))
        raise ValueError(f"OUTLIERS_KERNELS is '{forced}'; expected one of {', '.join(names)}")
    available = [one for one in named if one.runs_on(device, bool(forced))]
    if not available:
        raise ValueError(f"OUTLIERS_KERNELS is '{forced}', which does not run on '{device}' here; leave it unset")
    return (*available, *(one for one in BACKENDS[-1:] if one not in available))


@cache
def _kernels(operation: str, device: str, forced: str | None) -> tuple[tuple[Backend, ModuleType], ...]:
    if operation in ("linear", "product") and not forced:
        _warn_without_units(device)
    modules = [(one, getattr(one, operation)) for one in _backends(device, forced)]
    return tuple((one, import_module(f"outlier_kernels.{module}")) for one, module in modules if module)


def _serving(
    operation: str, device: torch.device, *operands: object, prepared: bool = False
) -> tuple[Backend, ModuleType]:
    """Return the first backend that serves the operands of an operation, and its module.

    prepared: whether an operand was prepared for a backend; OUTLIERS_KERNELS is then ignored, because only that backend
    can read it.
    """
    kernels = _kernels(operation, device.type, None if prepared else os.environ.get(FORCED))
    for found in kernels[:-1]:
        if found[1].serves(*operands):
            return found
    return kernels[-1]


@cache
def _warn_without_units(device: str) -> None:
    if device == "cpu":
        if not cpu.has_int8_units():
            missing = "this CPU has no int8 units (AVX-512 VNNI); products of int8 codes run in floats"
            warnings.warn(missing, stacklevel=3)
    elif not (triton.runs_on(device, False) and triton.has_int8_units(torch.device(device))):
        warnings.warn(f"no fast int8 product for '{device}' here; the reference in plain torch runs", stacklevel=3)


def backend_of(
    weight: Quantized | Packed,
    activations: Quantizer | None = ROWS,
    arithmetic: str = "exact",
    dtype: torch.dtype = torch.float32,
) -> Backend:
    """Return the backend that multiplies a weight with hidden states.

    Args:
        weight: prepared or not.
        activations: how the hidden states are quantized; None for not at all.
        arithmetic: a name in `outlier_kernels.formats.ARITHMETICS`; only the reference has others than "exact".
        dtype: of the hidden states.
    """
    if arithmetic != "exact":
        return BACKENDS[-1]
    prepared = isinstance(weight, Packed)
    return _serving("linear", weight.scale.device, weight, activations, dtype, prepared=prepared)[0]


def quantize(matrix: torch.Tensor, quantizer: Quantizer | None, arithmetic: str = "exact") -> Quantized:
    """Quantize a matrix (rows, features), such as a weight (outputs, features), to the codes that an arithmetic
    multiplies, as `reference.WEIGHTS` does."""
    if arithmetic == "exact" and not _is_watched(matrix):
        return _serving("quantize", matrix.device, matrix, quantizer)[1].quantize(matrix, quantizer)
    return reference.WEIGHTS[arithmetic](matrix, quantizer)


def prepare(weight: Quantized, activations: Quantizer | None = ROWS, arithmetic: str = "exact") -> Quantized | Packed:
    """Return a weight in the layout of the first backend that has one for it, or else the weight itself."""
    kernels = _kernels("linear", weight.scale.device.type, os.environ.get(FORCED)) if arithmetic == "exact" else ()
    for _, module in kernels:
        prepared = module.prepare(weight, activations) if hasattr(module, "prepare") else None
        if prepared is not None:
            return prepared
    return weight


def restore(weight: Quantized | Packed) -> Quantized:
    """Return a prepared weight as it was before, exactly."""
    return packed.unpack(weight) if isinstance(weight, Packed) else weight


def linear(
    hidden_states: torch.Tensor,
    weight: Quantized | Packed,
    bias: torch.Tensor | None = None,
    activations: Quantizer | None = ROWS,
    threshold: float | None = None,
    arithmetic: str = "exact",
    exact: Exact | None = None,
) -> torch.Tensor:
    """Compute a linear layer with quantized weights, as `outlier_kernels.reference.LINEAR` does for an arithmetic.

    No gradient flows, because rounding has none. To observers such as `torch.compile` and `torch.func` the layer is one
    operator; a direct call avoids an operator's overhead.

    Args:
        hidden_states: float16, bfloat16, float32 or float64 (tokens, features).
        weight: of (outputs, features); prepared by `prepare` for the same activations and arithmetic, or not.
        bias: (outputs,).
        activations: how the hidden states are quantized; None for not at all.
        threshold: magnitude from which a feature is an outlier; None for no decomposition.
        arithmetic: "exact", or "bitsandbytes" to compute LLM.int8() as bitsandbytes does.
        exact: the unquantized weight, if available, with which outlier features are multiplied; not for the arithmetic
            of bitsandbytes, nor with prepared weights.

    Returns:
        (tokens, outputs) in the dtype of `hidden_states`.

    Raises:
        ValueError: the hidden states are no floating-point matrix, or their features are not those of the weight.
    """
    features = shape_of(weight)[1]
    if hidden_states.ndim != 2 or not hidden_states.is_floating_point() or hidden_states.shape[1] != features:
        found = f"{hidden_states.dtype} {tuple(hidden_states.shape)}"
        raise ValueError(f"linear takes floating-point (tokens, {features}), got {found}")
    if torch.is_grad_enabled():
        with torch.no_grad():
            return linear(hidden_states, weight, bias, activations, threshold, arithmetic, exact)
    if not _is_watched(hidden_states):
        return _multiply(hidden_states, weight, bias, activations, threshold, arithmetic, exact)
    scheme = None if activations is None else str(activations), threshold, arithmetic
    if isinstance(weight, Packed):
        has_layout = weight.address != 0
        return linear_packed(hidden_states, weight.blocks, weight.scale, bias, weight.shape[0], has_layout, *scheme[:2])
    exact_parts = (None, None) if exact is None else (exact.weight, exact.quantizer and str(exact.quantizer))
    return linear_plain(hidden_states, *weight, bias, *scheme, *exact_parts)


def shape_of(weight: Quantized | Packed) -> tuple[int, int]:
    """Return the outputs and features of a weight, prepared or not."""
    return weight.shape if isinstance(weight, Packed) else weight.codes.shape


def _is_watched(hidden_states: torch.Tensor) -> bool:
    """Return whether operators are being observed, as by a compiler, or a tensor has no memory because it is fake."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack():
        return True
    try:
        memory = hidden_states.untyped_storage()
        return memory.device.type == "meta" or (memory.nbytes() > 0 and not memory.data_ptr())  # fake ones claim "meta"
    except RuntimeError:  # tensors of torch.func have none
        return True


def _multiply(
    hidden_states: torch.Tensor,
    weight: Quantized | Packed,
    bias: torch.Tensor | None,
    activations: Quantizer | None,
    threshold: float | None,
    arithmetic: str,
    exact: Exact | None = None,
) -> torch.Tensor:
    """Compute a layer by the first backend that serves it.

    The arithmetic of another library, such as bitsandbytes, has the reference alone.
    """
    if not len(hidden_states):  # no tokens have no extremes
        return hidden_states.new_empty(0, shape_of(weight)[0])
    layer = reference.LINEAR[arithmetic]
    if arithmetic == "exact":
        operands, prepared = (weight, activations, hidden_states.dtype), isinstance(weight, Packed)
        layer = _serving("linear", hidden_states.device, *operands, prepared=prepared)[1].linear
    return layer(hidden_states, weight, bias, activations, threshold, exact)


def has_grouped_kernel(rows: torch.Tensor, weight: Quantized) -> bool:
    """Return whether a kernel computes `grouped_linear` of rows and weights like these in one launch."""
    return _serving("grouped", rows.device, rows, weight)[0] is not BACKENDS[-1]


@torch.no_grad()
def grouped_linear(
    rows: torch.Tensor, ends: torch.Tensor, weight: Quantized, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply rows sorted by expert with the weights of all experts, as `reference.grouped_linear` does."""
    return _serving("grouped", rows.device, rows, weight)[1].grouped_linear(rows, ends, weight, bias)


@torch.no_grad()
def product(
    left: torch.Tensor,
    right: torch.Tensor,
    outliers: torch.Tensor | None = None,
    exact_columns: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """Compute left · rightᵀ in int8, quantizing both operands for it, as `reference_products.product` does.

    outliers, exact_columns: indices of the inner dimensions, and of the columns of the product, that stay unquantized.
    """
    module = _serving("product", left.device, left, right, outliers)[1]
    return module.product(left, right, outliers, exact_columns, seed)


def add_state(state: states.State, alpha: float, listed: bool = True) -> torch.Tensor:
    """Add a hidden state to the statistics of `states.STATISTICS`.

    Args:
        state: with these statistics.
        alpha: magnitude of a hit, representable in float32.
        listed: whether the hits are appended to `state.found`.

    Returns:
        The number of hits of each feature, int64 (features,).

    Raises:
        NotFinite: the state holds NaN or inf; the statistics are useless then. On a GPU, `state.found` raises it later.
    """
    return _serving("states", state.x.device, state.x, state.kept)[1].add(state, alpha, listed)


def add_residual(state: states.State, limits: tuple[float, float], massive: torch.Tensor) -> None:
    """Add a state of the residual stream to the statistics of `states.RESIDUAL`.

    Args:
        state: with these statistics; its largest magnitudes may be kept, but no hits.
        limits: representable in float32; an entry is massive if its magnitude is above the first and at least the
            second times the median magnitude, which is that of an entry, the lower of two.
        massive: int64 (tokens,) on the device of the state, to which the number of massive activations at each position
            is added.

    Raises:
        NotFinite: the state holds NaN or inf. On a GPU, `state.found` raises it later.
    """
    _serving("states", state.x.device, state.x, state.kept)[1].add_residual(state, limits, massive)


def has_attention_kernel(query: torch.Tensor, key: torch.Tensor) -> bool:
    """Return whether a kernel can compute `attention_sums`; otherwise only the reference does."""
    return _serving("attention", query.device, query, key)[0] is not BACKENDS[-1]


def attention_sums(query: torch.Tensor, key: torch.Tensor, scaling: float) -> torch.Tensor:
    """Sum the probabilities of causal attention over the queries: float32 (heads, T).

    Args:
        query: (1, heads, T, features).
        key: (1, heads, T, features), with as many heads or a divisor of them.
        scaling: factor of the scores before the softmax.
    """
    return _serving("attention", query.device, query, key)[1].attention_sums(query, key, scaling)


def add_logits(
    logits: torch.Tensor, start: int, targets: torch.Tensor, normalizers: torch.Tensor, target_logits: torch.Tensor
) -> None:
    """Add a part of the vocabulary to the losses of predictions; a loss is its normalizer minus its target's logit.

    Args:
        logits: (predictions, tokens) of the tokens from `start` on, of any floating-point dtype; computed in float32 or
            better.
        start: number of the first of these tokens in the vocabulary.
        targets: int64 (predictions, 1).
        normalizers: float64 (predictions, 1), logarithms of the sums of exponentials, updated in place.
        target_logits: float64 (predictions, 1), set for targets among these tokens.
    """
    _serving("losses", logits.device, logits)[1].add(logits, start, targets, normalizers, target_logits)


@torch.library.custom_op("outlier_kernels::linear", mutates_args=())
def linear_plain(
    hidden_states: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    code_sums: torch.Tensor | None,
    bias: torch.Tensor | None,
    activations: str | None,
    threshold: float | None,
    arithmetic: str,
    exact_weight: torch.Tensor | None,
    exact_quantizer: str | None,
) -> torch.Tensor:
    """Compute `linear` with a `Quantized` weight, as the operator `torch.ops.outlier_kernels.linear`; quantizers are
    text."""
    weight = Quantized(codes, scale, zero_point, code_sums)
    exact = None if exact_weight is None else Exact(exact_weight, Quantizer.read(exact_quantizer))
    return _multiply(hidden_states, weight, bias, Quantizer.read(activations), threshold, arithmetic, exact)


@linear_plain.register_fake
def _(hidden_states, codes, *_rest):
    return hidden_states.new_empty(len(hidden_states), len(codes))


@torch.library.custom_op("outlier_kernels::linear_packed", mutates_args=())
def linear_packed(
    hidden_states: torch.Tensor,
    blocks: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    outputs: int,
    has_layout: bool,
    activations: str,
    threshold: float | None,
) -> torch.Tensor:
    """Compute `linear` with a `Packed` weight, as the operator `torch.ops.outlier_kernels.linear_packed`.

    has_layout: whether the passes know the layout of the codes in memory, `Packed.address`; the address itself must not
    be recorded in a graph.
    """
    address = packed.address_of(blocks) if has_layout else 0
    weight = Packed(blocks, scale, (outputs, hidden_states.shape[1]), address)
    return _multiply(hidden_states, weight, bias, Quantizer.read(activations), threshold, "exact")


@linear_packed.register_fake
def _(hidden_states, _blocks, _scale, _bias, outputs, *_rest):
    return hidden_states.new_empty(len(hidden_states), outputs)
