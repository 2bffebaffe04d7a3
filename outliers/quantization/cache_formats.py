"""Formats of cached keys and values, as data: `int4`, `int4/channels=32/recent=128`, `fp8-e4m3`."""

import re
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

from outlier_kernels.formats import BLOCK, FORMATS, Quantizer

from outliers.criterion import CACHE_PARTS
from outliers.errors import UserError, unknown_name

INTEGERS = re.compile(r"int([2-8])")  # asymmetric formats; the others are formats of matrices
_RANGE = "[0-9]{1,9}(?::[0-9]{1,9})?"
_RANGES = re.compile(rf"{_RANGE}(?:\.{_RANGE})*")  # a number, or ranges of them
NUMBERED = {"channels": 1, "recent": 0, "first": 0, "block": 1}  # options with a number, and the least one
CALIBRATED = ("smooth", "reorder")  # changes of keys that require the magnitudes of channels
FLAGS = ("hadamard", "before", *CALIBRATED)
RANGES = ("layers", "heads")  # options with ranges of numbers, joined by points
EXACT_BITS, HALF_BITS = 16, 16  # bits of an exact value in a cache; of a scale or a minimum
FORMS = "int4/channels=32/recent=128, int4/first=5/before, fp8-e4m3/hadamard, bfp4/block=32 or int3/layers=0:2/heads=1"


@dataclass(frozen=True)
class CacheFormat:
    """A quantization format of cached keys, or of values.

    format: `int2` to `int8`, asymmetric (scale = (max - min) / (2^b - 1), code = round((x - min) / scale), scale and
    minimum in float16), or another name in `FORMATS`, symmetric. By default the vector of a head at a position shares a
    scale. channels: quantize by channel, where this number of consecutive positions of a head's channel shares a scale;
    an incomplete last group stays exact (KIVI: Liu et al., 2024). recent, first: how many of the last and of the first
    positions stay exact. before: quantize keys before the rotary embedding (KVQuant: Hooper et al., 2024). hadamard:
    rotate a head's channels before quantization and back afterwards (QuaRot: Ashkboos et al., 2024). layers, heads: the
    ranges, with exclusive ends, of layers and of key heads that are quantized; None for all. block: number of
    consecutive channels that share a scale, in formats other than integers; None for all of a head, or as many as the
    format fixes. smooth: divide keys by a factor per channel and multiply queries by it (SmoothAttention of QServe: Lin
    et al., 2024, section 4.2). reorder: sort the channels of keys by their largest magnitudes (after Trukhanov and
    Soloveychik, 2024).
    """

    format: str
    channels: int | None = None
    recent: int = 0
    first: int = 0
    hadamard: bool = False
    before: bool = False
    layers: tuple[range, ...] | None = None
    heads: tuple[range, ...] | None = None
    block: int | None = None
    smooth: bool = False
    reorder: bool = False

    @classmethod
    def read(cls, written: str) -> "CacheFormat":
        """Parse a format and its options, joined by slashes.

        Raises:
            UserError: the format or an option is unknown, an option is repeated or has an invalid number, or two
                options are incompatible.
        """
        format, *options = written.split("/")
        others = [name for name in FORMATS if not name.startswith("int")]
        if not INTEGERS.fullmatch(format) and format not in others:
            raise unknown_name("format of a cache", format, ["int2 to int8", *others])
        pairs = [option.partition("=")[::2] for option in options]
        if len(dict(pairs)) < len(pairs):
            raise UserError(f"'{written}' has an option twice; expected each once, as in {FORMS}")
        parsed = cls(format, **{name: _option(written, name, value) for name, value in pairs})
        if parsed.channels and not parsed.bits:
            raise UserError(f"'{written}' has groups of positions in '{format}'; expected int2 to int8, or no channels")
        parsed._check(written)
        return parsed

    def _check(self, written: str) -> None:
        fixed = None if self.bits else FORMATS[self.format].group
        if self.block and (self.bits or fixed):
            reason = f"fixes blocks of {fixed}" if fixed else "has a scale a token, or one for each channel"
            raise UserError(f"'{written}' has blocks of channels, and {self.format} {reason}; leave block out")
        if self.reorder and not (self.block or fixed):
            raise UserError(
                f"'{written}' reorders channels that share one scale, to no effect; expected blocks, as in "
                "bfp4/block=32/reorder"
            )
        changes = [name for name in ("hadamard", *CALIBRATED) if getattr(self, name)]
        if len(changes) > 1:
            raise UserError(f"'{written}' changes channels by {' and '.join(changes)}; expected one of them")
        if self.before and self.needs_calibration:
            raise UserError(f"'{written}' is defined after the rotation of positions; leave before out")

    @property
    def needs_calibration(self) -> bool:
        """Whether the format requires the magnitudes of the channels of keys."""
        return any(getattr(self, name) for name in CALIBRATED)

    def __str__(self) -> str:
        options = {field.name: getattr(self, field.name) for field in fields(self)[1:]}
        return "/".join([self.format, *(_write(name, value) for name, value in options.items() if value)])

    @property
    def bits(self) -> int | None:
        """Bits of an asymmetric integer format; None for other formats."""
        match = INTEGERS.fullmatch(self.format)
        return int(match[1]) if match else None

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer of a head's vector at a position; undefined for asymmetric integers."""
        granularity = f"group-{self.block}" if self.block else "row"
        return Quantizer(self.format, BLOCK if FORMATS[self.format].group else granularity)

    def quantized_count(self, positions: int) -> int:
        """Return the number of quantized positions after the first ones, of `positions` in all."""
        group = self.channels or 1
        return max(0, positions - self.first - self.recent) // group * group

    def is_in_layer(self, layer: int) -> bool:
        return self.layers is None or any(layer in span for span in self.layers)

    def value_bits(self, positions: int, layers: int, heads: int, head_size: int) -> float:
        """Return the bits per value at a number of positions, averaged over layers and key heads.

        Scales and minima count 16 bits each, and values that stay exact 16 bits.
        """
        if self.bits is None:
            codes = self.quantizer.bits(head_size)
        else:
            codes = self.bits + 2 * HALF_BITS / (self.channels or head_size)
        coded = self.quantized_count(positions) / positions
        for part, whole in ((self.layers, layers), (self.heads, heads)):
            coded *= sum(map(len, part)) / whole if part else 1
        return EXACT_BITS + coded * (codes - EXACT_BITS)


