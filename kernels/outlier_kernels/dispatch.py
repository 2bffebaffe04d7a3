"""One linear layer for every device and scheme: which path runs, and what it needs of a weight."""

import os
import warnings
from functools import cache
from types import ModuleType

import torch

from outlier_kernels import cpu, reference, reference_products
from outlier_kernels.cpu import codes, packed, plain
from outlier_kernels.cpu import products as cpu_products
from outlier_kernels.cpu.packed import Packed
from outlier_kernels.formats import ROWS, Quantizer
from outlier_kernels.reference import Exact, Quantized

PATHS = ("reference", "cpu", "triton")


def path(device: torch.device) -> str:
    """The path that runs on a device: that of the variable OUTLIERS_KERNELS, or the fastest that is there.

    Raises:
        ValueError: the variable names no path, or one that does not run on this device.
    """
    forced = os.environ.get("OUTLIERS_KERNELS")
    if not forced:
        return _fastest(device.type)
    if forced not in PATHS:
        raise ValueError(f"OUTLIERS_KERNELS is '{forced}'; expected one of {', '.join(PATHS)}")
    if forced != "reference" and forced != _fastest(device.type):
        raise ValueError(f"OUTLIERS_KERNELS is '{forced}', which does not run on '{device}' here; leave it unset")
    return forced


@cache
def _fastest(device: str) -> str:
    if device == "cuda" and _has_triton() and _has_int8_tensor_cores():
        return "triton"
    if device != "cpu":
        warnings.warn(f"no fast int8 product for '{device}' here; the reference in plain torch runs", stacklevel=3)
        return "reference"
    if not cpu.has_int8_units():
        warnings.warn("this CPU has no int8 units (AVX-512 VNNI); products of int8 codes run in floats", stacklevel=3)
    return "cpu"


def _has_triton() -> bool:
    try:
        import outlier_kernels.triton  # noqa: F401, a GPU machine without Triton takes the reference
    except ImportError:
        return False
    return True


def _has_int8_tensor_cores() -> bool:
    """From compute capability 8.0 on, except 10.x, which has none."""
    major, _ = torch.cuda.get_device_capability()
    return major >= 8 and major != 10


def path_of(
    weight: Quantized | Packed,
    activations: Quantizer | None = ROWS,
    arithmetic: str = "exact",
    dtype: torch.dtype = torch.float32,
) -> str:
    """The path that multiplies a weight with hidden states: the one place that decides it.

    Args:
        weight: prepared or not.
        activations: how the hidden states are quantized; None for not at all.
        arithmetic: a name in `outlier_kernels.formats.ARITHMETICS`.
        dtype: of the hidden states.
    """
    if isinstance(weight, Packed):
        return "cpu"
    runs = path(weight.codes.device) if arithmetic == "exact" else "reference"
    if runs == "cpu" and plain.serves(weight, activations, dtype):
        return "cpu"
    if runs == "triton":
        from outlier_kernels import triton

        if triton.serves(weight, activations, dtype):
            return "triton"
    return "reference"


def quantize_weight(weight: torch.Tensor, quantizer: Quantizer | None, arithmetic: str = "exact") -> Quantized:
    """A weight (outputs, features) in the codes that an arithmetic multiplies: those of `reference.WEIGHTS`."""
    served = arithmetic == "exact" and weight.is_cpu and codes.serves(weight, quantizer) and not _is_watched(weight)
    if served and path(weight.device) == "cpu":
        return codes.quantize_weight(weight, quantizer)
    return reference.WEIGHTS[arithmetic](weight, quantizer)


def prepare(weight: Quantized, activations: Quantizer | None = ROWS, arithmetic: str = "exact") -> Quantized | Packed:
    """A weight as the path of its device multiplies it fastest; the weight itself where there is nothing to gain."""
    runs = path_of(weight, activations, arithmetic)
    if runs == "cpu" and cpu.has_int8_units() and packed.serves(weight, activations):
        return packed.pack(weight)
    if runs == "triton":  # whose loads are widest where rows begin at multiples of 16 bytes
        features = weight.codes.shape[1]
        return weight._replace(codes=torch.nn.functional.pad(weight.codes, (0, -features % 16))[:, :features])
    return weight


