"""Sizes and times as people write them."""

import re

SIZES = (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
TIMES = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def parse_bytes(value):
    """Return a size such as "4GB" or "500 MB" (decimal) in bytes, and any other value unchanged."""
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]+)?)\s*([kMGT])B", value) if isinstance(value, str) else None
    if isinstance(value, str) and not match and not re.fullmatch("[0-9]+", value):
        raise ValueError("expected a size such as 500MB or 4GB")
    return round(float(match[1]) * 1000 ** (1 + "kMGT".index(match[2]))) if match else value


def size(count: float) -> str:
    """Return a number of bytes for people, in decimal units: 54 MB, 27.1 GB, 265 GB."""
    unit, factor = next(((unit, factor) for unit, factor in SIZES if count >= factor), SIZES[-1])
    return f"{count / factor:.{1 if factor >= 1e9 and count < 100 * factor else 0}f} {unit}"


def duration(seconds: float) -> str:
    """Return seconds for people: 8 s, 3 min, 2.5 h."""
    unit, factor = next(((unit, factor) for unit, factor in TIMES if seconds >= 1.5 * factor), TIMES[-1])
    return f"{max(seconds / factor, 1):.{1 if factor >= 3600 and seconds < 10 * factor else 0}f} {unit}"


def durations(least: float, most: float) -> str:
    """Return a range of seconds for people: "3 to 8 min", "50 s to 2 min", or one time if both ends look alike."""
    low, high = duration(least), duration(most)
    return high if low == high else f"{low.removesuffix(high[high.index(' ') :])} to {high}"
