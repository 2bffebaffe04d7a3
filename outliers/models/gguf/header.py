"""GGUF headers, checked before anything is built from them, and the tensors of the file."""

import functools
import re
import struct
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

import gguf
import numpy as np
import torch

from outliers.errors import UserError, reason_of, shown
from outliers.models.internals import _read_metadata, _read_tensor_table
from outliers.models.stored.tensors import WeightFile
from outliers.models.weight_files import state_of

# Bytes of a file that are parsed at most, whatever its header claims; 262,144 tokens take 15 MB.
LONGEST = 24 << 20
MOST_ENTRIES = 1 << 16  # fields, or tensors
SIZES = ("context_length", "embedding_length", "feed_forward_length", "attention.head_count", "attention.head_count_kv")
BLOCKS_AT_ONCE = 1 << 14  # blocks dequantized together, which fit the processor's cache
PLACE = (b"no", b"count")  # fields of a file that is a part: its number, from 0, and the number of parts
PLAIN = {"F32", "F16", "BF16"}  # types that are not quantized
Made = TypeVar("Made")


class Tensor(NamedTuple):
    """A tensor of a file: its name, type, shape in torch's order, and the range of its bytes."""

    name: str
    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    end: int

    def piece(self, number: int) -> "Tensor":
        """Return an entry of the first dimension, as a tensor of one."""
        size = (self.end - self.start) // self.shape[0]
        start = self.start + number * size
        return self._replace(shape=(1, *self.shape[1:]), start=start, end=start + size)


