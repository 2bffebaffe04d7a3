"""Tensors of weight files that are read on demand, in particular those of safetensors files."""

import json
import os
import re
import threading
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch

from outliers.errors import UserError

# Types of tensors in checkpoints, in the names of safetensors. All are cast to the dtype of the model.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BYTES = {"U8": torch.uint8}  # of quantized tensors that transformers dequantizes
OTHERS = {"BOOL": torch.bool, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
READ = FLOATS | BYTES | OTHERS | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
READ |= {"F8_E8M0": torch.float8_e8m0fnu}  # scales that are powers of two
LARGEST_HEADER = 100_000_000  # bytes, the limit of the safetensors library


class WeightFile:
    """An open weight file. It is read, not mapped: truncating a mapped file would kill its readers."""

    def __init__(self, path: Path):
        self.path, self._file, self._reading = path, path.open("rb"), threading.Lock()
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, start: int, end: int) -> torch.Tensor:
        """Return the bytes of a range, uint8; raise OSError if the file has become shorter."""
        content = torch.empty(end - start, dtype=torch.uint8)
        with self._reading:
            self._file.seek(start)
            if self._file.readinto(content.numpy()) < end - start:
                raise OSError(f"it is cut short: it ends before byte {end:,}")
        return content

    def will_need(self, start: int, end: int) -> None:
        """Let the system read these bytes into its cache in the background."""
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(self._file.fileno(), start, end - start, os.POSIX_FADV_WILLNEED)

    def __del__(self):
        if hasattr(self, "_file"):
            self._file.close()


class Lazy(NamedTuple):
    """A tensor that is stored in a file, whole or in parts, and read on demand.

    name: in the file. dtype: that of the result, in the names of safetensors. spans: the ranges of bytes it is made
    from. read: returns it on the CPU, in memory of its own. note: for rows, on how it was read. piece: returns one
    entry of the first dimension, of shape (1, …); None if only the whole tensor can be read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spans: list[tuple[WeightFile, int, int]]
    read: Callable[[], torch.Tensor]
    note: str = ""
    piece: "Callable[[int], Lazy] | None" = None

    def without_values(self) -> torch.Tensor:
        """Return a tensor of this shape and dtype on the meta device."""
        return torch.empty(self.shape, dtype=READ[self.dtype], device="meta")


def read_safetensors(path: Path, refusals: Callable[[], object]) -> tuple[dict, list[Lazy]]:
    """Return the metadata and the tensors of a safetensors file, after checking its header against its size.

    refusals: a context for reading tensors, which reports what is wrong with the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is invalid or damaged; a damaged header may also raise other errors of `json` and Python.
    """
    file = WeightFile(path)
    length = int.from_bytes(file.read(0, 8).numpy().tobytes(), "little") if file.size >= 8 else file.size
    if not 2 <= length <= min(file.size - 8, LARGEST_HEADER):
        small = "small" if file.size < 10 or length < 2 else "large"
        raise ValueError(f"its header is too {small}: {length:,} of {file.size:,} bytes")
    header = json.loads(file.read(8, 8 + length).numpy().tobytes())
    metadata, position, tensors = header.pop("__metadata__", None) or {}, 8 + length, []
    for key, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        bits = int((re.findall(r"\d+", dtype) or [8])[0])  # BOOL has none
        if start != position or end - start != -(-prod(shape) * bits // 8) or min(shape, default=0) < 0:
            raise ValueError(f"tensor '{key}' of the shape {shape} is from byte {start:,} to {end:,}")
        position = end

        tensors.append(_stored(file, key, dtype, shape, start, end, refusals))
    if position != file.size:
        raise ValueError(f"its tensors end at byte {position:,}, and the file at {file.size:,}")
    return metadata, tensors


def _stored(
    file: WeightFile, key: str, dtype: str, shape: tuple[int, ...], start: int, end: int, refusals: Callable
) -> Lazy:
    """Return a tensor whose values are a range of bytes of a file."""

    def read() -> torch.Tensor:
        with refusals():
            return file.read(start, end).view(READ[dtype]).view(shape)

    def piece(number: int) -> Lazy:
        size = (end - start) // shape[0]
        first = start + number * size
        return _stored(file, f"{key}[{number}]", dtype, (1, *shape[1:]), first, first + size, refusals)

    return Lazy(key, shape, dtype, [(file, start, end)], read, piece=piece if len(shape) > 2 else None)


def duplicate_error(name: str, first: Lazy, second: Lazy) -> UserError:
    """Return the error for a tensor that occurs twice in the files of model `name`."""
    places = " and ".join(f"'{printable(lazy.name)}' in '{lazy.spans[0][0].path.name}'" for lazy in (second, first))
    return UserError(f"the checkpoint of '{name}' holds a tensor twice: {places}; expected each once")


def printable(key: str) -> str:
    """Return the name of a tensor for a message, with any content escaped and cut."""
    return (key if key.isprintable() else ascii(key)[1:-1])[:200]