def restore(weight: Quantized | Packed) -> Quantized:
    """The weight that was prepared, exactly."""
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
    """A linear layer with quantized weights, as `outlier_kernels.reference.LINEAR` has it for an arithmetic.

    Rounding has no gradient: none flows through it. It is one operator to whoever looks on, such as `torch.compile`
    and `torch.func`; called as it is, it costs no operator's overhead.

    Args:
        hidden_states: float16, bfloat16, float32 or float64 (tokens, features).
        weight: of (outputs, features); prepared by `prepare` for the same activations and arithmetic, or not.
        bias: (outputs,).
        activations: how the hidden states are quantized; None for not at all.
        threshold: magnitude from which a feature is an outlier; None for no decomposition.
        arithmetic: "exact", or "bitsandbytes" to compute LLM.int8() as bitsandbytes does.
        exact: the exact weight, which outlier features meet, where it is at hand; not for the arithmetic of
            bitsandbytes, nor with prepared weights.

    Returns:
        (tokens, outputs) in the dtype of `hidden_states`.

    Raises:
        ValueError: the hidden states are no floating-point matrix, or their features are not those of the weight.
    """
    features = shape_of(weight)[1]
    if hidden_states.ndim != 2 or not hidden_states.is_floating_point() or hidden_states.shape[1] != features:
        got = f"{hidden_states.dtype} {tuple(hidden_states.shape)}"
        raise ValueError(f"linear takes floating-point (tokens, {features}), got {got}")
    if torch.is_grad_enabled():
        with torch.no_grad():
            return linear(hidden_states, weight, bias, activations, threshold, arithmetic, exact)
    if not _is_watched(hidden_states):
        return _multiply(hidden_states, weight, bias, activations, threshold, arithmetic, exact)
    scheme = None if activations is None else str(activations), threshold, arithmetic
    if isinstance(weight, Packed):
        readable = weight.address != 0
        return linear_packed(hidden_states, weight.blocks, weight.scale, bias, weight.shape[0], readable, *scheme[:2])
    of_exact = (
        (None, None) if exact is None else (exact.weight, None if exact.quantizer is None else str(exact.quantizer))
    )
    return linear_plain(hidden_states, *weight, bias, *scheme, *of_exact)


def shape_of(weight: Quantized | Packed) -> tuple[int, int]:
    """Outputs and features of a weight, prepared or not."""
    return weight.shape if isinstance(weight, Packed) else weight.codes.shape


def _is_watched(hidden_states: torch.Tensor) -> bool:
    """Whether somebody looks on at operators, such as a compiler, or the tensor stands for others and has no memory."""
    if torch.compiler.is_compiling() or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack():
        return True
    try:
        memory = hidden_states.untyped_storage()
        return memory.device.type == "meta" or (memory.nbytes() > 0 and not memory.data_ptr())  # fake ones say "meta"
    except RuntimeError:  # those of torch.func have none
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
    if not len(hidden_states):  # which have no extremes
        return hidden_states.new_empty(0, shape_of(weight)[0])
    runs = path_of(weight, activations, arithmetic, hidden_states.dtype)
    if isinstance(weight, Packed):
        return packed.linear(hidden_states, weight, bias, activations, threshold)
    if runs == "cpu":
        layer = plain.linear
    elif runs == "triton":
        from outlier_kernels import triton

        layer = triton.linear
    else:
        layer = reference.LINEAR[arithmetic]
    return layer(hidden_states, weight, bias, activations, threshold, exact)


@torch.no_grad()
def product(
    left: torch.Tensor,
    right: torch.Tensor,
    outliers: torch.Tensor | None = None,
    exact: torch.Tensor | None = None,
    seed: int | None = None,
) -> torch.Tensor:
    """left · rightᵀ in int8, for matrices that are both quantized for it, as `reference_products.product` has it."""
    return _products_for(left, right).product(left, right, outliers, exact, seed)


def _products_for(*operands: torch.Tensor) -> ModuleType:
    """Whose products of matrices these are."""
    runs = path(operands[0].device)
    if runs == "cpu" and cpu_products.serves(*operands):
        return cpu_products
    if runs == "triton":
        from outlier_kernels.triton import products as triton_products

        if triton_products.serves(*operands):
            return triton_products
    return reference_products


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
    weights: str | None,
) -> torch.Tensor:
    """`linear` with a `Quantized` weight as an operator, `torch.ops.outlier_kernels.linear`; quantizers as they are
    written."""
    weight = Quantized(codes, scale, zero_point, code_sums)
    exact = None if exact_weight is None else Exact(exact_weight, Quantizer.read(weights))
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
    readable: bool,
    activations: str,
    threshold: float | None,
) -> torch.Tensor:
    """`linear` with a `Packed` weight as an operator, `torch.ops.outlier_kernels.linear_packed`; readable: whether it
    has an address, which no graph is to keep."""
    address = packed.address_of(blocks) if readable else 0
    weight = Packed(blocks, scale, (outputs, hidden_states.shape[1]), address)
    return _multiply(hidden_states, weight, bias, Quantizer.read(activations), threshold, "exact")


@linear_packed.register_fake
def _(hidden_states, _blocks, _scale, _bias, outputs, *_rest):
    return hidden_states.new_empty(len(hidden_states), outputs)