class GGUFHeader(NamedTuple):
    """The metadata of a file.

    fields: without lists of strings, which are replaced by their lengths.
    """

    file: WeightFile
    fields: dict
    tensors: tuple[Tensor, ...]

    @property
    def architecture(self) -> str:
        return self.fields["general.architecture"]

    def of_model(self, field: str, default=None):
        """Return a field of the architecture, such as "context_length"."""
        return self.fields.get(f"{self.architecture}.{field}", default)

    def read(self, tensor: Tensor) -> np.ndarray:
        """Read and dequantize a tensor, float32."""
        codes, numbers = self.file.read(tensor.start, tensor.end).numpy(), torch.empty(tensor.shape).numpy()
        block, size = gguf.GGML_QUANT_SIZES[tensor.type]
        for first in range(0, len(codes) // size, BLOCKS_AT_ONCE):
            some = codes[first * size : (first + BLOCKS_AT_ONCE) * size]
            numbers.reshape(-1)[first * block :][: len(some) // size * block] = gguf.dequantize(some, tensor.type)
        return numbers

    @property
    def type(self) -> str | None:
        """The type of most quantized weights, such as "Q4_1", as declared by the file or else by its tensors; None if
        unquantized."""
        bytes_of = Counter()
        for tensor in self.tensors:
            bytes_of[tensor.type.name] += tensor.end - tensor.start
        quantized = [name for name, _ in bytes_of.most_common() if name not in PLAIN]
        file_type = self.fields.get("general.file_type")
        if quantized and file_type in list(gguf.LlamaFileType):
            prefix, _, name = gguf.LlamaFileType(file_type).name.partition("MOSTLY_")
            if not prefix and name not in PLAIN:
                return name
        return quantized[0] if quantized else None


@contextmanager
def gguf_refusals(file: Path) -> Iterator[None]:
    """Convert the errors of the readers for an invalid file to one line."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read '{file}' ({error.strerror or error})") from None
    except Exception as error:  # the readers check little: what damage raises depends on its place
        raise UserError(
            f"cannot read '{file}' ({reason_of(error, 150)}); expected a whole GGUF file of types that the package "
            "gguf dequantizes"
        ) from None


def remembered(read: Callable[[Path], Made]) -> Callable[[Path], Made]:
    """Cache the result of a function of a file until the file changes, with the errors of `gguf_refusals`."""
    cached = functools.lru_cache(maxsize=4)(lambda file, _state: read(file))

    @functools.wraps(read)
    def made_of(file: Path) -> Made:
        with gguf_refusals(file):
            return cached(file, state_of(file))

    return made_of


@remembered
def read_header(path: Path) -> GGUFHeader:
    """Read the header of a file without its weights."""
    # The reader of the package gguf maps the file and makes an object for each token, which takes seconds and
    # whatever memory the header claims to need. The public reader of transformers knows fewer types.
    if not path.is_file():  # opening a pipe would wait for its other end
        raise UserError(f"'{path}' is not a readable file; expected a GGUF file")
    file = WeightFile(path)
    start = _first_bytes(file)
    _check_architecture(start, path)
    fields, count, position = _read_metadata(start, "it")
    entries, end = _read_tensor_table(start, count, position)
    alignment = fields.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if alignment < 1 or any(offset % alignment for *_, offset in entries):
        raise ValueError(f"tensors do not begin at multiples of {alignment}")
    tensors = tuple(_tensor(*entry, -(-end // alignment) * alignment) for entry in entries)
    header = GGUFHeader(file, fields, tensors)
    _check_kind(fields, path)
    _check_places(header)
    _check_sizes(header, path)
    return header


def read_lists(path: Path, names: Collection[str]) -> dict:
    """Return the fields of a file, including the lists of strings with these names."""
    return _read_metadata(_first_bytes(WeightFile(path)), "it", names)[0]


def _first_bytes(file: WeightFile) -> np.ndarray:
    """Return the first bytes of a file, enough for its header."""
    start = file.read(0, min(file.size, LONGEST)).numpy()
    content = start[:24].tobytes()
    if not content.startswith(b"GGUF"):
        raise UserError(f"'{file.path}' is not in GGUF format; expected a GGUF file")
    tensors, fields = struct.unpack_from("<QQ", content, 8)
    if max(tensors, fields) > MOST_ENTRIES:
        raise UserError(
            f"'{file.path}' is damaged: it claims {tensors:,} tensors and {fields:,} fields; download it again"
        )
    return start


def _tensor(name: str, shape: tuple[int, ...], code: int, offset: int, data: int) -> Tensor:
    """Return a tensor of a file from its entry in the table; data: the byte at which tensors begin."""
    kind = gguf.GGMLQuantizationType(code)
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if prod(shape) == 0 or shape[-1] % block:
        raise ValueError(f"tensor '{name}' of type {kind.name} has the shape {shape}")
    start = data + offset
    return Tensor(name, kind, shape, start, start + prod(shape) // block * size)


def _check_architecture(start: np.ndarray, file: Path) -> None:
    """Raise UserError unless the header names an architecture, which is absent from later parts of a split model."""
    if b"general.architecture" in (content := start.tobytes()):
        return
    numbers = [re.search(rb"split\." + name + rb"[\x02-\x05]\0\0\0(..)", content, re.DOTALL) for name in PLACE]
    if all(numbers):
        raise _split_error(file, *(int.from_bytes(number[1], "little") for number in numbers))
    raise UserError(f"'{file}' does not state its architecture; expected a language model")


def _split_error(file: Path, number: int, count: int) -> UserError:
    return UserError(
        f"'{file}' is part {number + 1} of {count} of a model in several files; join them (llama.cpp: gguf-split "
        "--merge)"
    )


def _check_kind(fields: dict, file: Path) -> None:
    """Raise UserError unless the file holds a whole model."""
    if (count := fields.get("split.count", 1)) > 1:
        raise _split_error(file, fields.get("split.no", 0), count)
    if (kind := fields.get("general.type", "model")) != "model":
        raise UserError(f"'{file}' holds no model but what its 'general.type' calls {shown(kind)}; expected a model")


def _check_places(header: GGUFHeader) -> None:
    """Raise UserError unless every tensor has a unique name and its own bytes within the file."""
    file, size = header.file.path, header.file.size
    for tensor in header.tensors:
        if tensor.end > size:
            raise UserError(
                f"'{file}' is cut short or damaged: tensor '{tensor.name}' ends at byte {tensor.end:,} of {size:,}; "
                "get it again"
            )
    in_order = sorted(header.tensors, key=lambda tensor: tensor.start)
    duplicates = [b.name for a, b in pairwise(in_order) if b.start < a.end]
    duplicates += [name for name, count in Counter(tensor.name for tensor in header.tensors).items() if count > 1]
    if duplicates:
        raise UserError(
            f"'{file}' is damaged: tensor '{duplicates[0]}' is in the place of another, or twice; download it again"
        )


def _check_sizes(header: GGUFHeader, file: Path) -> None:
    """Raise UserError unless the number of layers is that of the file, because building too many would take long."""
    claimed = header.of_model("block_count")
    if claimed is None:
        raise UserError(f"'{file}' does not state its number of layers; expected a language model")
    blocks = (re.match(r"(enc\.)?blk\.(\d+)\.", tensor.name) for tensor in header.tensors)
    numbers = {match[2] for match in blocks if match}
    if claimed != len(numbers):
        raise UserError(f"'{file}' is damaged: it claims {claimed} layers and holds {len(numbers)}; download it again")
    if (decoder := header.of_model("decoder_block_count", claimed)) != claimed:
        raise UserError(
            f"'{file}' has {decoder} layers in its decoder and {claimed} in its encoder, which transformers does not "
            "read from GGUF; use safetensors"
        )
    for size in SIZES:
        if isinstance(header.of_model(size), int) and header.of_model(size) < 1:
            raise UserError(f"'{file}' is damaged: its '{size}' is {header.of_model(size)}; download it again")
