"""The compiled passes, in numba, over raw memory: what they share first, then one function a pass.

A pass reads its input once. What it computes, and in which order it rounds, is `outlier_kernels.reference`'s. All
compiled code is in this one file, because numba compiles again what has changed when its file has.
"""

from collections.abc import Callable

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from outlier_kernels.cpu.compiled import HITS, KINDS, NOTHING, Pass
from outlier_kernels.reference_products import KEY_STEPS, MULTIPLIERS, ROUNDS

FLOAT32, BFLOAT16, FLOAT16 = (KINDS[dtype] for dtype in (torch.float32, torch.bfloat16, torch.float16))
MAGNITUDE = np.int32(0x7FFFFFFF)  # the bits of a float but for its sign: as a whole number in the order of |x|
ROUND = np.float32(12_582_912)  # 1.5 · 2^23: added to a small float, its lowest bits hold the nearest whole number
CODE_MAX = np.float32(127)
LEAST_NORMAL, LARGEST_RANGE = np.float32(2.0**-126), np.float32(2.0**126)  # one over the other
WORD, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)  # of numbers in 64 bits the lower half, and how many bits it has
MULTIPLIERS, KEY_STEPS = tuple(map(np.uint64, MULTIPLIERS)), tuple(map(np.uint64, KEY_STEPS))
STRIP = 4096  # outputs at once
FUSED = 3  # outlier columns that are added in the loop that writes the outputs
INFINITE = np.int32(0x7F800000)  # the bits of inf; those of NaN are more
BINS = 1 << 10  # of a histogram that a core's first cache holds
SAMPLED = 2048  # entries of which bounds for a median are learnt
inlined = njit(error_model="numpy")
summing = njit(error_model="numpy", fastmath={"reassoc", "contract"})  # sums in any order, as vectors have it


