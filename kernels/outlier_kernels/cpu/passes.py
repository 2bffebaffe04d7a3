"""The compiled passes, in numba, over raw memory: shared functions first, then one function per pass.

A pass reads its input once. It computes, and rounds in the same order, what `outlier_kernels.reference` does. All
compiled code is in this file, because numba only notices changes of the file of a function; it uses nothing but numbers
from other files.
"""

from collections import namedtuple
from collections.abc import Callable, Iterable
from itertools import count
from operator import itemgetter
from types import FunctionType
from zlib import crc32

import numpy as np
import torch
from llvmlite import ir
from llvmlite.binding import initialize_native_asmparser
from numba import float32, from_dtype, int32, int64, njit, types, uint16
from numba.core import cgutils
from numba.extending import intrinsic
from numpy import floor, rint  # to the nearest, ties to even

from outlier_kernels.cpu.compiled import AT_ONCE, DONE, HITS, KINDS, NOTHING, PIECES, REPORT, Pass
from outlier_kernels.reference_products import KEY_STEPS, MULTIPLIERS, ROUNDS

FLOAT32, BFLOAT16, FLOAT16 = (KINDS[dtype] for dtype in (torch.float32, torch.bfloat16, torch.float16))
MAGNITUDE = np.int32(0x7FFFFFFF)  # the bits of a float without its sign, an integer in the order of |x|
ROUND = np.float32(12_582_912)  # 1.5 · 2^23: in its sum with a small float, the lowest bits are the nearest integer
CODE_MAX = np.float32(127)
LEAST_NORMAL, LARGEST_RANGE = np.float32(2.0**-126), np.float32(2.0**126)  # reciprocals of each other
LARGEST = np.finfo(np.float32).max
WORD, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)  # mask of the lower half of 64 bits, and its size
MULTIPLIERS, KEY_STEPS = tuple(map(np.uint64, MULTIPLIERS)), tuple(map(np.uint64, KEY_STEPS))
STRIP = 4096  # outputs at once
FUSED = 3  # outlier columns that are added in the loop that writes the outputs
FEW = 8  # most outlier columns that are added one by one
# Products with weights in oneDNN's layout: outputs in a block, features in a word, number of words to which
# features are padded; tokens whose sums stay in registers, and tokens of a piece.
BLOCK, IN_WORD, WORDS, TILE, TOKENS = 64, 4, 16, 6, 96
QUANTIZED = 16  # tokens in a piece of quantization
INFINITE = np.int32(0x7F800000)  # the bits of inf; those of NaN are larger
CHOSEN = 16  # integers that are filtered at once
BINS = 1 << 10  # bins of a histogram that fits a core's first cache
SAMPLED = 2048  # sampled entries that give bounds for a median
FLOAT, HALF_FLOAT, BITS = ir.FloatType(), ir.HalfType(), ir.IntType
LANES, FLOATS = ir.VectorType(BITS(32), 16), ir.VectorType(FLOAT, 16)
# All numbers that compiled code may contain, including those of other files, whose changes numba does not see.
NUMBERS = [f"{name} {value}" for name, value in vars().items() if isinstance(value, int | tuple | np.generic)]
FILED_BY = f"{crc32(' '.join(NUMBERS).encode()):08x}"
inlined = njit(error_model="numpy")
summing = njit(error_model="numpy", fastmath={"reassoc", "contract"})  # any order, for vectorization


def _group(name: str, **names: str) -> type:
    """Make a named tuple that groups arguments, from the fields of each kind: integers (int), or pointers to numbers of
    a dtype."""
    kinds = {
        field: int if kind == "int" else getattr(np, kind) for kind, fields in names.items() for field in fields.split()
    }
    made = namedtuple(name, kinds, module=__name__)
    made.__annotations__ = kinds
    return made


# Numbers of one of `KINDS`, with strides in bytes; a matrix, or the first of several.
Matrix = _group("Matrix", int="memory kind rows columns row_stride column_stride")
Places = _group("Places", int64="features", int="count")  # some features
Array = _group("Array", int="memory kind")  # contiguous numbers of one of `KINDS`, or nothing; bool for hits
# Codes of rows plus an offset, and for each row the scale and the sum of the codes without the offset.
Codes = _group("Codes", int8="codes", int="offset", float32="scales sums")
# Flags of the features that are left out, if any, and the stride of flags from matrix to matrix.
Flags = _group("Flags", uint8="flags", int="stride")
Chance = _group("Chance", int="rounds seed")  # whether rounding is stochastic, and its seed
# Values (rows, count) and columns (count, outputs), whose products are added one by one.
Outliers = _group("Outliers", float32="values columns", int="count")
Scales = _group("Scales", float32="rows columns")  # scales of each row and of each column
# Zero points and code sums of rows, and their factors for each column; or nothing.
ZeroPoints = _group("ZeroPoints", int32="row_zeros row_sums of_zeros of_sums")
# A weight in oneDNN's layout: codes in blocks of outputs, followed by the negative sum of each output's codes; scales
# and their stride.
Blocks = _group("Blocks", int="codes scales scale_stride outputs")
# Memory of a layer with such a weight: the largest magnitude of each feature, and for each token the scale, values in
# `FEW` outlier features, and codes.
Room = _group("Room", int32="largest", float32="scales values", int8="codes")
# Partial results: by block of rows and feature the extremes, hits and sums; by strip of features and token the sums of
# four powers, (strips, 4, tokens); by piece the largest magnitude without position 0.
Partial = _group("Partial", float64="sums squares powers", float32="low high rests", int32="hits")
# By piece the largest magnitude, its feature and position, and the numbers of magnitudes below and between the median's
# bounds; the largest magnitude of each token; the magnitudes between the bounds, room for (tokens, features).
Magnitudes = _group("Magnitudes", int64="pieces", int32="largest between")
# The tensors of `states.STATISTICS` and `states.RESIDUAL`, by name.
Statistics = _group(
    "Statistics",
    float32="min max rest_max",
    int64="hits sequences_hit",
    float64="largest sum squares squares_rest kurtosis_tensor kurtosis_token",
)
Residual = _group("Residual", float64="largest sum_of_max sum_of_ratios", int64="massive")


def _split_matrix(matrix: torch.Tensor) -> tuple:
    size, shape, strides = matrix.itemsize, matrix.shape, matrix.stride()
    return matrix, KINDS[matrix.dtype], shape[-2], shape[-1], strides[-2] * size, strides[-1] * size


def _statistics_splitter(group: type) -> Callable:
    of_group = itemgetter(*("rest.max" if name == "rest_max" else name for name in group._fields))
    return lambda statistics: of_group(statistics.addresses)


# By group, the function that splits an argument into its fields, if it is not a tuple of them already.
PARTS = {
    Matrix: _split_matrix,
    Places: lambda places: (places, places.numel()),
    Array: lambda kept: (kept, NOTHING if kept is None else KINDS.get(kept.dtype, HITS)),
    **{group: _statistics_splitter(group) for group in (Statistics, Residual)},
}


def _type_of(kind: type) -> types.Type:
    if kind is int:
        return int64
    if issubclass(kind, np.generic):
        return types.CPointer(from_dtype(np.dtype(kind)))
    return types.NamedTuple([_type_of(part) for part in kind.__annotations__.values()], kind)


