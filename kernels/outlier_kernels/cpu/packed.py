"""Products with weights in oneDNN's layout, through its int8 units (AVX-512 VNNI, AMX).

oneDNN multiplies unsigned activations (zero point 128) with weights in a layout of its own, and scales the columns of
the output while they are in cache. Only this layout of a weight is kept: the product with a one-hot row returns any of
its columns exactly.
"""

import ctypes
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch

from outlier_kernels.cpu import all_passes, codes
from outlier_kernels.cpu.compiled import KINDS
from outlier_kernels.formats import ROWS, Quantizer, is_int8
from outlier_kernels.reference_integers import Quantized

LARGEST_K = 66_000  # features in one sum of products of up to 255 · 127: k · 32385 < 2^31
# On AMX units oneDNN converts a sum to float32 before it subtracts the zero point's part, 128 times the sum of an
# output's codes. Below this limit, sums up to 2^23 stay exact, and larger ones are within the rounding of float32.
LARGEST_PART = 2**23
FEW = 8  # outlier columns up to which adding them one by one is faster than torch's matrix product
AT_ONCE = 1 << 30  # multiplications per chunk, whose outputs are finished before the next chunk
STRIP = 256  # features whose largest magnitudes one piece finds
FEW_TOKENS = 16  # tokens up to which reading the weight outweighs multiplying, even on AMX units
LEAST_AT_ONCE = 128  # tokens below which reading the weight outweighs multiplying


class Packed(NamedTuple):
    """An absmax-quantized weight in oneDNN's layout.

    blocks: the codes, opaque. scale: float32 (outputs, 1) or (1, 1). shape: (outputs, features). address: of the codes
    in memory if their layout is known to the passes, otherwise 0.
    """

    blocks: torch.Tensor
    scale: torch.Tensor
    shape: tuple[int, int]
    address: int = 0


def serves(weight: Quantized | Packed, _activations: Quantizer | None, _dtype: torch.dtype) -> bool:
    """Return whether a weight was packed; it is packed only for activations that `linear` supports."""
    return isinstance(weight, Packed)


def prepare(weight: Quantized, activations: Quantizer | None = ROWS) -> Packed | None:
    """Return a packed weight, or None if it cannot be packed."""
    return pack(weight) if can_pack(weight, activations) else None


def can_pack(weight: Quantized, activations: Quantizer | None = ROWS) -> bool:
    """Return whether a weight can be packed for activations: both are int8 and absmax, scales are float32, and code
    sums are small enough for the products."""
    if not is_int8(activations) or not activations.symmetric:
        return False
    if not weight.has_exact_sums or weight.zero_point is not None or weight.scale.dtype != torch.float32:
        return False
    if weight.codes.shape[1] > LARGEST_K:
        return False
    sums = weight.codes.sum(1, dtype=torch.int64)
    return 128 * int(sums.abs().max() if len(sums) else 0) < LARGEST_PART


def pack(weight: Quantized) -> Packed:
    """Convert a weight (outputs, features) to oneDNN's layout."""
    # Contiguous, because oneDNN reads the memory of a transposed weight, such as GPT-2's, as that of a plain one.
    blocks = torch.ops.onednn.qlinear_prepack(weight.codes.contiguous(), None)
    is_known = weight.codes.numel() > 0 and _lies_in_blocks(weight.codes, blocks)
    address = address_of(blocks) if is_known else 0
    return Packed(blocks, weight.scale.contiguous(), tuple(weight.codes.shape), address)


def address_of(blocks: torch.Tensor) -> int:
    return torch.ops.mkldnn.data_ptr(blocks)