@intrinsic
def _address(_context, address, dtype):
    """A pointer to numbers of a dtype."""

    def code(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(types.int64, dtype), code


@intrinsic
def _taken(_context, counter, count):
    """Add to a number that all threads count up, and get what it was."""

    def code(_context, builder, _signature, arguments):
        return builder.atomic_rmw("add", *arguments, "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), code


def _reinterpreting(given: types.Type, wanted: types.Type):
    """The same bits as another type."""

    @intrinsic
    def reinterpret(_context, value):
        def code(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

        return wanted(given), code

    return reinterpret


bits_of = _reinterpreting(types.float32, types.int32)
float_of = _reinterpreting(types.int32, types.float32)


@intrinsic
def _float_of_half(_context, half):
    def code(_context, builder, _signature, arguments):
        return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), code


@intrinsic
def _half_of(_context, value):
    def code(_context, builder, _signature, arguments):
        return builder.bitcast(builder.fptrunc(arguments[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), code


@intrinsic
def fma(_context, a, b, c):
    """a · b + c, rounded once, as torch's addcmul does it."""

    def code(_context, builder, _signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), code


def _to_whole(name: str):
    """An operation of LLVM from a float to a whole one."""

    @intrinsic
    def operation(_context, value):
        def code(_context, builder, _signature, arguments):
            return builder.call(builder.module.declare_intrinsic(name, [ir.FloatType()]), arguments)

        return types.float32(types.float32), code

    return operation


rint, floor = map(_to_whole, ("llvm.rint", "llvm.floor"))  # rint: to the nearest, ties to even


@inlined
def _float_of_bfloat16(half):
    return float_of(np.int32(np.uint32(half) << np.uint32(16)))


@inlined
def load(kind, address, count, row):
    """Read entries of any kind as float32."""
    if kind == FLOAT32:
        floats = _address(address, np.float32)
        for i in range(count):
            row[i] = floats[i]
    elif kind == BFLOAT16:
        halves = _address(address, np.uint16)
        for i in range(count):
            row[i] = _float_of_bfloat16(halves[i])
    else:
        halves = _address(address, np.uint16)
        for i in range(count):
            row[i] = _float_of_half(halves[i])


@inlined
def _entry(kind, address):
    if kind == FLOAT32:
        return _address(address, np.float32)[0]
    half = _address(address, np.uint16)[0]
    return _float_of_bfloat16(half) if kind == BFLOAT16 else _float_of_half(half)


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
        floats = _address(address, np.float32)
        for i in range(count):
            _put_float32(floats, i, row[i])
    elif kind == BFLOAT16:
        halves = _address(address, np.uint16)
        for i in range(count):
            _put_bfloat16(halves, i, row[i])
    else:
        halves = _address(address, np.uint16)
        for i in range(count):
            _put_float16(halves, i, row[i])


@inlined
def _ordered(bits):
    """The bits of a float as a whole number in the order of the floats, NaN beyond the infinities; its own inverse."""
    return np.int32(bits ^ ((bits >> np.int32(31)) & MAGNITUDE))


@Pass
def feature_extremes(arguments):
    """The least and the largest entry of each feature, float32, NaN where there is one; a piece is a strip of features.

    After the counters: x, its kind, its bytes an entry, rows, bytes from row to row, features, features of a strip;
    then least and largest.
    """
    x, kind, size, rows, stride, features, width = (
        arguments[3],
        arguments[4],
        arguments[5],
        arguments[6],
        arguments[7],
        arguments[8],
        arguments[9],
    )
    low, high = _address(arguments[10], np.float32), _address(arguments[11], np.float32)
    row, least, most = np.empty(width, np.float32), np.empty(width, np.int32), np.empty(width, np.int32)
    piece = _taken(arguments, 1)
    while piece < arguments[1]:
        start = piece * width
        count = min(width, features - start)
        for i in range(count):
            least[i], most[i] = MAGNITUDE, ~MAGNITUDE
        for r in range(rows):
            load(kind, x + r * stride + start * size, count, row)
            for i in range(count):
                value = _ordered(bits_of(row[i]))
                least[i], most[i] = min(least[i], value), max(most[i], value)
        for i in range(count):
            is_nan = least[i] < _ordered(np.int32(-8388608)) or most[i] > INFINITE
            low[start + i] = np.nan if is_nan else float_of(_ordered(least[i]))
            high[start + i] = np.nan if is_nan else float_of(_ordered(most[i]))
        piece = _taken(arguments, 1)


@Pass
def columns(arguments):
    """Some columns of a matrix as float32; a piece is a row.

    After the counters: the matrix, its kind, bytes from row to row and from column to column; places of the columns
    (int64), how many; then those columns, (rows, count).
    """
    matrix, kind, row_stride, stride = arguments[3], arguments[4], arguments[5], arguments[6]
    places, count, result = _address(arguments[7], np.int64), arguments[8], arguments[9]
    first, at_once = _taken(arguments, arguments[2]), arguments[2]
    while first < arguments[1]:
        for r in range(first, min(first + at_once, arguments[1])):
            row = _address(result + 4 * r * count, np.float32)
            for i in range(count):
                row[i] = _entry(kind, matrix + r * row_stride + places[i] * stride)
        first = _taken(arguments, at_once)


@Pass
def rows_with_extremes(arguments):
    """Which rows of codes have one of at least a magnitude in some columns; a piece is a row.

    After the counters: codes (int8), bytes from row to row and from column to column, places of the columns (int64),
    how many, the magnitude; then flags (bool).
    """
    codes, row_stride, stride = arguments[3], arguments[4], arguments[5]
    places, count, flags = _address(arguments[6], np.int64), arguments[7], _address(arguments[9], np.uint8)
    first, at_once = _taken(arguments, arguments[2]), arguments[2]
    while first < arguments[1]:
        for r in range(first, min(first + at_once, arguments[1])):
            most = np.int32(0)
            for i in range(count):
                code = np.int32(_address(codes + r * row_stride + places[i] * stride, np.int8)[0])
                most = max(most, abs(code))
            flags[r] = most >= arguments[8]
        first = _taken(arguments, at_once)


@inlined
def _largest(row, count):
    """The largest |x| of a row, NaN if there is one."""
    most = np.int32(0)
    for i in range(count):
        most = max(most, np.int32(bits_of(row[i]) & MAGNITUDE))
    return float_of(most)


@inlined
def _scale(largest):
    """`reference.absmax_scale`: by one, quotients are between the outermost codes, and need not be clamped."""
    scale = largest / CODE_MAX
    scale = LEAST_NORMAL if scale < LEAST_NORMAL else scale
    return np.float32(1) if largest == 0 else scale


@inlined
def _put(row, places, count, value):
    for i in range(count):
        row[places[i]] = value


@Pass
def absmax_codes(arguments):
    """Absmax codes of rows, outlier features left out; a piece is a row.

    After the counters: x, its kind, bytes from row to row, features; places of the outlier features (int64), how many;
    a scale for all rows (float32) or none; what is added to the codes; then codes, scales, and sums of codes (float32).
    """
    x, kind, stride, features = arguments[3], arguments[4], arguments[5], arguments[6]
    outliers, outlier_count = _address(arguments[7], np.int64), arguments[8]
    given, offset = _address(arguments[9], np.float32), np.int32(arguments[10])
    scales, sums = _address(arguments[12], np.float32), _address(arguments[13], np.float32)
    row = np.empty(features, np.float32)
    first, at_once = _taken(arguments, arguments[2]), arguments[2]
    while first < arguments[1]:
        for r in range(first, min(first + at_once, arguments[1])):
            load(kind, x + r * stride, features, row)
            _put(row, outliers, outlier_count, np.float32(0))
            scale = given[0] if arguments[9] else _scale(_largest(row, features))
            scales[r] = scale
            sums[r] = _round_to_codes(row, scale, features, _address(arguments[11] + r * features, np.int8), offset)
        first = _taken(arguments, at_once)


@inlined
def _round_to_codes(row, scale, count, codes, offset):
    """Divide a row by its scale, write the nearest whole numbers plus an offset, and add the numbers up. NaN becomes
    code 0."""
    total = np.int32(0)
    for i in range(count):
        code = np.int32(bits_of(row[i] / scale + ROUND) - bits_of(ROUND))
        codes[i] = np.int8(code + offset)
        total = np.int32(total + code)
    return np.float32(total)


@inlined
def _code(quotient):
    """The nearest whole number, ties to even. NaN becomes 0."""
    return np.int8(bits_of(quotient + ROUND) - bits_of(ROUND))


@inlined
def _clamped(quotient):
    """The largest that is rounded up by chance is not between two codes. NaN passes through."""
    quotient = CODE_MAX if quotient > CODE_MAX else quotient
    return -CODE_MAX if quotient < -CODE_MAX else quotient


@inlined
def _philox(words, count, seed):
    """Four random words (4, count) in the place of counters, see `reference_products.philox`. All counters go through a
    round before the next one, so that a round is a loop of few numbers."""
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
    """The first 24 bits of a word as a number below 1."""
    return np.float32(np.int32(word >> np.uint32(8))) * np.float32(2.0**-24)


@Pass
def magnitudes(arguments):
    """The largest |x| of each feature of matrices, NaN where there is one; a piece is a strip of features.

    After the counters: x, its kind, its bytes an entry, places of the matrices (int64, bytes), rows of a matrix, bytes
    from row to row, features, features of a strip; then magnitudes (float32, (matrices, features)).
    """
    x, kind, size, places = arguments[3], arguments[4], arguments[5], _address(arguments[6], np.int64)
    rows, stride, features, width = arguments[7], arguments[8], arguments[9], arguments[10]
    strips = -(-features // width)
    row, most = np.empty(width, np.float32), np.empty(width, np.int32)
    piece = _taken(arguments, 1)
    while piece < arguments[1]:
        matrix, start = piece // strips, piece % strips * width
        count = min(width, features - start)
        for i in range(count):
            most[i] = 0
        for r in range(rows):
            load(kind, x + places[matrix] + r * stride + start * size, count, row)
            for i in range(count):
                most[i] = max(most[i], np.int32(bits_of(row[i]) & MAGNITUDE))
        found = _address(arguments[11] + 4 * (matrix * features + start), np.int32)
        for i in range(count):
            found[i] = most[i]
        piece = _taken(arguments, 1)


@Pass
def codes_by_row(arguments):
    """Absmax codes of matrices whose rows have a scale each and lie in one piece; a piece is a row of any of them.

    After the counters: x, its kind, places of the matrices (int64, bytes), rows of a matrix, bytes from row to row,
    features; flags of features that are left out (bool), how many from matrix to matrix, or none; whether they are
    rounded by chance, and the seed; then codes (matrices, rows, features) and scales (matrices, rows).
    """
    x, kind, places = arguments[3], arguments[4], _address(arguments[5], np.int64)
    rows, stride, features, flags = arguments[6], arguments[7], arguments[8], arguments[9]
    scales, by_chance, seed = _address(arguments[14], np.float32), arguments[11], arguments[12]
    fours = -(-features // 4)
    row, words = np.empty(features, np.float32), np.empty((4, fours), np.uint32)
    chances = np.empty((fours, 4), np.float32)
    first, at_once = _taken(arguments, arguments[2]), arguments[2]
    while first < arguments[1]:
        for r in range(first, min(first + at_once, arguments[1])):
            load(kind, x + places[r // rows] + r % rows * stride, features, row)
            if flags:
                left_out = _address(flags + r // rows * arguments[10], np.uint8)
                for i in range(features):
                    row[i] = np.float32(0) if left_out[i] else row[i]
            scale = _scale(_largest(row, features))
            scales[r] = scale
            codes = _address(arguments[13] + r * features, np.int8)
            if by_chance:
                for k in range(fours):
                    words[0, k], words[1, k], words[2, k], words[3, k] = k, r, 0, 0
                _philox(words, fours, seed)
                for k in range(fours):
                    for j in range(4):
                        chances[k, j] = _chance(words[j, k])
                of_row = chances.ravel()
                for i in range(features):
                    codes[i] = _code(_clamped(floor(row[i] / scale + of_row[i])))
            else:
                for i in range(features):
                    codes[i] = _code(row[i] / scale)
        first = _taken(arguments, at_once)


@Pass
def codes_by_column(arguments):
    """The same of matrices that lie transposed, (features, rows), as their codes do then; a piece is a strip of rows.

    After the counters: x, its kind, its bytes an entry, places of the matrices (int64, bytes), rows of a matrix, bytes
    from feature to feature, features, rows of a strip; flags of features that are left out (bool), how many from matrix
    to matrix, or none; whether they are rounded by chance, and the seed; then codes (matrices, features, rows) and
    scales (matrices, rows).
    """
    x, kind, size, places = arguments[3], arguments[4], arguments[5], _address(arguments[6], np.int64)
    rows, stride, features, width = arguments[7], arguments[8], arguments[9], arguments[10]
    strips = -(-rows // width)
    row, most = np.empty(width, np.float32), np.empty(width, np.int32)
    by_chance, seed = arguments[13], arguments[14]
    scale, words = np.empty(width, np.float32), np.empty((4, width), np.uint32)
    piece = _taken(arguments, 1)
    while piece < arguments[1]:
        matrix, start = piece // strips, piece % strips * width
        count = min(width, rows - start)
        left_out = _address(arguments[11] + matrix * arguments[12], np.uint8)
        address, first = x + places[matrix] + start * size, arguments[15] + matrix * features * rows + start
        for i in range(count):
            most[i] = 0
        for k in range(features):
            if arguments[11] == 0 or left_out[k] == 0:
                load(kind, address + k * stride, count, row)
                for i in range(count):
                    most[i] = max(most[i], np.int32(bits_of(row[i]) & MAGNITUDE))
        scales = _address(arguments[16] + 4 * (matrix * rows + start), np.float32)
        for i in range(count):
            scale[i] = scales[i] = _scale(float_of(most[i]))
        for k in range(features):
            codes = _address(first + k * rows, np.int8)
            if by_chance and k % 4 == 0:
                for i in range(count):
                    words[0, i], words[1, i], words[2, i], words[3, i] = k // 4, matrix * rows + start + i, 0, 0
                _philox(words, count, seed)
            if arguments[11] and left_out[k]:
                for i in range(count):
                    codes[i] = 0
            else:
                load(kind, address + k * stride, count, row)
                if by_chance:
                    for i in range(count):
                        codes[i] = _code(_clamped(floor(row[i] / scale[i] + _chance(words[k % 4, i]))))
                else:
                    for i in range(count):
                        codes[i] = _code(row[i] / scale[i])
        piece = _taken(arguments, 1)


@Pass
def bitsandbytes_codes(arguments):
    """Absmax codes of rows as bitsandbytes makes them, see `reference.quantize_bitsandbytes`; a piece is a row.

    After the counters: as `absmax_codes`, but for the threshold (float32) in the place of a scale, which counts where
    there are outlier features.
    """
    x, kind, stride, features = arguments[3], arguments[4], arguments[5], arguments[6]
    outliers, outlier_count = _address(arguments[7], np.int64), arguments[8]
    threshold, offset = _address(arguments[9], np.float32), np.int32(arguments[10])
    scales, sums = _address(arguments[12], np.float32), _address(arguments[13], np.float32)
    row = np.empty(features, np.float32)
    first, at_once = _taken(arguments, arguments[2]), arguments[2]
    while first < arguments[1]:
        for r in range(first, min(first + at_once, arguments[1])):
            load(kind, x + r * stride, features, row)
            for i in range(features):
                row[i] = _float_of_half(_half_of(row[i]))
            if outlier_count:
                for i in range(features):
                    row[i] = np.float32(0) if abs(row[i]) >= threshold[0] else row[i]
            largest = _largest(row, features)
            largest = CODE_MAX if largest == 0 else largest
            _put(row, outliers, outlier_count, np.float32(0))
            factor = np.float32(1) / largest * CODE_MAX
            for i in range(features):
                row[i] *= factor
            scales[r] = largest / CODE_MAX
            codes = _address(arguments[11] + r * features, np.int8)
            sums[r] = _round_to_codes(row, np.float32(1), features, codes, offset)
        first = _taken(arguments, at_once)


@Pass
def zeropoint_codes(arguments):
    """Zeropoint codes of rows, outlier features left out, whose codes are 0; a piece is a row.

    After the counters: x, its kind, bytes from row to row, features; places of the outlier features (int64), how many,
    the first other feature; a normalized dynamic range and a zero point for all rows (float32) or none; then codes,
    scales, zero points, and sums of codes (float32).
    """
    x, kind, stride, features = arguments[3], arguments[4], arguments[5], arguments[6]
    outliers, outlier_count, inlier = _address(arguments[7], np.int64), arguments[8], arguments[9]
    given = _address(arguments[10], np.float32)
    scales, zero_points = _address(arguments[12], np.float32), _address(arguments[13], np.float32)
    sums = _address(arguments[14], np.float32)
    row = np.empty(features, np.float32)
    first, at_once = _taken(arguments, arguments[2]), arguments[2]
    while first < arguments[1]:
        for r in range(first, min(first + at_once, arguments[1])):
            load(kind, x + r * stride, features, row)
            _put(row, outliers, outlier_count, row[inlier])
            if arguments[10]:
                dynamic_range, zero_point = given[0], given[1]
            else:
                dynamic_range, zero_point = _zeropoint(row, features)
            codes = _address(arguments[11] + r * features, np.int8)
            total = np.int32(0)
            for i in range(features):
                value = rint(row[i] * dynamic_range) + zero_point
                code = np.int8(min(max(value, -CODE_MAX), CODE_MAX))
                codes[i] = code
                total = np.int32(total + code)
            for i in range(outlier_count):
                total -= np.int32(codes[outliers[i]])
                codes[outliers[i]] = 0
            scales[r], zero_points[r], sums[r] = np.float32(1) / dynamic_range, zero_point, np.float32(total)
        first = _taken(arguments, at_once)


@Pass
def codes_of_columns(arguments):
    """Codes of a matrix of which each column has a scale; a piece is a strip of columns.

    After the counters: x, its kind, its bytes an entry, rows, bytes from row to row, columns, columns of a strip;
    scales of absmax, or normalized dynamic ranges and zero points (float32); then codes and their sums by column
    (float32).
    """
    x, kind, size, rows, stride, columns, width = (
        arguments[3],
        arguments[4],
        arguments[5],
        arguments[6],
        arguments[7],
        arguments[8],
        arguments[9],
    )
    factors, zero_points = _address(arguments[10], np.float32), _address(arguments[11], np.float32)
    sums = _address(arguments[13], np.float32)
    row, total = np.empty(width, np.float32), np.empty(width, np.int32)
    piece = _taken(arguments, 1)
    while piece < arguments[1]:
        start = piece * width
        count = min(width, columns - start)
        total[:] = 0
        for r in range(rows):
            load(kind, x + r * stride + start * size, count, row)
            if arguments[11]:
                for i in range(count):
                    row[i] = rint(row[i] * factors[start + i]) + zero_points[start + i]
            else:
                for i in range(count):
                    row[i] = rint(row[i] / factors[start + i])
            codes = _address(arguments[12] + r * columns + start, np.int8)
            for i in range(count):
                code = np.int8(min(max(row[i], -CODE_MAX), CODE_MAX))
                codes[i] = code
                total[i] = np.int32(total[i] + code)
        for i in range(count):
            sums[start + i] = np.float32(total[i])
        piece = _taken(arguments, 1)


@inlined
def _zeropoint(row, count):
    """Normalized dynamic range and zero point of a row (equations 1 and 2)."""
    least, most = MAGNITUDE, np.int32(~MAGNITUDE)
    for i in range(count):
        value = _ordered(bits_of(row[i]))
        least, most = min(least, value), max(most, value)
    low, high, half = float_of(_ordered(least)), float_of(_ordered(most)), np.float32(0.5)
    dynamic_range = CODE_MAX / (high * half - low * half)  # whose range may be beyond the largest float
    dynamic_range = LARGEST_RANGE if dynamic_range > LARGEST_RANGE else dynamic_range
    dynamic_range = np.float32(1) if high - low == 0 else dynamic_range
    return dynamic_range, -rint(dynamic_range * low) - CODE_MAX


def _finishing(put: Callable) -> Callable:
    """How rows are finished and written by `put`."""

    @inlined
    def finish(result, scaled, scale, bias, values, columns, count, stride, width):
        """Scale a row, add the bias and up to `FUSED` products of values and columns, and write it, all in one go."""
        one, two = _address(columns, np.float32), _address(columns + 4 * stride, np.float32)
        three = _address(columns + 8 * stride, np.float32)
        if count == 0:
            for i in range(width):
                put(result, i, fma(scaled[i], scale, bias[i]))
        elif count == 1:
            a = values[0]
            for i in range(width):
                put(result, i, fma(a, one[i], fma(scaled[i], scale, bias[i])))
        elif count == 2:
            a, b = values[0], values[1]
            for i in range(width):
                put(result, i, fma(b, two[i], fma(a, one[i], fma(scaled[i], scale, bias[i]))))
        else:
            a, b, c = values[0], values[1], values[2]
            for i in range(width):
                put(result, i, fma(c, three[i], fma(b, two[i], fma(a, one[i], fma(scaled[i], scale, bias[i])))))

    return finish


_finish_float32, _finish_bfloat16, _finish_float16 = map(_finishing, (_put_float32, _put_bfloat16, _put_float16))


@Pass
def finish_packed(arguments):
    """From products that have the weight's scales to outputs; a piece is a row.

    After the counters: products (float32), how many in a row; scales of rows and bias (float32); values (rows, count)
    and columns (count, outputs), float32, whose products are added one after the other, and their count; then outputs,
    and their kind. Each addition is one operation with its multiplication, as in torch's addcmul.
    """
    product, outputs, scales, bias = arguments[3], arguments[4], _address(arguments[5], np.float32), arguments[6]
    values, count, result, kind = arguments[7], arguments[9], arguments[10], arguments[11]
    size = 4 if kind == FLOAT32 else 2
    row = np.empty(STRIP, np.float32)
    first, at_once = _taken(arguments, arguments[2]), arguments[2]
    while first < arguments[1]:
        for start in range(0, outputs, STRIP):
            for r in range(first, min(first + at_once, arguments[1])):
                width, place = min(STRIP, outputs - start), r * outputs + start
                scaled, added = _address(product + 4 * place, np.float32), _address(bias + 4 * start, np.float32)
                columns, written = arguments[8] + 4 * start, result + size * place
                left = count - FUSED
                given = scaled, scales[r], added, _address(values + 4 * r * count, np.float32), columns
                if left > 0 or product == result:  # which a fused loop would read and write in an order of its own
                    _finish_float32(row, *given, min(count, FUSED), outputs, width)
                    further = values + 4 * (r * count + FUSED), columns + 4 * FUSED * outputs
                    _add_columns(row, width, *further, left, 4 * outputs)
                    store(kind, written, width, row)
                elif kind == FLOAT32:
                    _finish_float32(_address(written, np.float32), *given, count, outputs, width)
                elif kind == BFLOAT16:
                    _finish_bfloat16(_address(written, np.uint16), *given, count, outputs, width)
                else:
                    _finish_float16(_address(written, np.uint16), *given, count, outputs, width)
        first = _taken(arguments, at_once)


@inlined
def _add_columns(row, width, values, columns, count, stride):
    """Add products of values and columns, each after the one before it."""
    for k in range(count):
        value, column = _address(values, np.float32)[k], _address(columns + k * stride, np.float32)
        for i in range(width):
            row[i] = fma(value, column[i], row[i])


@Pass
def finish_sums(arguments):
    """From sums of products of codes to outputs, as `reference.matmul` has it; a piece is a row.

    After the counters: sums (int32), how many in a row; scales of rows and of columns (float32); zero points and sums
    of codes of the rows, and what they are multiplied with in each column (int32), or none; what is added to the
    product, (rows, outputs) float32, or none; bias (float32) or none; then outputs, and their kind.
    """
    outputs, row_scales = arguments[4], _address(arguments[5], np.float32)
    row_zeros, row_sums = _address(arguments[7], np.int32), _address(arguments[8], np.int32)
    result, kind = arguments[13], arguments[14]
    size = 4 if kind == FLOAT32 else 2
    row = np.empty(STRIP, np.float32)
    first, at_once = _taken(arguments, arguments[2]), arguments[2]
    while first < arguments[1]:
        for start in range(0, outputs, STRIP):
            for r in range(first, min(first + at_once, arguments[1])):
                width, place = min(STRIP, outputs - start), r * outputs + start
                sums = _address(arguments[3] + 4 * place, np.int32)
                scales = _address(arguments[6] + 4 * start, np.float32)
                if arguments[7]:
                    of_zeros = _address(arguments[9] + 4 * start, np.int32)
                    of_sums = _address(arguments[10] + 4 * start, np.int32)
                    for i in range(width):
                        whole = np.int32(sums[i] + row_zeros[r] * of_zeros[i] - row_sums[r] * of_sums[i])
                        row[i] = np.float32(whole) * row_scales[r] * scales[i]
                else:
                    for i in range(width):
                        row[i] = np.float32(sums[i]) * row_scales[r] * scales[i]
                if arguments[11]:
                    _add(row, arguments[11] + 4 * place, width)
                if arguments[12]:
                    _add(row, arguments[12] + 4 * start, width)
                store(kind, result + size * place, width, row)
        first = _taken(arguments, at_once)


@Pass
def finish_products(arguments):
    """From sums of products of codes of matrices to outputs; a piece is a row of any of them.

    After the counters: sums (int32), how many in a row; rows of a matrix; scales of rows, and of the columns of each
    matrix (float32); values (rows, count) and columns (matrices, count, outputs), float32, whose products are added up
    one after the other, and their count; then outputs, and their kind.
    """
    outputs, rows, row_scales = arguments[4], arguments[5], _address(arguments[6], np.float32)
    count, result, kind = arguments[10], arguments[11], arguments[12]
    size = 4 if kind == FLOAT32 else 2
    width = min(STRIP, outputs)
    row, added = np.empty(width, np.float32), np.empty(width, np.float32)
    first, at_once = _taken(arguments, arguments[2]), arguments[2]
    while first < arguments[1]:
        for r in range(first, min(first + at_once, arguments[1])):
            matrix, scale = r // rows, row_scales[r]
            for start in range(0, outputs, width):
                some, place = min(width, outputs - start), r * outputs + start
                sums = _address(arguments[3] + 4 * place, np.int32)
                scales = _address(arguments[7] + 4 * (matrix * outputs + start), np.float32)
                if count:
                    values, columns = (
                        arguments[8] + 4 * r * count,
                        arguments[9] + 4 * (matrix * count * outputs + start),
                    )
                    value, column = _address(values, np.float32)[0], _address(columns, np.float32)
                    for i in range(some):
                        added[i] = value * column[i]
                    _add_columns(added, some, values + 4, columns + 4 * outputs, count - 1, 4 * outputs)
                    for i in range(some):
                        row[i] = np.float32(sums[i]) * scale * scales[i] + added[i]
                else:
                    for i in range(some):
                        row[i] = np.float32(sums[i]) * scale * scales[i]
                store(kind, result + size * place, some, row)
        first = _taken(arguments, at_once)


@inlined
def _add(row, address, count):
    added = _address(address, np.float32)
    for i in range(count):
        row[i] += added[i]


@intrinsic
def _finished(_context, arguments, count):
    """Add to the number of pieces that are done, the first argument after the counters, and get what it is then. The
    thread that gets the number of all pieces sees what the others wrote."""

    def code(context, builder, _signature, given):
        counter = builder.gep(given[0], [context.get_constant(types.intp, 3)])
        return builder.add(builder.atomic_rmw("add", counter, given[1], "acq_rel"), given[1])

    return types.int64(types.CPointer(types.int64), types.int64), code


@inlined
def _as_floats(kind, address, count, room):
    """The address of entries as float32: where they are, or where they are copied to."""
    if kind == FLOAT32:
        return address
    load(kind, address, count, room)
    return np.int64(room.ctypes.data)


@summing
def _add_powers(row, count, sums, squares):
    """Add entries and their squares to those of their features; the sums of the entries' first four powers."""
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
    """Widen the extremes of each feature, and count entries of at least alpha; whether there are any. NaN is passed
    over."""
    of_row = np.int32(0)
    for i in range(count):
        value = row[i]
        low[i], high[i] = min(low[i], value), max(high[i], value)
        hit = np.int32(abs(value) >= alpha)
        hits[i] += hit
        of_row = np.int32(of_row + hit)
    return of_row > 0


@inlined
def _keep(kind, address, count, row, alpha, any_hit, kept_kind, kept):
    """Keep of each entry the largest magnitude so far, or whether one was a hit."""
    if kept_kind == HITS:
        if any_hit:
            hit = _address(kept, np.uint8)
            for i in range(count):
                hit[i] |= np.uint8(abs(row[i]) >= alpha)
    elif kept_kind == FLOAT32:
        largest, given = _address(kept, np.int32), _address(address, np.int32)
        for i in range(count):
            largest[i] = max(largest[i], np.int32(given[i] & MAGNITUDE))
    elif kept_kind != NOTHING:
        largest_half, given_half = _address(kept, np.uint16), _address(address, np.uint16)
        for i in range(count):
            largest_half[i] = max(largest_half[i], np.uint16(given_half[i] & np.uint16(0x7FFF)))


@summing
def _kurtosis(mean, square, cube, fourth):
    """Of the means of x, x², x³ and x⁴, see `reference_states.kurtosis`."""
    variance = square - mean * mean
    central = fourth - 4 * mean * cube + 6 * mean * mean * square - 3 * mean * mean * mean * mean
    return 1.0 if variance <= 1e-14 * square else central / (variance * variance)


@summing
def _add_kurtosis(powers, strips, tokens, features, of_tensor, of_tokens):
    """Add the kurtosis of a state, and those of its tokens, of all positions and without position 0.

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
def _join_largest(largest, magnitude, value, feature, position, token):
    """Put an entry in the place of the largest one so far, unless that comes later in the order of these numbers."""
    entry = (np.float64(magnitude), np.float64(value), np.float64(feature), np.float64(position), np.float64(token))
    place = 0
    while place < 4 and entry[place] == largest[place]:
        place += 1
    if entry[place] > largest[place]:
        for i in range(5):
            largest[i] = entry[i]


@Pass
def add_state(arguments):
    """Add one hidden state to running statistics, see `states.add`; a piece is some rows of a strip of features.

    After the counters: pieces that are done, 0; x, its kind, its bytes an entry, tokens, bytes from row to row,
    features, features of a strip, rows of a piece; alpha (float32); token ids; what is kept, and its kind. Room: by
    block of rows and feature extremes (float32, 2), hits (int32), sums (float64, 2); by strip and token four powers
    (float64); by piece a magnitude (float32). Then the statistics in the order of `states.STATISTICS`; hits of each
    feature (int64); and the first feature with NaN or inf, or -1 (int64).
    """
    x, kind, size, tokens, stride = arguments[4], arguments[5], arguments[6], arguments[7], arguments[8]
    features, width, height = arguments[9], arguments[10], arguments[11]
    alpha, kept_kind = _address(arguments[12], np.float32)[0], arguments[15]
    strips, blocks = -(-features // width), -(-tokens // height)
    powers, rest = _address(arguments[19], np.float64), _address(arguments[20], np.float32)
    room = np.empty(width, np.float32)
    done = 0
    piece = _taken(arguments, 1)
    while piece < arguments[1]:
        block, strip = piece // strips, piece % strips
        start = strip * width
        count, place, other = min(width, features - start), block * features + start, blocks * features
        low = _address(arguments[16] + 4 * place, np.float32)
        high = _address(arguments[16] + 4 * (place + other), np.float32)
        hits = _address(arguments[17] + 4 * place, np.int32)
        sums = _address(arguments[18] + 8 * place, np.float64)
        squares = _address(arguments[18] + 8 * (place + other), np.float64)
        for i in range(count):
            low[i], high[i], hits[i], sums[i], squares[i] = np.inf, -np.inf, 0, 0, 0
        rest[piece] = 0
        for r in range(min(block * height + height, tokens) - 1, block * height - 1, -1):
            if r == 0:  # the last one, so that the extremes are those of the rest
                rest[piece] = _largest_of(low, high, count)
            address = x + r * stride + start * size
            row = _address(_as_floats(kind, address, count, room), np.float32)
            any_hit = _add_extremes(row, count, alpha, low, high, hits)
            kept = arguments[14] + (r * features + start) * (1 if kept_kind == HITS else size)
            _keep(kind, address, count, row, alpha, any_hit, kept_kind, kept)
            a, b, c, d = _add_powers(row, count, sums, squares)
            place = strip * 4 * tokens + r
            powers[place], powers[place + tokens] = a, b
            powers[place + 2 * tokens], powers[place + 3 * tokens] = c, d
        if block:
            rest[piece] = _largest_of(low, high, count)
        done = _finished(arguments, 1)
        piece = _taken(arguments, 1)
    if done == arguments[1]:
        _finish_state(arguments)


@inlined
def _largest_of(low, high, count):
    """The largest magnitude between extremes of features; 0 if there are none."""
    largest = np.int32(0)
    for i in range(count):
        largest = max(largest, bits_of(max(-low[i], high[i])))
    return float_of(largest)


@inlined
def _finish_state(arguments):
    """Add what all pieces found to the statistics."""
    x, kind, size, tokens, stride = arguments[4], arguments[5], arguments[6], arguments[7], arguments[8]
    features, width, height = arguments[9], arguments[10], arguments[11]
    ids, strips, blocks = _address(arguments[13], np.int64), -(-features // width), -(-tokens // height)
    other = blocks * features
    low, high = _address(arguments[16], np.float32), _address(arguments[16] + 4 * other, np.float32)
    hits = _address(arguments[17], np.int32)
    sums, squares = _address(arguments[18], np.float64), _address(arguments[18] + 8 * other, np.float64)
    rests, found = _address(arguments[20], np.float32), _address(arguments[33], np.int64)
    for block in range(1, blocks):
        for i in range(features):
            j = block * features + i
            low[i], high[i], hits[i] = min(low[i], low[j]), max(high[i], high[j]), np.int32(hits[i] + hits[j])
            sums[i] += sums[j]
            squares[i] += squares[j]
    found[0] = -1
    for i in range(features - 1, -1, -1):
        if not squares[i] < np.inf:  # float32 has no squares as large
            found[0] = i
    if found[0] >= 0:
        return
    least, most = _address(arguments[21], np.float32), _address(arguments[22], np.float32)
    rest_max = _address(arguments[24], np.float32)
    all_hits, sequences_hit = _address(arguments[25], np.int64), _address(arguments[26], np.int64)
    all_sums, all_squares = _address(arguments[27], np.float64), _address(arguments[28], np.float64)
    squares_rest = _address(arguments[29], np.float64)
    hits_here = _address(arguments[32], np.int64)
    row = np.empty(features, np.float32)
    load(kind, x, features, row)
    for i in range(features):
        least[i], most[i] = min(least[i], low[i]), max(most[i], high[i])
        hits_here[i] = hits[i]
        all_hits[i] += np.int64(hits[i])
        sequences_hit[i] += np.int64(hits[i] > 0)
        all_sums[i] += sums[i]
        all_squares[i] += squares[i]
        first = np.float64(row[i])
        squares_rest[i] += squares[i] - first * first
    for piece in range(arguments[1]):
        rest_max[0] = max(rest_max[0], rests[piece])
    largest = _largest_of(low, high, features)
    feature = 0
    while max(-low[feature], high[feature]) < largest:
        feature += 1
    position = 0
    while abs(_entry(kind, x + position * stride + feature * size)) < largest:
        position += 1
    value = _entry(kind, x + position * stride + feature * size)
    _join_largest(_address(arguments[23], np.float64), largest, value, feature, position, ids[position])
    powers = _address(arguments[19], np.float64)
    _add_kurtosis(
        powers, strips, tokens, features, _address(arguments[30], np.float64), _address(arguments[31], np.float64)
    )


@Pass
def hits(arguments):
    """The features and values of hits, feature by feature; a piece is a feature.

    After the counters: x, its kind, its bytes an entry, tokens, bytes from row to row; alpha (float32); hits of each
    feature, and of those up to it (int64); then features (int64) and values (float32).
    """
    x, kind, size, stride = arguments[3], arguments[4], arguments[5], arguments[7]
    alpha = _address(arguments[8], np.float32)[0]
    counts, ends = _address(arguments[9], np.int64), _address(arguments[10], np.int64)
    features, values = _address(arguments[11], np.int64), _address(arguments[12], np.float32)
    first, at_once = _taken(arguments, arguments[2]), arguments[2]
    while first < arguments[1]:
        for feature in range(first, min(first + at_once, arguments[1])):
            place, end, r = ends[feature] - counts[feature], ends[feature], 0
            while place < end:
                value = _entry(kind, x + r * stride + feature * size)
                if abs(value) >= alpha:
                    features[place], values[place] = feature, value
                    place += 1
                r += 1
        first = _taken(arguments, at_once)


@inlined
def _select(values, count, rank):
    """The value of a rank among whole numbers from 0 up; they are put in another order."""
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


@Pass
def add_residual(arguments):
    """Add one state of the residual stream to running statistics, see `states.add_residual`; a piece is some rows.

    After the counters: pieces that are done, 0; x, its kind, its bytes an entry, tokens, bytes from row to row,
    features, rows of a piece; token ids; the two limits of massive activations (float32). Room: the largest magnitude
    of each token (int32); magnitudes (int32, tokens, features); by piece the largest magnitude, its feature and its
    position, how many are below the median's bounds, and how many between them (int64, 5). Then the statistics in the
    order of `states.RESIDUAL`; massive activations by position (int64); whether there is NaN or inf, and how many
    massive activations (int64); and what is kept, and its kind.
    """
    x, kind, size, tokens, stride = arguments[4], arguments[5], arguments[6], arguments[7], arguments[8]
    features, height, largest = arguments[9], arguments[10], _address(arguments[13], np.int32)
    room, bits = np.empty(features, np.float32), np.empty(features, np.int32)
    low, high = _bounds_of_median(x, kind, size, tokens, stride, features)
    done = 0
    piece = _taken(arguments, 1)
    while piece < arguments[1]:
        start = piece * height
        between, of_piece = _address(arguments[14] + 4 * start * features, np.int32), _of_piece(arguments, piece)
        of_piece[0], of_piece[1] = -1, features
        under, count = 0, 0
        for r in range(start, min(start + height, tokens)):
            row = _address(_as_floats(kind, x + r * stride, features, room), np.float32)
            kept = arguments[22] + r * features * size
            _keep(kind, x + r * stride, features, row, np.float32(0), False, arguments[23], kept)
            most, smaller = np.int32(0), np.int32(0)
            for i in range(features):
                bits[i] = bits_of(row[i]) & MAGNITUDE
                most = max(most, bits[i])
                smaller = np.int32(smaller + np.int32(bits[i] < low))
            for i in range(features):
                between[count] = bits[i]
                count += np.int64(bits[i] >= low) & np.int64(bits[i] <= high)
            under += smaller
            largest[r] = most
            if most >= of_piece[0]:
                feature = 0
                while bits[feature] < most:
                    feature += 1
                if most > of_piece[0] or feature < of_piece[1]:
                    of_piece[0], of_piece[1], of_piece[2] = most, feature, r
        of_piece[3], of_piece[4] = under, count
        done = _finished(arguments, 1)
        piece = _taken(arguments, 1)
    if done == arguments[1]:
        _finish_residual(arguments)


@inlined
def _of_piece(arguments, piece):
    return _address(arguments[15] + 8 * 5 * piece, np.int64)


@inlined
def _bounds_of_median(x, kind, size, tokens, stride, features):
    """Magnitudes between which the median almost surely lies, as a sample has it."""
    step = max(1, tokens * features // SAMPLED) | 1  # an odd one meets every feature
    count = -(-tokens * features // step)
    sample = np.empty(count, np.int32)
    row, feature = x, 0
    for i in range(count):
        sample[i] = bits_of(_entry(kind, row + feature * size)) & MAGNITUDE
        feature += step
        while feature >= features:
            feature -= features
            row += stride
    low = _select(sample.copy(), count, np.int64(count * 0.46))
    return low, _select(sample, count, min(np.int64(count * 0.54), count - 1))


@inlined
def _finish_residual(arguments):
    """Add what all pieces found to the statistics."""
    x, kind, size, tokens, stride = arguments[4], arguments[5], arguments[6], arguments[7], arguments[8]
    features, largest, found = arguments[9], _address(arguments[13], np.int32), _address(arguments[21], np.int64)
    ids, limits = _address(arguments[11], np.int64), _address(arguments[12], np.float32)
    best = _of_piece(arguments, 0)
    for piece in range(1, arguments[1]):
        of_piece = _of_piece(arguments, piece)
        if of_piece[0] > best[0] or (of_piece[0] == best[0] and of_piece[1] < best[1]):
            best = of_piece
    feature, position = best[1], best[2]
    found[0], found[1] = best[0] >= INFINITE, 0
    if found[0]:
        return
    magnitude, middle = float_of(np.int32(best[0])), float_of(_median(arguments))
    value = _entry(kind, x + position * stride + feature * size)
    _join_largest(_address(arguments[16], np.float64), magnitude, value, feature, position, ids[position])
    _address(arguments[17], np.float64)[0] += magnitude
    _address(arguments[18], np.float64)[0] += np.float64(magnitude) / np.float64(middle)
    massive, at_position = _address(arguments[19], np.int64), _address(arguments[20], np.int64)
    limit = limits[1] * middle
    for r in range(tokens):
        if float_of(largest[r]) > limits[0] and float_of(largest[r]) >= limit:
            for i in range(features):
                entry = abs(_entry(kind, x + r * stride + i * size))
                if entry > limits[0] and entry >= limit:
                    massive[i] += 1
                    at_position[r] += 1
                    found[1] += 1


@inlined
def _median(arguments):
    """The median magnitude: among those between its bounds, or if it is not there, as of a state that the sample is no
    picture of, among all."""
    x, kind, tokens, stride = arguments[4], arguments[5], arguments[7], arguments[8]
    features, height, values = arguments[9], arguments[10], _address(arguments[14], np.int32)
    rank, count = (tokens * features - 1) // 2, 0
    for piece in range(arguments[1]):
        of_piece = _of_piece(arguments, piece)
        rank -= of_piece[3]
        for i in range(of_piece[4]):
            values[count] = values[piece * height * features + i]
            count += 1
    if rank < 0 or rank >= count:
        room = np.empty(features, np.float32)
        rank, count = (tokens * features - 1) // 2, tokens * features
        for r in range(tokens):
            load(kind, x + r * stride, features, room)
            for i in range(features):
                values[r * features + i] = bits_of(room[i]) & MAGNITUDE
    return _select(values, count, rank)