class Formats(NamedTuple):
    """The formats of keys and of values; None leaves them exact."""

    keys: CacheFormat | None = None
    values: CacheFormat | None = None

    @classmethod
    def read(cls, written: str) -> "Formats":
        """Parse `kv=int4`, or `keys=int4/channels=32` and `values=int4` joined by +.

        Raises:
            UserError: keys or values are repeated, or both are missing; or as `CacheFormat.read`.
        """
        formats = {}
        for term in written.replace(" ", "").split("+"):
            name, _, format = term.partition("=")
            if name not in CACHE_PARTS:
                raise unknown_name("part of a cache", name, CACHE_PARTS, f"(as in kv={FORMS})")
            if formats.keys() & CACHE_PARTS[name]:
                raise UserError(f"'{written}' has {' and '.join(CACHE_PARTS[name])} twice; expected each once")
            formats |= dict.fromkeys(CACHE_PARTS[name], CacheFormat.read(format))
        values = formats.get("values")
        if values and values.needs_calibration:
            raise UserError(f"values in '{values}', which is for keys; expected it for these alone: keys={values}")
        return cls(**formats)

    def __str__(self) -> str:
        if self.keys == self.values:
            return f"kv={self.keys}"
        return "+".join(f"{name}={format}" for name, format in self._asdict().items() if format)

    @property
    def needs_calibration(self) -> bool:
        return self.keys is not None and self.keys.needs_calibration

    def value_bits(self, *sizes: int) -> float:
        """Return the average bits per key or value, see `CacheFormat.value_bits`."""
        return sum(format.value_bits(*sizes) if format else EXACT_BITS for format in self) / len(self)

    def in_layer(self, layer: int) -> "Formats":
        return Formats(*(format if format and format.is_in_layer(layer) else None for format in self))


def _option(written: str, name: str, value: str) -> object:
    if name not in (*NUMBERED, *FLAGS, *RANGES):
        raise unknown_name("option of a cache", name, [*NUMBERED, *FLAGS, *RANGES])
    if name in FLAGS and not value:
        return True
    if _RANGES.fullmatch(value):
        if name in NUMBERED and value.isdecimal() and str(int(value)) == value and int(value) >= NUMBERED[name]:
            return int(value)
        ranges = tuple(map(_range, value.split(".")))
        in_order = sorted(ranges, key=lambda span: span.start)
        if name in RANGES and all(ranges):
            if any(first.stop > second.start for first, second in pairwise(in_order)):
                raise UserError(f"'{written}' has '{name}={value}', whose ranges overlap; expected each number once")
            return ranges
    raise UserError(f"'{written}' has '{name}={value}'; expected one such as {FORMS}")


def _range(written: str) -> range:
    first, _, end = written.partition(":")
    return range(int(first), int(end or int(first) + 1))


def _write(name: str, value: object) -> str:
    if name in FLAGS:
        return name
    return f"{name}={'.'.join(f'{span.start}:{span.stop}' for span in value) if name in RANGES else value}"
