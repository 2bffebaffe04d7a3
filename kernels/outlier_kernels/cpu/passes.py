"""The compiled passes, in numba, over raw memory: what they share first, then one function a pass.

A pass reads its input once. What it computes, and in which order it rounds, is `outlier_kernels.reference`'s. All
compiled code is in this one file, because numba compiles again what has changed when its file has.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from outlier_kernels.cpu.compiled import Pass

FLOAT32, BFLOAT16, FLOAT16 = range(3)  # kinds of input and output
MAGNITUDE = np.int32(0x7FFFFFFF)  # the bits of a float but for its sign: as a whole number in the order of |x|
ROUND = np.float32(12_582_912)  # 1.5 · 2^23: added to a small float, its lowest bits hold the nearest whole number
CODE_MAX = np.float32(127)
STRIP = 4096  # outputs at once
inlined = njit(error_model="numpy")


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


@intrinsic
def rint(_context, value):
    """To the nearest whole number, ties to even."""

    def code(_context, builder, _signature, arguments):
        return builder.call(builder.module.declare_intrinsic("llvm.rint", [ir.FloatType()]), arguments)

    return types.float32(types.float32), code


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
            row[i] = float_of(np.int32(np.uint32(halves[i]) << np.uint32(16)))
    else:
        halves = _address(address, np.uint16)
        for i in range(count):
            row[i] = _float_of_half(halves[i])


@inlined
def _entry(kind, address):
    if kind == FLOAT32:
        return _address(address, np.float32)[0]
    half = _address(address, np.uint16)[0]
    return float_of(np.int32(np.uint32(half) << np.uint32(16))) if kind == BFLOAT16 else _float_of_half(half)


@inlined
def store(kind, address, count, row):
    """Write float32 entries as any kind, rounded to nearest, ties to even."""
    if kind == FLOAT32:
        floats = _address(address, np.float32)
        for i in range(count):
            floats[i] = row[i]
    elif kind == BFLOAT16:
        halves = _address(address, np.uint16)
        for i in range(count):
            bits = np.uint32(bits_of(row[i]))
            rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
            is_nan = (bits & np.uint32(MAGNITUDE)) > np.uint32(0x7F800000)
            halves[i] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded)
    else:
        halves = _address(address, np.uint16)
        for i in range(count):
            halves[i] = _half_of(row[i])


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
            is_nan = least[i] < _ordered(np.int32(-8388608)) or most[i] > np.int32(0x7F800000)
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
            scale = given[0] if arguments[9] else _largest(row, features) / CODE_MAX
            scale = np.float32(1) if scale == 0 else scale
            scales[r] = scale
            sums[r] = _round_to_codes(row, scale, features, _address(arguments[11] + r * features, np.int8), offset)
        first = _taken(arguments, at_once)


@inlined
def _round_to_codes(row, scale, count, codes, offset):
    """Divide a row by its scale, write the nearest whole numbers plus an offset, and add the numbers up.

    A subnormal scale has so few digits that quotients are up to 190. NaN passes through, and becomes code 0.
    """
    total = np.int32(0)
    for i in range(count):
        value = row[i] / scale
        value = CODE_MAX if value > CODE_MAX else value
        value = -CODE_MAX if value < -CODE_MAX else value
        code = np.int32(bits_of(value + ROUND) - bits_of(ROUND))
        codes[i] = np.int8(code + offset)
        total = np.int32(total + code)
    return np.float32(total)


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


@inlined
def _zeropoint(row, count):
    """Normalized dynamic range and zero point of a row (equations 1 and 2)."""
    least, most = MAGNITUDE, np.int32(~MAGNITUDE)
    for i in range(count):
        value = _ordered(bits_of(row[i]))
        least, most = min(least, value), max(most, value)
    low = float_of(_ordered(least))
    span = float_of(_ordered(most)) - low
    dynamic_range = np.float32(1) if span == 0 else np.float32(254) / span
    return dynamic_range, -rint(dynamic_range * low) - CODE_MAX


@Pass
def finish_packed(arguments):
    """From products that have the weight's scales to outputs; a piece is a row.

    After the counters: products (float32), how many in a row; scales of rows (float32); bias (float32) or none; values
    (rows, count) and columns (count, outputs), float32, whose products are added one after the other, and their count;
    then outputs, and their kind. Each addition is one operation with its multiplication, as in torch's addcmul.
    """
    product, outputs, scales = arguments[3], arguments[4], _address(arguments[5], np.float32)
    bias, values, count, result, kind = arguments[6], arguments[7], arguments[9], arguments[10], arguments[11]
    size = 4 if kind == FLOAT32 else 2
    row = np.empty(STRIP, np.float32)
    first, at_once = _taken(arguments, arguments[2]), arguments[2]
    while first < arguments[1]:
        for start in range(0, outputs, STRIP):
            for r in range(first, min(first + at_once, arguments[1])):
                width, place = min(STRIP, outputs - start), r * outputs + start
                scaled = _address(product + 4 * place, np.float32)
                if bias:
                    added = _address(bias + 4 * start, np.float32)
                    for i in range(width):
                        row[i] = fma(scaled[i], scales[r], added[i])
                else:
                    for i in range(width):
                        row[i] = fma(scaled[i], scales[r], np.float32(0))
                added = values + 4 * r * count
                _add_columns(row, width, added, arguments[8] + 4 * start, count, 4 * outputs)
                store(kind, result + size * place, width, row)
        first = _taken(arguments, at_once)


@inlined
def _add_columns(row, width, values, columns, count, stride):
    """Add products of values and columns, each after the one before it, but two in one go over the row."""
    for k in range(0, count - 1, 2):
        one, other = _address(values, np.float32)[k], _address(values, np.float32)[k + 1]
        first = _address(columns + k * stride, np.float32)
        second = _address(columns + (k + 1) * stride, np.float32)
        for i in range(width):
            row[i] = fma(other, second[i], fma(one, first[i], row[i]))
    if count % 2:
        one, last = _address(values, np.float32)[count - 1], _address(columns + (count - 1) * stride, np.float32)
        for i in range(width):
            row[i] = fma(one, last[i], row[i])


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


@inlined
def _add(row, address, count):
    added = _address(address, np.float32)
    for i in range(count):
        row[i] += added[i]
