"""Tensors of weight files, each of which is read when it is wanted; those of safetensors files."""

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

# What a checkpoint may hold: types as safetensors calls them. All are cast to the dtype of the model.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BYTES = {"U8": torch.uint8}  # of tensors in a format of few bits that transformers undoes
OTHERS = {"BOOL": torch.bool, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
READ = FLOATS | BYTES | OTHERS | {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
READ |= {"F8_E8M0": torch.float8_e8m0fnu}  # scales that are powers of two
LARGEST_HEADER = 100_000_000  # bytes, of a safetensors file, as the library has it


class WeightFile:
    """A file of weights, opened once. It is read and not mapped: who shortens a mapped file kills its readers."""

    def __init__(self, path: Path):
        self.path, self._file, self._reading = path, path.open("rb"), threading.Lock()
        self.size = os.fstat(self._file.fileno()).st_size

    def read(self, start: int, end: int) -> torch.Tensor:
        """The bytes from one to another, uint8; OSError if the file has become shorter."""
        content = torch.empty(end - start, dtype=torch.uint8)
        with self._reading:
            self._file.seek(start)
            if self._file.readinto(content.numpy()) < end - start:
                raise OSError(f"it is cut short: it ends before byte {end:,}")
        return content

    def will_need(self, start: int, end: int) -> None:
        """Let the system read these bytes into its cache while something else is computed."""
        if hasattr(os, "posix_fadvise"):  # not on macOS, which reads when asked
            os.posix_fadvise(self._file.fileno(), start, end - start, os.POSIX_FADV_WILLNEED)

    def __del__(self):
        if hasattr(self, "_file"):
            self._file.close()


class Lazy(NamedTuple):
    """A tensor that a file holds, or of which it holds the parts.

    name: in the file. dtype: as safetensors calls it, once it is read. spans: the bytes of which it is made, from where
    to where. read: returns it on the CPU, with memory of its own. note: what a row says of how it was read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    spans: list[tuple[WeightFile, int, int]]
    read: Callable[[], torch.Tensor]
    note: str = ""

    def without_values(self) -> torch.Tensor:
        """A tensor on the meta device like this one."""
        return torch.empty(self.shape, dtype=READ[self.dtype], device="meta")


def read_safetensors(path: Path, readable: Callable[[], object]) -> tuple[dict, list[Lazy]]:
    """The metadata and the tensors of a safetensors file, whose header is compared with its size.

    readable: a context in which tensors are read, which says what is wrong with the file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such file, or damaged. Its header may raise other errors that `json` and Python have.
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

        def read(start: int = start, end: int = end, dtype: str = dtype, shape: tuple = shape) -> torch.Tensor:
            with readable():
                return file.read(start, end).view(READ[dtype]).view(shape)

        tensors.append(Lazy(key, shape, dtype, [(file, start, end)], read))
    if position != file.size:
        raise ValueError(f"its tensors end at byte {position:,}, and the file at {file.size:,}")
    return metadata, tensors


def twice(name: str, first: Lazy, second: Lazy) -> UserError:
    """The error for a tensor of model `name` that its files hold twice."""
    places = " and ".join(f"'{printable(lazy.name)}' in '{lazy.spans[0][0].path.name}'" for lazy in (second, first))
    return UserError(f"the checkpoint of '{name}' holds a tensor twice: {places}; expected each once")


def printable(key: str) -> str:
    """The name of a tensor as a message shows it, whatever is in it."""
    return (key if key.isprintable() else ascii(key)[1:-1])[:200]