def _unpacking(kinds: Iterable[type]) -> Callable:
    """Make a function that reads arguments of these kinds from the words after the counters."""
    wanted = types.Tuple(list(map(_type_of, kinds)))

    @intrinsic
    def unpacked(_context, work):
        def code(context, builder, _signature, arguments):
            places = (context.get_constant(types.intp, place) for place in count(REPORT + 1))
            words = (builder.load(builder.gep(arguments[0], [place])) for place in places)

            def value(kind: types.Type) -> ir.Value:
                if isinstance(kind, types.BaseTuple):
                    return context.make_tuple(builder, kind, [value(part) for part in kind])
                word = next(words)
                return word if kind == int64 else builder.inttoptr(word, context.get_value_type(kind))

            return value(wanted)

        return wanted(work), code

    return unpacked


def _entry_point(work):
    body(work, *unpacked(work))  # noqa: F821, each pass has its own


def _pass(function: Callable) -> Pass:
    """Make a pass from a function of the counters and of arguments annotated with their kinds."""
    kinds = function.__annotations__
    namespace = {"body": inlined(function), "unpacked": _unpacking(kinds.values()), "__name__": __name__}
    entry_point = FunctionType(_entry_point.__code__, namespace)
    entry_point.__name__ = function.__name__
    entry_point.__qualname__ = f"{function.__name__}_{FILED_BY}"
    groups = {kind: PARTS.get(kind, tuple) for kind in kinds.values() if issubclass(kind, tuple)}
    return Pass(entry_point, {name: groups.get(kind) for name, kind in kinds.items()})


@intrinsic
def _address(_context, address, dtype):
    """Convert an address to a pointer to numbers of a dtype."""
    wanted = types.CPointer(dtype.dtype)
    return wanted(int64, dtype), lambda context, builder, _signature, given: builder.inttoptr(
        given[0], context.get_value_type(wanted)
    )


@intrinsic
def _number(_context, pointer):
    """Convert a pointer to an address."""
    return int64(pointer), lambda _context, builder, _signature, given: builder.ptrtoint(given[0], BITS(64))


@intrinsic
def _at(_context, pointer, place):
    """Return a pointer to the numbers from a place on."""
    return pointer(pointer, int64), lambda _context, builder, _signature, given: builder.gep(given[0], given[1:])


@intrinsic
def _is_given(_context, pointer):
    return types.boolean(pointer), lambda _context, builder, _signature, given: builder.icmp_unsigned(
        "!=", given[0], given[0].type(None)
    )


@intrinsic
def _counted(_context, counter, count):
    """Add to a counter shared by all threads, and return its value before.

    The addition is atomic with acquire-release order: the caller sees everything written before earlier additions.
    """
    return int64(types.CPointer(int64), int64), lambda _context, builder, _signature, given: builder.atomic_rmw(
        "add", *given, "acq_rel"
    )


@intrinsic
def _select_between(_context, given, low, high, chosen):
    """Store those of `CHOSEN` integers between two bounds, both included, contiguously, and return their number; the
    rest of `CHOSEN` places is overwritten with arbitrary values."""

    def code(_context, builder, _signature, arguments):
        given, low, high, chosen = arguments
        numbers = builder.load(builder.bitcast(given, LANES.as_pointer()), align=4)
        everywhere, nothing = LANES([0] * LANES.count), LANES(ir.Undefined)
        low, high = (
            builder.shuffle_vector(builder.insert_element(nothing, bound, BITS(32)(0)), nothing, everywhere)
            for bound in (low, high)
        )
        lie_there = builder.and_(builder.icmp_signed(">=", numbers, low), builder.icmp_signed("<=", numbers, high))
        kind = ir.FunctionType(LANES, [LANES, lie_there.type, LANES])
        compress = cgutils.get_or_insert_function(builder.module, kind, "llvm.experimental.vector.compress.v16i32")
        packed = builder.call(compress, [numbers, lie_there, nothing])
        builder.store(packed, builder.bitcast(chosen, LANES.as_pointer()), align=4)
        return builder.zext(builder.ctpop(builder.bitcast(lie_there, BITS(LANES.count))), BITS(64))

    pointer = types.CPointer(int32)
    return int64(pointer, int32, int32, pointer), code


@intrinsic
def fma(_context, a, b, c):
    """Compute a · b + c with one rounding, as torch's addcmul does."""
    return float32(float32, float32, float32), lambda _context, builder, _signature, given: builder.fma(*given)


def _conversion(signature: types.Type, convert: Callable) -> Callable:
    @intrinsic
    def conversion(_context, number):
        return signature, lambda _context, builder, _signature, numbers: convert(builder, *numbers)

    return conversion


bits_of = _conversion(int32(float32), lambda builder, x: builder.bitcast(x, BITS(32)))
float_of = _conversion(float32(int32), lambda builder, bits: builder.bitcast(bits, FLOAT))
_float_of_half = _conversion(float32(uint16), lambda builder, x: builder.fpext(builder.bitcast(x, HALF_FLOAT), FLOAT))
_half_of = _conversion(uint16(float32), lambda builder, x: builder.bitcast(builder.fptrunc(x, HALF_FLOAT), BITS(16)))


@inlined
def _shares(work):
    """Yield ranges of pieces that a thread takes, until none is left."""
    first = _counted(work, work[AT_ONCE])
    while first < work[PIECES]:
        yield first, min(first + work[AT_ONCE], work[PIECES])
        first = _counted(work, work[AT_ONCE])


@inlined
def _pieces(work):
    """Yield single pieces that a thread takes, for large pieces, until none is left."""
    piece = _counted(work, 1)
    while piece < work[PIECES]:
        yield piece
        piece = _counted(work, 1)


@inlined
def _matrix_at(x, places, matrix):
    """Return one of several matrices, whose places are offsets in bytes."""
    return Matrix(x.memory + places[matrix], x.kind, x.rows, x.columns, x.row_stride, x.column_stride)


@inlined
def _place(x, row, column):
    return x.memory + row * x.row_stride + column * x.column_stride


@inlined
def _float_of_bfloat16(half):
    return float_of(np.int32(np.uint32(half) << np.uint32(16)))


@inlined
def _entry(x, r, column):
    """Read one entry of a matrix in memory as a float, whatever its dtype."""
    address = _place(x, r, column)
    if x.kind == FLOAT32:
        return _address(address, np.float32)[0]
    half = _address(address, np.uint16)[0]
    return _float_of_bfloat16(half) if x.kind == BFLOAT16 else _float_of_half(half)


@inlined
def load(kind, address, count, row):
    """Read entries of any kind as float32."""
    floats, halves = _address(address, np.float32), _address(address, np.uint16)
    if kind == FLOAT32:
        for i in range(count):
            row[i] = floats[i]
    elif kind == BFLOAT16:
        for i in range(count):
            row[i] = _float_of_bfloat16(halves[i])
    else:
        for i in range(count):
            row[i] = _float_of_half(halves[i])


@inlined
def _put_float32(floats, i, value):
    floats[i] = value


@inlined
def _put_bfloat16(halves, i, value):
    bits = np.uint32(bits_of(value))
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = (bits & np.uint32(MAGNITUDE)) > np.uint32(INFINITE)
    halves[i] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)


@inlined
def _put_float16(halves, i, value):
    halves[i] = _half_of(value)