def _lies_in_blocks(codes: torch.Tensor, blocks: torch.Tensor) -> bool:
    """Return whether packed memory has the layout that the passes expect.

    These are codes (outputs, features) in blocks of `passes.BLOCK` outputs, ordered by words of features, followed by
    the negative sum of each output's codes.
    """
    sizes, (outputs, features) = all_passes(), codes.shape
    whole = sizes.WORDS * sizes.IN_WORD
    padded = torch.nn.functional.pad(codes, (0, -features % whole, 0, -outputs % sizes.BLOCK))
    expected = padded.view(-1, sizes.BLOCK, padded.shape[1] // sizes.IN_WORD, sizes.IN_WORD).transpose(1, 2).flatten()
    sums = -padded.sum(1, dtype=torch.int32)
    expected = torch.cat([expected, sums.view(torch.int8)])
    if not hasattr(torch.ops.mkldnn, "_nbytes") or torch.ops.mkldnn._nbytes(blocks) != len(expected):
        return False
    memory = (ctypes.c_int8 * len(expected)).from_address(address_of(blocks))
    return torch.equal(torch.frombuffer(memory, dtype=torch.int8), expected)


def unpack(weight: Packed) -> Quantized:
    """Return the codes that were packed, exactly."""
    features = weight.shape[1]
    codes = weight.scale.new_empty(weight.shape, dtype=torch.int8)
    ones = weight.scale.new_ones(weight.shape[0])
    for start in range(0, features, 256):
        columns = torch.arange(start, min(start + 256, features), device=codes.device)
        rows = codes.new_full((len(columns), features), 128, dtype=torch.uint8)
        codes[:, columns] = _product(_one_hot(rows, columns), weight, ones).T.to(torch.int8)
    return Quantized(codes, weight.scale)


def linear(
    hidden_states: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None = None,
    activations: Quantizer = ROWS,
    threshold: float | None = None,
    _exact: None = None,
) -> torch.Tensor:
    """Compute `reference.linear` with absmax activations, (tokens, features) to (tokens, outputs)."""
    x = codes.as_rows(hidden_states)
    if weight.address and (len(x) <= FEW_TOKENS or not torch.cpu._is_amx_tile_supported()):
        result, outliers = _in_one_pass(x, weight, bias, activations, threshold)
        if outliers is None:
            return result.to(hidden_states.dtype)
    else:
        outliers = codes.outlier_features(x, threshold)
    room = _room(x, outliers)
    scale = codes.quantize_without(x, activations, outliers, room[len(outliers) :]).scale
    return _multiply(hidden_states, room, scale, outliers, weight, bias)


def _in_one_pass(
    x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, activations: Quantizer, threshold: float | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `linear` in the dtype of x; if there are more outlier features than the pass supports, return their
    places and a result without values."""
    compiled, (tokens, features), outputs = all_passes(), x.shape, weight.shape[0]
    shared = not activations.per_row
    strips = 0 if threshold is None and not shared else -(-features // STRIP)
    phases = [
        (strips, tokens * STRIP),
        (-(-tokens // compiled.QUANTIZED), min(tokens, compiled.QUANTIZED) * features),
        (
            -(-outputs // compiled.BLOCK) * -(-tokens // compiled.TOKENS),
            min(tokens, compiled.TOKENS) * features * compiled.BLOCK,
        ),
    ]
    result = x.new_empty(tokens, outputs)
    # Room for the largest magnitude of each feature, and for the scale, outlier values and codes of each token.
    room = x.new_empty(features + tokens * (1 + compiled.FEW) + -(-tokens * features // 4) + 1, dtype=torch.int32)
    places = [room.data_ptr() + 4 * place for place in accumulate((features, tokens, tokens * compiled.FEW), initial=0)]
    if bias is not None and not (bias.dtype in KINDS and bias.is_contiguous()):
        bias = bias.float().contiguous()
    count = compiled.packed_layer.in_phases(
        phases,
        x=x,
        strips=strips,
        width=STRIP,
        threshold=-1 if threshold is None else _bits(threshold),
        has_one_scale=shared,
        weight=(weight.address, weight.scale, int(len(weight.scale) > 1), outputs),
        bias=bias,
        room=places,
        result=result,
    )
    if not count:
        return result, None
    largest = room[:features]
    return result, ((largest >= _bits(threshold)) & (largest <= int(compiled.INFINITE))).nonzero()[:, 0]


@cache
def _bits(threshold: float) -> int:
    """Return the bits of a threshold as a non-negative float32."""
    return ctypes.c_int32.from_buffer(ctypes.c_float(max(threshold, 0.0))).value


def _room(x: torch.Tensor, outliers: torch.Tensor) -> torch.Tensor:
    """Return memory for the codes of x, preceded by one-hot rows that read the outliers' columns of the weight in the
    same product."""
    room = x.new_empty(len(outliers) + len(x), x.shape[1], dtype=torch.uint8)
    if len(outliers):
        _one_hot(room[: len(outliers)].fill_(128), outliers)
    return room


def _one_hot(rows: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Set each row of uint8 codes with zero point 128 to 1 in one feature."""
    return rows.scatter_(1, features[:, None], 129)


def _multiply(
    hidden_states: torch.Tensor,
    room: torch.Tensor,
    scale: torch.Tensor,
    outliers: torch.Tensor,
    weight: Packed,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Multiply chunks of tokens in sequence, finishing each while its outputs are in cache."""
    tokens, outputs = len(hidden_states), weight.shape[0]
    result = hidden_states.new_empty(tokens, outputs)
    column_scales = weight.scale.flatten().expand(outputs).contiguous()
    bias = scale.new_zeros(outputs) if bias is None else bias.float().contiguous()
    values = hidden_states.index_select(1, outliers).float()
    at_once = max(LEAST_AT_ONCE, AT_ONCE // max(1, weight.shape[1] * outputs))
    chunks = -(-tokens // at_once) or 1
    at_once = -(-tokens // chunks) or 1  # equal chunks, because torch multiplies a single row in another order
    columns = None
    for start in range(0, tokens, at_once):
        chunk = slice(start, start + at_once)
        first = 0 if columns is None else len(outliers) + start
        product = _product(room[first : len(outliers) + start + at_once], weight, column_scales)
        if columns is None:
            largest = torch.finfo(product.dtype).max  # as in `Quantized.dequantize`, because inf times 0 is NaN
            columns, product = product[: len(outliers)].clamp_(-largest, largest), product[len(outliers) :]
        _finish(product, scale[chunk], bias, values[chunk], columns, result[chunk])
    return result


def _finish(
    product: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor,
    values: torch.Tensor,
    columns: torch.Tensor,
    result: torch.Tensor,
) -> None:
    """Add the bias and the product of outlier values (tokens, outliers) and dequantized columns (outliers, outputs) to
    a product times the scales of the tokens, and store it in `result`."""
    few = len(columns) <= FEW
    outputs = result if few and result.dtype in KINDS else product
    given = {"product": product, "in_place": outputs is product, "scales": scale, "bias": bias}
    all_passes().finish_packed(*product.shape, **given, outliers=(values, columns, few * len(columns)), result=outputs)
    if not few:
        product.addmm_(values, columns)
    if outputs is product:
        result.copy_(product)


def _product(codes: torch.Tensor, weight: Packed, column_scales: torch.Tensor) -> torch.Tensor:
    """Multiply uint8 codes with zero point 128 with a packed weight, times the scales of its columns (outputs,):
    float32 (tokens, outputs)."""
    zeros = column_scales.new_zeros(weight.shape[0], dtype=torch.int32)
    operands = (codes, 1.0, 128, weight.blocks, column_scales, zeros, None)
    return torch.ops.onednn.qlinear_pointwise(*operands, 1.0, 0, torch.float32, "none", [], "")
