"""Put data and a library into a page, compressed."""

import base64
import functools
import gzip
import json
import struct

import numpy as np

LARGEST = 60_000.0  # that an array holds in 16 bits, which go to 65,504; larger values get a scale


def packed(content: dict) -> str:
    """Base64 of gzip of: the length of the JSON (uint32), the JSON, and what is in its arrays, float16.

    An array is {"shape", "scale", "offset"} in the JSON; its values are within 0.05 %. All little-endian.
    """
    parts: list[bytes] = []
    places: dict[int, dict] = {}

    def place(array: np.ndarray) -> dict:
        if id(array) not in places:  # one that stands twice is there once
            finite = np.abs(array[np.isfinite(array)])
            scale = max(1.0, float(finite.max(initial=0)) / LARGEST)
            offset = sum(map(len, parts))
            parts.append((array / scale).astype("<f2").tobytes())
            places[id(array)] = {"shape": list(array.shape), "scale": scale, "offset": offset}
        return places[id(array)]

    header = json.dumps(content, default=place).encode()
    return _compressed(struct.pack("<I", len(header)) + header + b"".join(parts))


@functools.cache
def plotly() -> str:
    """The source of Plotly, packed as the data is."""
    from plotly.offline import get_plotlyjs  # late: few pages need it

    return _compressed(get_plotlyjs().encode())


def _compressed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, mtime=0)).decode()