@inlined
def store(kind, address, count, row):
    """Write float32 entries as any kind, rounded to nearest, ties to even."""
    if kind == FLOAT32:
        for i in range(count):
            _put_float32(_address(address, np.float32), i, row[i])
    elif kind == BFLOAT16:
        for i in range(count):
            _put_bfloat16(_address(address, np.uint16), i, row[i])
    else:
        for i in range(count):
            _put_float16(_address(address, np.uint16), i, row[i])


@inlined
def _ordered(bits):
    """Map the bits of a float to an integer in the order of floats, NaN beyond the infinities; the map is its own
    inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & MAGNITUDE))


@_pass
def feature_extremes(work, x: Matrix, width: int, low: np.float32, high: np.float32):
    """Find the smallest and the largest entry of each feature, NaN if it holds one; a piece is a strip of `width`
    features."""
    row, least, most = np.empty(width, np.float32), np.empty(width, np.int32), np.empty(width, np.int32)
    for piece in _pieces(work):
        start = piece * width
        count = min(width, x.columns - start)
        for i in range(count):
            least[i], most[i] = MAGNITUDE, ~MAGNITUDE
        for r in range(x.rows):
            load(x.kind, _place(x, r, start), count, row)
            for i in range(count):
                value = _ordered(bits_of(row[i]))
                least[i], most[i] = min(least[i], value), max(most[i], value)
        for i in range(count):
            is_nan = least[i] < _ordered(np.int32(-8388608)) or most[i] > INFINITE
            low[start + i] = np.nan if is_nan else float_of(_ordered(least[i]))
            high[start + i] = np.nan if is_nan else float_of(_ordered(most[i]))


@inlined
def _largest(row, count):
    """Return the largest |x| of a row, NaN if it holds one."""
    most = np.int32(0)
    for i in range(count):
        most = max(most, np.int32(bits_of(row[i]) & MAGNITUDE))
    return float_of(most)


@inlined
def _scale(largest):
    """Compute `reference_integers.absmax_scale`; quotients by this scale need no clamping, because they lie within the
    outermost codes."""
    scale = largest / CODE_MAX
    scale = LEAST_NORMAL if scale < LEAST_NORMAL else scale
    return np.float32(1) if largest == 0 else scale


@inlined
def _fill(row, places, value):
    for i in range(places.count):
        row[places.features[i]] = value


@_pass
def absmax_codes(work, x: Matrix, outliers: Places, scale_of_all: np.float32, made: Codes):
    """Make absmax codes of rows without outlier features, by a given scale for all rows or one per row; a piece is a
    row."""
    row, offset = np.empty(x.columns, np.float32), np.int32(made.offset)
    for first, end in _shares(work):
        for r in range(first, end):
            load(x.kind, _place(x, r, 0), x.columns, row)
            _fill(row, outliers, np.float32(0))
            scale = scale_of_all[0] if _is_given(scale_of_all) else _scale(_largest(row, x.columns))
            made.scales[r] = scale
            made.sums[r] = _round_to_codes(row, scale, x.columns, _at(made.codes, r * x.columns), offset)


@inlined
def _round_to_codes(row, scale, count, codes, offset):
    """Divide a row by its scale, write the nearest integers plus an offset, and return the sum of the integers. NaN
    becomes code 0."""
    total = np.int32(0)
    for i in range(count):
        code = np.int32(bits_of(row[i] / scale + ROUND) - bits_of(ROUND))
        codes[i] = np.int8(code + offset)
        total = np.int32(total + code)
    return np.float32(total)


@inlined
def _code(quotient):
    """Return the nearest integer, ties to even. NaN becomes 0."""
    return np.int8(bits_of(quotient + ROUND) - bits_of(ROUND))


@inlined
def _philox(words, count, seed):
    """Replace counters (4, count) by random words, see `reference_products.philox`. All counters go through a round
    before the next round, so that a round is a simple loop."""
    key, other = np.uint64(seed) & WORD, np.uint64(seed) >> HALF
    a, b, c, d = words[0], words[1], words[2], words[3]
    for _ in range(ROUNDS):
        first, second = np.uint32(key), np.uint32(other)
        for i in range(count):
            high, low = np.uint64(a[i]) * MULTIPLIERS[0], np.uint64(c[i]) * MULTIPLIERS[1]
            a[i], b[i] = np.uint32(low >> HALF) ^ b[i] ^ first, np.uint32(low)
            c[i], d[i] = np.uint32(high >> HALF) ^ d[i] ^ second, np.uint32(high)
        key, other = (key + KEY_STEPS[0]) & WORD, (other + KEY_STEPS[1]) & WORD


@inlined
def _chance(word):
    """Return the first 24 bits of a word as a number in [0, 1)."""
    return np.float32(np.int32(word >> np.uint32(8))) * np.float32(2.0**-24)


@inlined
def _code_by_chance(quotient, chance):
    """Return the integer below the sum of a quotient and a random number, clamped to codes if rounding left it just
    outside. NaN becomes 0."""
    below = floor(quotient + chance)
    return _code(-CODE_MAX if below < -CODE_MAX else CODE_MAX if below > CODE_MAX else below)


@_pass
def codes_by_row(
    work, x: Matrix, places: np.int64, left_out: Flags, chance: Chance, codes: np.int8, scales: np.float32
):
    """Make absmax codes (matrices, rows, features) and scales (matrices, rows) of matrices with contiguous rows; a
    piece is a row of any matrix."""
    features, fours = x.columns, -(-x.columns // 4)
    row, words = np.empty(features, np.float32), np.empty((4, fours), np.uint32)
    chances = np.empty((fours, 4), np.float32)
    for first, end in _shares(work):
        for r in range(first, end):
            matrix = r // x.rows
            load(x.kind, _place(_matrix_at(x, places, matrix), r % x.rows, 0), features, row)
            if _is_given(left_out.flags):
                flags = _at(left_out.flags, matrix * left_out.stride)
                for i in range(features):
                    row[i] = np.float32(0) if flags[i] else row[i]
            scale = _scale(_largest(row, features))
            scales[r] = scale
            of_row = _at(codes, r * features)
            if chance.rounds:
                for k in range(fours):
                    words[0, k], words[1, k], words[2, k], words[3, k] = k, r, 0, 0
                _philox(words, fours, chance.seed)
                for k in range(fours):
                    for j in range(4):
                        chances[k, j] = _chance(words[j, k])
                added = chances.ravel()
                for i in range(features):
                    of_row[i] = _code_by_chance(row[i] / scale, added[i])
            else:
                for i in range(features):
                    of_row[i] = _code(row[i] / scale)


@_pass
def codes_by_column(
    work, x: Matrix, places: np.int64, width: int, left_out: Flags, chance: Chance, codes: np.int8, scales: np.float32
):
    """Make codes and scales as `codes_by_row` does, of transposed matrices (features, rows), with codes in the same
    layout; a piece is a strip of `width` rows."""
    features, rows, strips = x.rows, x.columns, -(-x.columns // width)
    row, most = np.empty(width, np.float32), np.empty(width, np.int32)
    scale, words = np.empty(width, np.float32), np.empty((4, width), np.uint32)
    for piece in _pieces(work):
        matrix, start = piece // strips, piece % strips * width
        count, moved, first = min(width, rows - start), _matrix_at(x, places, matrix), matrix * rows + start
        flags = _at(left_out.flags, matrix * left_out.stride)
        for i in range(count):
            most[i] = 0
        for k in range(features):
            if not (_is_given(left_out.flags) and flags[k]):
                load(moved.kind, _place(moved, k, start), count, row)
                for i in range(count):
                    most[i] = max(most[i], np.int32(bits_of(row[i]) & MAGNITUDE))
        for i in range(count):
            scale[i] = scales[first + i] = _scale(float_of(most[i]))
        for k in range(features):
            of_feature = _at(codes, (matrix * features + k) * rows + start)
            if chance.rounds and k % 4 == 0:
                for i in range(count):
                    words[0, i], words[1, i], words[2, i], words[3, i] = k // 4, first + i, 0, 0
                _philox(words, count, chance.seed)
            if _is_given(left_out.flags) and flags[k]:
                for i in range(count):
                    of_feature[i] = 0
                continue
            load(moved.kind, _place(moved, k, start), count, row)
            if chance.rounds:
                for i in range(count):
                    of_feature[i] = _code_by_chance(row[i] / scale[i], _chance(words[k % 4, i]))
            else:
                for i in range(count):
                    of_feature[i] = _code(row[i] / scale[i])


@_pass
def zeropoint_codes(
    work, x: Matrix, outliers: Places, inlier: int, range_of_all: np.float32, made: Codes, zero_points: np.float32
):
    """Make zeropoint codes of rows without outlier features, whose codes are 0; a piece is a row.

    inlier: the first feature that is no outlier. range_of_all: normalized dynamic range and zero point for all rows, or
    nothing.
    """
    row = np.empty(x.columns, np.float32)
    for first, end in _shares(work):
        for r in range(first, end):
            load(x.kind, _place(x, r, 0), x.columns, row)
            _fill(row, outliers, row[inlier])
            if _is_given(range_of_all):
                dynamic_range, zero_point = range_of_all[0], range_of_all[1]
            else:
                dynamic_range, zero_point = _zeropoint(row, x.columns)
            of_row, total = _at(made.codes, r * x.columns), np.int32(0)
            for i in range(x.columns):
                value = rint(row[i] * dynamic_range) + zero_point
                code = np.int8(min(max(value, -CODE_MAX), CODE_MAX))
                of_row[i] = code
                total = np.int32(total + code)
            for i in range(outliers.count):
                total -= np.int32(of_row[outliers.features[i]])
                of_row[outliers.features[i]] = 0
            made.scales[r], zero_points[r], made.sums[r] = np.float32(1) / dynamic_range, zero_point, np.float32(total)


@inlined
def _zeropoint(row, count):
    """Return normalized dynamic range and zero point of a row (equations 1 and 2)."""
    least, most = MAGNITUDE, np.int32(~MAGNITUDE)
    for i in range(count):
        value = _ordered(bits_of(row[i]))
        least, most = min(least, value), max(most, value)
    low, high, half = float_of(_ordered(least)), float_of(_ordered(most)), np.float32(0.5)
    dynamic_range = CODE_MAX / (high * half - low * half)  # halves, because the range may exceed the largest float
    dynamic_range = LARGEST_RANGE if dynamic_range > LARGEST_RANGE else dynamic_range
    dynamic_range = np.float32(1) if high - low == 0 else dynamic_range
    return dynamic_range, -rint(dynamic_range * low) - CODE_MAX


def _finishing(put: Callable) -> Callable:
    """Make a function that finishes rows and writes them by `put`."""

    @inlined
    def finish(result, scaled, scale, bias, values, columns, count, stride, width):
        """Scale a row, add the bias and up to `FUSED` products of values and columns, and write it in a single loop."""
        two, three = _at(columns, stride), _at(columns, 2 * stride)
        if count == 0:
            for i in range(width):
                put(result, i, fma(scaled[i], scale, bias[i]))
        elif count == 1:
            a = values[0]
            for i in range(width):
                put(result, i, fma(a, columns[i], fma(scaled[i], scale, bias[i])))
        elif count == 2:
            a, b = values[0], values[1]
            for i in range(width):
                put(result, i, fma(b, two[i], fma(a, columns[i], fma(scaled[i], scale, bias[i]))))
        else:
            a, b, c = values[0], values[1], values[2]
            for i in range(width):
                put(result, i, fma(c, three[i], fma(b, two[i], fma(a, columns[i], fma(scaled[i], scale, bias[i])))))

    return finish


_finish_float32, _finish_bfloat16, _finish_float16 = map(_finishing, (_put_float32, _put_bfloat16, _put_float16))


@_pass
def finish_packed(
    work, product: np.float32, in_place: int, scales: np.float32, bias: np.float32, outliers: Outliers, result: Matrix
):
    """Turn products that include the weight's scales into outputs, possibly in place; a piece is a row.

    Each addition is fused with its multiplication, as in torch's addcmul.
    """
    row, outputs, count = np.empty(STRIP, np.float32), result.columns, outliers.count
    for first, end in _shares(work):
        for start in range(0, outputs, STRIP):
            for r in range(first, end):
                width, written = min(STRIP, outputs - start), _place(result, r, start)
                values, columns = _at(outliers.values, r * count), _at(outliers.columns, start)
                given = _at(product, r * outputs + start), scales[r], _at(bias, start), values, columns
                if count > FUSED or in_place:  # a fused loop would reorder the reads and writes
                    _finish_float32(row, *given, min(count, FUSED), outputs, width)
                    _add_columns(row, width, _at(values, FUSED), _at(columns, FUSED * outputs), count - FUSED, outputs)
                    store(result.kind, written, width, row)
                elif result.kind == FLOAT32:
                    _finish_float32(_address(written, np.float32), *given, count, outputs, width)
                elif result.kind == BFLOAT16:
                    _finish_bfloat16(_address(written, np.uint16), *given, count, outputs, width)
                else:
                    _finish_float16(_address(written, np.uint16), *given, count, outputs, width)


@inlined
def _add_columns(row, width, values, columns, count, stride):
    """Add products of values and columns one by one, which fixes the order of rounding."""
    for k in range(count):
        value, column = values[k], _at(columns, k * stride)
        for i in range(width):
            row[i] = fma(value, column[i], row[i])


@intrinsic
def _prefetch_to_write(_context, address):
    def code(_context, builder, _signature, given):
        pointer = builder.inttoptr(given[0], BITS(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [pointer.type, BITS(32), BITS(32), BITS(32)])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(prefetch, [pointer, BITS(32)(1), BITS(32)(3), BITS(32)(1)])

    return types.void(int64), code


@intrinsic
def _multiply_tile(_context, height, codes, stride, weights, words, of_weights, scales, bias, row_scales, tile):
    """Compute (codes · weights + 128 · of_weights) · scales · row_scales + bias of up to `TILE` tokens into tile,
    float32 (height, BLOCK). All arguments are addresses or integers.

    height: the number of tokens. words: the number of 32-bit words of a token's codes. of_weights: the negative sum of
    the codes of each output's weights, which takes the zero point 128 of the tokens' codes out.
    """

    def code(_context, builder, _signature, given):
        height, *others = given
        after = builder.append_basic_block()
        choice = builder.switch(height, after)
        for tokens in range(1, TILE + 1):
            builder.position_at_end(builder.append_basic_block())
            choice.add_case(height.type(tokens), builder.block)
            _tile(builder, tokens, *others)
            builder.branch(after)
        builder.position_at_end(after)

    return types.void(*[int64] * 10), code


def _tile(builder, height, codes, stride, weights, words, of_weights, scales, bias, row_scales, tile):
    """Generate code for a tile of one height, which keeps all sums in registers until they are scaled."""
    number, before = codes.type, builder.block
    loop, after = builder.append_basic_block(), builder.append_basic_block()

    def at(address: ir.Value, place: int, kind: ir.Type) -> ir.Value:
        return builder.inttoptr(builder.add(address, number(place)), kind.as_pointer())

    def vectors(address: ir.Value, kind: ir.Type) -> list[ir.Value]:
        return [builder.load(at(address, v, kind), align=1) for v in range(0, 4 * BLOCK, 4 * LANES.count)]

    def in_all_lanes(value: ir.Value, kind: ir.Type) -> ir.Value:
        vector = builder.insert_element(ir.Constant(kind, ir.Undefined), value, BITS(32)(0))
        return builder.shuffle_vector(vector, vector, ir.Constant(LANES, None))

    rows = [builder.add(codes, builder.mul(number(r), stride)) for r in range(height)]
    builder.branch(loop)
    builder.position_at_end(loop)
    word = builder.phi(number)
    totals = [[builder.phi(LANES) for _ in range(BLOCK // LANES.count)] for _ in rows]
    of_word = vectors(builder.add(weights, builder.mul(word, number(BLOCK * IN_WORD))), LANES)
    following = builder.add(word, number(1))
    word.add_incoming(number(0), before)
    word.add_incoming(following, loop)
    for row, of_row in zip(rows, totals, strict=True):
        place = builder.add(row, builder.mul(word, number(IN_WORD)))
        inputs = in_all_lanes(builder.load(at(place, 0, BITS(32)), align=1), LANES)
        for total, part in zip(of_row, of_word, strict=True):
            total.add_incoming(ir.Constant(LANES, None), before)
            total.add_incoming(builder.call(DOT, [total, inputs, part]), loop)
    builder.cbranch(builder.icmp_signed("<", following, words), loop, after)
    builder.position_at_end(after)
    seven, fma = ir.Constant(LANES, [7] * LANES.count), ir.FunctionType(FLOATS, [FLOATS] * 3)
    fma = cgutils.get_or_insert_function(builder.module, fma, "llvm.fma.v16f32")
    zeros = [builder.shl(sums, seven) for sums in vectors(of_weights, LANES)]
    of_block = list(zip(zeros, vectors(scales, FLOATS), vectors(bias, FLOATS), strict=True))
    for r, of_row in enumerate(totals):
        row_scale = in_all_lanes(builder.load(at(row_scales, 4 * r, FLOAT)), FLOATS)
        for v, (total, (zero, scale, added)) in enumerate(zip(of_row, of_block, strict=True)):
            whole = builder.sitofp(builder.add(total.incomings[1][0], zero), FLOATS)
            output = builder.call(fma, [builder.fmul(whole, scale), row_scale, added])
            builder.store(output, at(tile, 4 * (r * BLOCK + v * LANES.count), FLOATS), align=1)


initialize_native_asmparser()  # for the following instruction, whose intrinsic's name depends on the version of LLVM
# AVX-512 VNNI: adds to each of 16 sums the products of four unsigned and four signed bytes.
DOT = ir.InlineAsm(ir.FunctionType(LANES, [LANES] * 3), "vpdpbusd $3, $2, $0", "=v,0,v,v")


@_pass
def packed_layer(
    work,
    x: Matrix,
    strips: int,
    width: int,
    threshold: int,
    has_one_scale: int,
    weight: Blocks,
    bias: Array,
    room: Room,
    result: Matrix,
):
    """Compute a whole layer with a weight in oneDNN's layout: `reference.linear` with absmax codes.

    The work has three phases: a piece is a strip of `width` features whose largest magnitudes are found, if needed;
    then tokens whose codes are made; then a block of outputs of some tokens. If there are more than `FEW` outlier
    features, only the magnitudes are computed, and the number of these features is reported.

    threshold: its bits, or -1 for no decomposition. has_one_scale: whether all tokens share a scale. bias: (outputs,).
    """
    features, codes_at = x.columns, strips + -(-x.rows // QUANTIZED)
    parts = -(-x.rows // TOKENS)
    row, outliers, count, scale = np.empty(max(features, width), np.float32), np.empty(FEW, np.int64), 0, np.float32(0)
    of_block = np.empty((2 + FEW) * BLOCK, np.float32)  # scales, bias, and outlier columns
    tile = np.empty(TILE * BLOCK, np.float32)
    if work[PIECES] > strips:
        count, largest = _outliers_and_largest(room.largest, features if strips else 0, threshold, outliers)
        scale = _scale(float_of(largest))
        if count > FEW:
            work[REPORT] = count
            return
    for piece in _pieces(work):
        if piece < strips:
            _largest_of_features(x, piece * width, min(width, features - piece * width), row, room.largest)
        elif piece < codes_at:
            first = (piece - strips) * QUANTIZED
            for r in range(first, min(first + QUANTIZED, x.rows)):
                load(x.kind, _place(x, r, 0), features, row)
                for k in range(count):
                    room.values[r * FEW + k] = row[outliers[k]]
                    row[outliers[k]] = np.float32(0)
                room.scales[r] = scale if has_one_scale else _scale(_largest(row, features))
                _round_to_codes(row, room.scales[r], features, _at(room.codes, r * features), np.int32(128))
        else:
            start, part = (piece - codes_at) // parts * BLOCK, (piece - codes_at) % parts
            _read_block(weight, features, start, bias, outliers, count, of_block)
            end = min((part + 1) * TOKENS, x.rows)
            _multiply_block(part * TOKENS, end, features, start, weight, room, count, of_block, tile, result)


@inlined
def _largest_of_features(x, start, count, row, largest):
    """Find the bits of the largest |x| of some features, those of NaN if a feature holds one."""
    for i in range(count):
        largest[start + i] = 0
    for r in range(x.rows):
        load(x.kind, _place(x, r, start), count, row)
        for i in range(count):
            largest[start + i] = max(largest[start + i], np.int32(bits_of(row[i]) & MAGNITUDE))


@inlined
def _outliers_and_largest(largest, features, threshold, outliers):
    """Count outlier features, store the first `FEW` of them, and return also the bits of the largest magnitude of all
    others."""
    count, most = 0, np.int32(0)
    for i in range(features):
        if threshold >= 0 and largest[i] >= threshold and largest[i] <= INFINITE:  # with NaN it is no outlier
            if count < FEW:
                outliers[count] = i
            count += 1
        else:
            most = max(most, largest[i])
    return count, most


@inlined
def _read_block(weight, features, start, bias, outliers, count, of_block):
    """Read what all tokens need of a block of outputs into the rows of `of_block`, (2 + count, BLOCK): the scales, the
    bias, and the dequantized weights of each outlier feature."""
    width = min(BLOCK, weight.outputs - start)
    scales, codes = _address(weight.scales, np.float32), weight.codes + start * _rounded_up(features)
    of_block[: 2 * BLOCK] = 0
    for i in range(width):
        of_block[i] = scales[(start + i) * weight.scale_stride]
    if bias.kind != NOTHING:
        size = 4 if bias.kind == FLOAT32 else 2
        load(bias.kind, bias.memory + start * size, width, of_block[BLOCK:])
    for k in range(count):
        word, place = divmod(outliers[k], IN_WORD)
        column, values = _address(codes + word * BLOCK * IN_WORD + place, np.int8), of_block[(2 + k) * BLOCK :]
        for i in range(BLOCK):
            value = np.float32(column[i * IN_WORD]) * of_block[i]  # clamped as in `Quantized.dequantize`
            value = -LARGEST if value < -LARGEST else value
            values[i] = LARGEST if value > LARGEST else value


@inlined
def _rounded_up(features):
    """Return the number of features to which oneDNN's layout pads a weight."""
    return -(-features // (WORDS * IN_WORD)) * (WORDS * IN_WORD)


@inlined
def _multiply_block(first, end, features, start, weight, room, count, of_block, tile, result):
    """Compute the outputs of a block, from `start` on, for the tokens from `first` to `end`."""
    width, inputs = min(BLOCK, weight.outputs - start), _rounded_up(features)
    of_weights = weight.codes + inputs * -(-weight.outputs // BLOCK) * BLOCK + 4 * start
    words, scales, bias = -(-features // IN_WORD), of_block.ctypes.data, of_block[BLOCK:].ctypes.data
    tiles, top = -(-(end - first) // TILE), first
    for left in range(tiles, 0, -1):
        height = -(-(end - top) // left)  # nearly equal tiles, none of which repeats a token
        codes, row_scales = _number(_at(room.codes, top * features)), _number(_at(room.scales, top))
        inputs_of = codes, features, weight.codes + start * inputs, words
        for r in range(top, top + height):
            for line in range(0, BLOCK * (4 if result.kind == FLOAT32 else 2), 64):
                _prefetch_to_write(_place(result, r, start) + line)
        _multiply_tile(height, *inputs_of, of_weights, scales, bias, row_scales, tile.ctypes.data)
        for r in range(top, top + height):
            outputs = tile[(r - top) * BLOCK :]
            for k in range(count):
                value, column = room.values[r * FEW + k], of_block[(2 + k) * BLOCK :]
                for i in range(BLOCK):
                    outputs[i] = fma(value, column[i], outputs[i])
            store(result.kind, _place(result, r, start), width, outputs)
        top += height


@_pass
def finish_sums(
    work, sums: np.int32, scales: Scales, zero_points: ZeroPoints, added: np.float32, bias: np.float32, result: Matrix
):
    """Turn sums of products of codes into outputs, as `reference.matmul` does; a piece is a row.

    added: a term of the product, (rows, outputs), or nothing, like the bias.
    """
    row, outputs = np.empty(STRIP, np.float32), result.columns
    for first, end in _shares(work):
        for start in range(0, outputs, STRIP):
            for r in range(first, end):
                width, place = min(STRIP, outputs - start), r * outputs + start
                strip, scale, column_scales = _at(sums, place), scales.rows[r], _at(scales.columns, start)
                if _is_given(zero_points.row_zeros):
                    row_zero, row_sum = zero_points.row_zeros[r], zero_points.row_sums[r]
                    of_zeros, of_sums = _at(zero_points.of_zeros, start), _at(zero_points.of_sums, start)
                    for i in range(width):
                        whole = np.int32(strip[i] + row_zero * of_zeros[i] - row_sum * of_sums[i])
                        row[i] = np.float32(whole) * scale * column_scales[i]
                else:
                    for i in range(width):
                        row[i] = np.float32(strip[i]) * scale * column_scales[i]
                if _is_given(added):
                    _add(row, _at(added, place), width)
                if _is_given(bias):
                    _add(row, _at(bias, start), width)
                store(result.kind, _place(result, r, start), width, row)


@_pass
def finish_products(work, sums: np.int32, rows: int, scales: Scales, outliers: Outliers, result: Matrix):
    """Turn sums of products of codes of matrices with `rows` rows each into outputs; a piece is a row of any matrix.

    scales: of columns by matrix, as are the columns of outliers.
    """
    outputs, count = result.columns, outliers.count
    row, added = np.empty(STRIP, np.float32), np.empty(STRIP, np.float32)
    for first, end in _shares(work):
        for r in range(first, end):
            matrix, scale = r // rows, scales.rows[r]
            values = _at(outliers.values, r * count)
            for start in range(0, outputs, STRIP):
                width, strip = min(STRIP, outputs - start), _at(sums, r * outputs + start)
                column_scales = _at(scales.columns, matrix * outputs + start)
                if count:
                    columns = _at(outliers.columns, matrix * count * outputs + start)
                    for i in range(width):
                        added[i] = values[0] * columns[i]
                    _add_columns(added, width, _at(values, 1), _at(columns, outputs), count - 1, outputs)
                    for i in range(width):
                        row[i] = np.float32(strip[i]) * scale * column_scales[i] + added[i]
                else:
                    for i in range(width):
                        row[i] = np.float32(strip[i]) * scale * column_scales[i]
                store(result.kind, _place(result, r, start), width, row)


@inlined
def _add(row, added, count):
    for i in range(count):
        row[i] += added[i]


@inlined
def _floats(kind, address, count, room):
    """Return entries as float32, in place or copied to `room`."""
    if kind == FLOAT32:
        return _address(address, np.float32)
    load(kind, address, count, room)
    return _address(np.int64(room.ctypes.data), np.float32)


@summing
def _add_powers(row, count, sums, squares):
    """Add entries and their squares to the sums of their features; return the sums of the entries' first four
    powers."""
    first = second = third = fourth = 0.0
    for i in range(count):
        value = np.float64(row[i])
        square = value * value
        sums[i] += value
        squares[i] += square
        first += value
        second += square
        third += square * value
        fourth += square * square
    return first, second, third, fourth


@inlined
def _add_extremes(row, count, alpha, low, high, hits):
    """Widen the extremes of each feature and count entries of at least alpha; return whether there are any. NaN is
    skipped."""
    of_row = np.int32(0)
    for i in range(count):
        value = row[i]
        low[i], high[i] = min(low[i], value), max(high[i], value)
        hit = np.int32(abs(value) >= alpha)
        hits[i] += hit
        of_row = np.int32(of_row + hit)
    return of_row > 0


@inlined
def _keep_hits(row, alpha, kept, count):
    hit = _address(kept, np.uint8)
    for i in range(count):
        hit[i] |= np.uint8(abs(row[i]) >= alpha)


@inlined
def _keep_largest(kind, address, kept, entry, count):
    """Record the largest magnitude so far of each entry, from `entry` on."""
    if kind == FLOAT32:
        largest, given = _at(_address(kept, np.int32), entry), _address(address, np.int32)
        for i in range(count):
            largest[i] = max(largest[i], np.int32(given[i] & MAGNITUDE))
    else:
        largest_half, given_half = _at(_address(kept, np.uint16), entry), _address(address, np.uint16)
        for i in range(count):
            largest_half[i] = max(largest_half[i], np.uint16(given_half[i] & np.uint16(0x7FFF)))


@summing
def _kurtosis(mean, square, cube, fourth):
    """Compute `reference_states.kurtosis` from the means of x, x², x³ and x⁴."""
    variance = square - mean * mean
    central = fourth - 4 * mean * cube + 6 * mean * mean * square - 3 * mean * mean * mean * mean
    return 1.0 if variance <= 1e-14 * square else central / (variance * variance)


@summing
def _add_kurtosis(powers, strips, tokens, features, of_tensor, of_tokens):
    """Add the kurtosis of a state and those of its tokens, each for all positions and without position 0.

    powers: the sums of four powers of each token, (strips, 4, tokens).
    """
    for strip in range(1, strips):
        for i in range(4 * tokens):
            powers[i] += powers[strip * 4 * tokens + i]
    size = np.float64(features)
    rest = 0.0
    for t in range(1, tokens):
        rest += _kurtosis(
            powers[t] / size, powers[tokens + t] / size, powers[2 * tokens + t] / size, powers[3 * tokens + t] / size
        )
    of_tokens[0] += rest + _kurtosis(
        powers[0] / size, powers[tokens] / size, powers[2 * tokens] / size, powers[3 * tokens] / size
    )
    of_tokens[1] += rest
    for first in range(2):
        a = b = c = d = 0.0
        for t in range(first, tokens):
            a += powers[t]
            b += powers[tokens + t]
            c += powers[2 * tokens + t]
            d += powers[3 * tokens + t]
        count = np.float64(tokens - first) * size
        of_tensor[first] += _kurtosis(a / count, b / count, c / count, d / count)


@inlined
def _join_largest(largest, x, ids, magnitude, feature, position):
    """Replace the largest entry so far by this one, if it comes later in the order of its numbers."""
    value, token = np.float64(_entry(x, position, feature)), np.float64(ids[position])
    entry = (np.float64(magnitude), value, np.float64(feature), np.float64(position), token)
    place = 0
    while place < 4 and entry[place] == largest[place]:
        place += 1
    if entry[place] > largest[place]:
        for i in range(5):
            largest[i] = entry[i]


@_pass
def add_state(
    work,
    x: Matrix,
    width: int,
    height: int,
    alpha: np.float32,
    ids: np.int64,
    kept: Array,
    room: int,
    hits: np.int64,
    joined: Statistics,
):
    """Add one hidden state to running statistics, see `dispatch.add_state`; a piece is a block of rows of a strip.

    room: memory for the pieces' results. The pass reports 0, or one more than the first feature with NaN or inf.
    """
    strips, done = -(-x.columns // width), 0
    partial, row = _partial_at(room, x, -(-x.rows // height), strips), np.empty(width, np.float32)
    for piece in _pieces(work):
        block, strip = piece // strips, piece % strips
        count, end = min(width, x.columns - strip * width), min(block * height + height, x.rows)
        partial.rests[piece] = _add_block(
            x, block, (block * height, end), strip, strip * width, count, alpha[0], kept, partial, row
        )
        done = _counted(_at(work, DONE), 1) + 1
    if done == work[PIECES]:
        _finish_state(work, x, height, strips, ids, partial, hits, joined)


@inlined
def _partial_at(room, x, blocks, strips):
    """Lay out the pieces' results in memory, whose size `cpu.states` computes."""
    size, sums = blocks * x.columns, _address(room, np.float64)
    low = _address(room + 8 * (2 * size + strips * 4 * x.rows), np.float32)
    rests = _at(low, 2 * size)
    hits = _address(room + 8 * (3 * size + strips * 4 * x.rows) + 4 * blocks * strips, np.int32)
    return Partial(sums, _at(sums, size), _at(sums, 2 * size), low, _at(low, size), rests, hits)


@inlined
def _add_block(x, block, rows, strip, start, count, alpha, kept, partial, room):
    """Compute the results of a block of rows in a strip of features; return the largest magnitude without position
    0."""
    place, rest = block * x.columns + start, np.float32(0)
    low, high, hits = _at(partial.low, place), _at(partial.high, place), _at(partial.hits, place)
    sums, squares, powers = (
        _at(partial.sums, place),
        _at(partial.squares, place),
        _at(partial.powers, strip * 4 * x.rows),
    )
    for i in range(count):
        low[i], high[i], hits[i], sums[i], squares[i] = np.inf, -np.inf, 0, 0, 0
    height = rows[1] - rows[0]
    for step in range(1, height + 1):  # upwards, the direction of prefetching
        r = rows[0] + step % height
        if r == 0:  # row 0 comes last, so that the extremes are those of the others
            rest = _largest_of(low, high, count)
        address, entry = _place(x, r, start), r * x.columns + start
        row = _floats(x.kind, address, count, room)
        any_hit = _add_extremes(row, count, alpha, low, high, hits)
        if kept.kind == HITS and any_hit:
            _keep_hits(row, alpha, kept.memory + entry, count)
        elif kept.kind == x.kind:
            _keep_largest(x.kind, address, kept.memory, entry, count)
        a, b, c, d = _add_powers(row, count, sums, squares)
        powers[r], powers[r + x.rows], powers[r + 2 * x.rows], powers[r + 3 * x.rows] = a, b, c, d
    return _largest_of(low, high, count) if block else rest


@inlined
def _largest_of(low, high, count):
    """Return the largest magnitude among the features' extremes; 0 if there are none."""
    largest = np.int32(0)
    for i in range(count):
        largest = max(largest, bits_of(max(-low[i], high[i])))
    return float_of(largest)


@inlined
def _finish_state(work, x, height, strips, ids, partial, hits, joined):
    _join_blocks(partial, -(-x.rows // height), x.columns)
    for i in range(x.columns):
        if not partial.squares[i] < np.inf:  # no square of a float32 is infinite
            work[REPORT] = i + 1
            return
    row = np.empty(x.columns, np.float32)
    load(x.kind, _place(x, 0, 0), x.columns, row)
    _add_features(row, x.columns, partial, hits, joined)
    for piece in range(work[PIECES]):
        joined.rest_max[0] = max(joined.rest_max[0], partial.rests[piece])
    largest = _largest_of(partial.low, partial.high, x.columns)
    feature = position = 0
    while max(-partial.low[feature], partial.high[feature]) < largest:
        feature += 1
    while abs(_entry(x, position, feature)) < largest:
        position += 1
    _join_largest(joined.largest, x, ids, largest, feature, position)
    _add_kurtosis(partial.powers, strips, x.rows, x.columns, joined.kurtosis_tensor, joined.kurtosis_token)


@inlined
def _join_blocks(partial, blocks, features):
    """Add the results of all blocks of rows to those of the first."""
    low, high, hits, sums, squares = partial.low, partial.high, partial.hits, partial.sums, partial.squares
    for block in range(1, blocks):
        for i in range(features):
            j = block * features + i
            low[i], high[i], hits[i] = min(low[i], low[j]), max(high[i], high[j]), np.int32(hits[i] + hits[j])
            sums[i] += sums[j]
            squares[i] += squares[j]


@inlined
def _add_features(first_row, features, partial, hits, joined):
    for i in range(features):
        joined.min[i], joined.max[i] = min(joined.min[i], partial.low[i]), max(joined.max[i], partial.high[i])
        hits[i] = partial.hits[i]
        joined.hits[i] += np.int64(partial.hits[i])
        joined.sequences_hit[i] += np.int64(partial.hits[i] > 0)
        joined.sum[i] += partial.sums[i]
        joined.squares[i] += partial.squares[i]
        first = np.float64(first_row[i])
        joined.squares_rest[i] += partial.squares[i] - first * first


@_pass
def hits_of_state(work, x: Matrix, alpha: np.float32, hits: np.int64, room: int):
    """List the hits of a state, given their number in each feature; there is one piece. The pass reports their number.

    room: memory for the features with hits, followed by feature (int32) and value of each hit.
    """
    columns, count, place = _address(room, np.int64), 0, 0
    features, values = _address(room + 8 * x.columns, np.int32), _address(room + 8 * x.columns, np.float32)
    for i in range(x.columns):
        columns[count] = i
        count += np.int64(hits[i] > 0)
    for r in range(x.rows):
        for i in range(count):
            value = _entry(x, r, columns[i])
            if abs(value) >= alpha[0]:
                features[2 * place], values[2 * place + 1] = columns[i], value
                place += 1
    work[REPORT] = place


@inlined
def _select(values, count, rank):
    """Return the value of a rank among non-negative integers, which are reordered."""
    low, high = np.int32(MAGNITUDE), np.int32(0)
    for i in range(count):
        low, high = min(low, values[i]), max(high, values[i])
    bins = np.empty(BINS, np.int32)
    while low < high:
        shift = np.int32(0)
        while (high - low) >> shift >= BINS:
            shift += np.int32(1)
        for i in range(BINS):
            bins[i] = 0
        for i in range(count):
            bins[(values[i] - low) >> shift] += np.int32(1)
        chosen = 0
        while rank >= bins[chosen]:
            rank -= bins[chosen]
            chosen += 1
        left, first = 0, low + np.int32(chosen << shift)
        low, high = np.int32(MAGNITUDE), np.int32(0)
        for i in range(count):
            value = values[i]
            if (value - first) >> shift == 0:
                values[left] = value
                left += 1
                low, high = min(low, value), max(high, value)
        count = left
    return low


@_pass
def add_residual(
    work,
    x: Matrix,
    height: int,
    ids: np.int64,
    limits: np.float32,
    kept: Array,
    room: int,
    massive: np.int64,
    joined: Residual,
):
    """Add one state of the residual stream to running statistics, see `dispatch.add_residual`; a piece is a block of
    rows.

    limits: the two of massive activations. room: memory for the pieces' results. massive: counts at each position. The
    pass reports the number of massive activations, or -1 if there is NaN or inf.
    """
    row, bits = np.empty(x.columns, np.float32), np.empty(x.columns, np.int32)
    pieces, largest = _address(room, np.int64), _address(room + 40 * work[PIECES], np.int32)
    magnitudes = Magnitudes(pieces, largest, _at(largest, x.rows))
    bounds, done = _bounds_of_median(x), 0
    for piece in _pieces(work):
        _find_magnitudes(x, piece, height, bounds, kept, magnitudes, row, bits)
        done = _counted(_at(work, DONE), 1) + 1
    if done == work[PIECES]:
        _finish_residual(work, x, height, ids, limits, magnitudes, massive, joined)


@inlined
def _find_magnitudes(x, piece, height, bounds, kept, magnitudes, room, bits):
    """Find the largest magnitude of a piece, and those of its magnitudes that may be the median."""
    (low, high), start = bounds, piece * height
    between, of_piece = _at(magnitudes.between, start * x.columns), _at(magnitudes.pieces, 5 * piece)
    of_piece[0], of_piece[1] = -1, x.columns
    under, count, places = 0, 0, _address(np.int64(bits.ctypes.data), np.int32)
    for r in range(start, min(start + height, x.rows)):
        address = _place(x, r, 0)
        row = _floats(x.kind, address, x.columns, room)
        if kept.kind == x.kind:
            _keep_largest(x.kind, address, kept.memory, r * x.columns, x.columns)
        most, smaller = np.int32(0), np.int32(0)
        for i in range(x.columns):
            bits[i] = bits_of(row[i]) & MAGNITUDE
            most = max(most, bits[i])
            smaller = np.int32(smaller + np.int32(bits[i] < low))
        whole = x.columns - x.columns % CHOSEN
        for i in range(0, whole, CHOSEN):
            count += _select_between(_at(places, i), low, high, _at(between, count))
        for i in range(whole, x.columns):
            between[count] = bits[i]
            count += np.int64(bits[i] >= low) & np.int64(bits[i] <= high)
        under += smaller
        magnitudes.largest[r] = most
        if most >= of_piece[0]:
            feature = 0
            while bits[feature] < most:
                feature += 1
            if most > of_piece[0] or feature < of_piece[1]:
                of_piece[0], of_piece[1], of_piece[2] = most, feature, r
    of_piece[3], of_piece[4] = under, count


@inlined
def _bounds_of_median(x):
    """Return magnitudes between which the median almost surely lies, from a sample."""
    step = max(1, x.rows * x.columns // SAMPLED) | 1  # an odd step meets every feature
    count = -(-x.rows * x.columns // step)
    sample = np.empty(count, np.int32)
    for i in range(count):
        sample[i] = bits_of(_entry(x, i * step // x.columns, i * step % x.columns)) & MAGNITUDE
    low = _select(sample.copy(), count, np.int64(count * 0.46))
    return low, _select(sample, count, min(np.int64(count * 0.54), count - 1))


@inlined
def _finish_residual(work, x, height, ids, limits, magnitudes, massive, joined):
    """Join the results of all pieces with the statistics, and count massive activations."""
    best = magnitudes.pieces
    for piece in range(1, work[PIECES]):
        of_piece = _at(magnitudes.pieces, 5 * piece)
        if of_piece[0] > best[0] or (of_piece[0] == best[0] and of_piece[1] < best[1]):
            best = of_piece
    if best[0] >= INFINITE:
        work[REPORT] = -1
        return
    magnitude, middle = float_of(np.int32(best[0])), float_of(_median(work, x, height, magnitudes))
    _join_largest(joined.largest, x, ids, magnitude, best[1], best[2])
    joined.sum_of_max[0] += magnitude
    joined.sum_of_ratios[0] += np.float64(magnitude) / np.float64(middle)
    limit = limits[1] * middle
    for r in range(x.rows):
        if float_of(magnitudes.largest[r]) > limits[0] and float_of(magnitudes.largest[r]) >= limit:
            for i in range(x.columns):
                entry = abs(_entry(x, r, i))
                if entry > limits[0] and entry >= limit:
                    joined.massive[i] += 1
                    massive[r] += 1
                    work[REPORT] += 1


@inlined
def _median(work, x, height, magnitudes):
    """Return the median magnitude from those between its bounds, or, if the sample was not representative, from all."""
    size, values = x.rows * x.columns, magnitudes.between
    rank, count = (size - 1) // 2, 0
    for piece in range(work[PIECES]):
        of_piece = _at(magnitudes.pieces, 5 * piece)
        rank -= of_piece[3]
        for i in range(of_piece[4]):
            values[count] = values[piece * height * x.columns + i]
            count += 1
    if rank < 0 or rank >= count:
        room = np.empty(x.columns, np.float32)
        rank, count = (size - 1) // 2, size
        for r in range(x.rows):
            load(x.kind, _place(x, r, 0), x.columns, room)
            for i in range(x.columns):
                values[r * x.columns + i] = bits_of(room[i]) & MAGNITUDE
    return _select(values, count, rank)
