"""GGUF files as models: what they hold, checked before anything is built, and their tensors under a model's own names.

The file is read by the package `gguf` and by transformers; from transformers come its configuration, its tokenizer,
and what undoes the changes that llama.cpp makes to tensors. Their values are the dequantized ones.
"""

import functools
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

from outliers.errors import UserError
from outliers.models.watch import state_of

# More than any model has, so that a damaged header does not make its readers fill the memory.
MOST_ENTRIES, MOST_ELEMENTS = 1 << 16, 1 << 21
PLAIN = {"F32", "F16", "BF16", "F64"}  # types that hold numbers, not codes


class Tensor(NamedTuple):
    """A tensor of a file: its name there, its type, its shape as torch has it, and its bytes from where to where."""

    name: str
    type: gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    end: int


class Header(NamedTuple):
    """What a file holds. type: what its weights are quantized to, such as "Q4_1"; None where they are not."""

    architecture: str
    type: str | None
    tensors: tuple[Tensor, ...]


def read_header(file: Path) -> Header:
    """Look at a file without reading its weights.

    Raises:
        UserError: it is no GGUF file, or a part of one; it is damaged, or cut short.
    """
    with _refusals(file):
        return _read_header(file, state_of(file))


@contextmanager
def _refusals(file: Path) -> Iterator[None]:
    """Turn what the readers raise for a file that is not as it should be into one line."""
    try:
        yield
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read '{file}' ({error.strerror or error})") from None
    except Exception as error:  # the readers check little: what damage raises depends on where it is
        reason = " ".join(str(error).split())[:150] or type(error).__name__
        raise UserError(
            f"cannot read '{file}' ({reason}); expected a whole GGUF file of types that the package gguf dequantizes"
        ) from None


@functools.lru_cache(maxsize=4)
def _read_header(file: Path, _state: tuple | None) -> Header:
    _look_at(file)
    reader = gguf.GGUFReader(file)
    fields = {name: reader.fields[name].contents() for name in reader.fields if name.startswith("general.")}
    tensors = tuple(
        Tensor(tensor.name, tensor.tensor_type, tuple(tensor.shape.tolist())[::-1], start, start + int(tensor.n_bytes))
        for tensor in reader.tensors
        for start in [int(tensor.data_offset)]
    )
    architecture = fields["general.architecture"]
    _check_layers(file, reader, architecture, len(tensors))
    return Header(architecture, _type_of(fields.get("general.file_type"), tensors), tensors)


def _look_at(file: Path) -> None:
    """Refuse what the package `gguf` would take minutes and all memory for: it makes objects of every entry."""
    try:
        from transformers.integrations.gguf import read_gguf_metadata
    except ImportError:
        raise UserError("this transformers is too old for GGUF files; pip install --upgrade transformers") from None
    with file.open("rb") as opened:
        magic, _, *counts = struct.unpack("<4sIQQ", opened.read(24))
    if magic != b"GGUF":
        raise UserError(f"'{file}' does not begin as a GGUF file does; expected a model in that format")
    if max(counts) > MOST_ENTRIES:
        raise UserError(f"'{file}' is damaged: it claims {counts[0]:,} tensors and {counts[1]:,} fields; get it again")
    metadata, _ = read_gguf_metadata(str(file), string_arrays=("tokenizer.ggml.tokens", "tokenizer.ggml.merges"))
    for name, value in metadata.items():
        if isinstance(value, list) and len(value) > MOST_ELEMENTS:
            raise UserError(f"'{file}' is damaged: its field '{name}' has {len(value):,} elements; get it again")
    if metadata.get("split.count", 1) > 1:
        raise UserError(f"'{file}' is one part of a model in several files; join them (llama.cpp: gguf-split --merge)")


def _check_layers(file: Path, reader: gguf.GGUFReader, architecture: str, tensors: int) -> None:
    """A model of more layers than the file has tensors would be built before it is found incomplete."""
    count = reader.fields.get(f"{architecture}.block_count")
    if count is None:
        raise UserError(f"'{file}' does not say how many layers it has; expected a language model")
    if not 0 < count.contents() <= tensors:
        raise UserError(f"'{file}' is damaged: it claims {count.contents():,} layers and holds {tensors:,} tensors")


def _type_of(file_type: int | None, tensors: tuple[Tensor, ...]) -> str | None:
    """What most of the weights are quantized to; as the file says, or else as its tensors are."""
    sizes = Counter()
    for tensor in tensors:
        sizes[tensor.type.name] += tensor.end - tensor.start
    if not set(sizes) - PLAIN:
        return None
    if file_type in list(gguf.LlamaFileType):
        return gguf.LlamaFileType(file_type).name.removeprefix("MOSTLY_")
    return sizes.most_common(1)[0][0]


class Made(NamedTuple):
    """A tensor of a model, and the tensors of a file of which it is made."""

    file: Path
    own: str
    parts: tuple[Tensor, ...]
    processor: Callable  # of transformers: undoes what llama.cpp did to a tensor

    @property
    def spans(self) -> list[tuple[Path, int, int]]:
        """The bytes of which it is made: file, from where, to where."""
        return [(self.file, part.start, part.end) for part in self.parts]

    @property
    def about(self) -> str:
        """Type and shape of its parts."""
        return " ".join(f"{part.type.name} {part.shape}" for part in self.parts)

    def read(self) -> torch.Tensor:
        """The tensor, dequantized to float32."""
        with _refusals(self.file):
            parsed = {"tensors": {}}  # where processors put what they make of several parts
            mapping = {name: self.own for part in self.parts for name in _names(part)}
            for part in self.parts:
                made = self.processor(
                    _values(self.file, part), part.name, tensor_key_mapping=mapping, parsed_parameters=parsed
                )
            if made.name is None:
                return parsed["tensors"][self.own]
            return torch.from_numpy(np.require(made.weights, requirements=["C", "W"]))


def made_of(file: Path, model: PreTrainedModel, names: dict) -> dict[str, Made]:
    """Of what each tensor of a model is made, by its own name.

    Args:
        file: in GGUF.
        model: of its configuration; on the meta device is enough.
        names: the model's own names of its tensors.

    Raises:
        UserError: as `read_header`; or transformers does not know what the architecture calls its tensors.
    """
    header = read_header(file)
    with _refusals(file):
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
        # Of all modules below, transformers would make a table of all tensors each; those of the base model are enough,
        # from which some architectures are converted without its prefix.
        base = _Names(model.config, _below(names, f"{model.base_model_prefix}."), {})
        own_names = get_gguf_hf_weights_map(_Names(model.config, names, {model.base_model_prefix: base}), processor)
    parts = defaultdict(list)
    for tensor in header.tensors:
        own = next((own_names[name] for name in _names(tensor) if name in own_names), None)
        if own in names:
            parts[own].append(tensor)
    return {own: Made(file, own, tuple(of_own), processor.process) for own, of_own in parts.items()}


class _Names(NamedTuple):
    """What transformers asks of a module to find out what a file calls its tensors."""

    config: object
    tensors: dict
    children: dict

    def state_dict(self) -> dict:
        return self.tensors

    def named_children(self):
        return self.children.items()


def _below(names: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): None for name in names if name.startswith(prefix)}


def _names(tensor: Tensor) -> tuple[str, str]:
    """The names by which a tensor may be known; those that become one parameter of all experts have no ".weight"."""
    return tensor.name, tensor.name.removesuffix(".weight")


def _values(file: Path, tensor: Tensor) -> np.ndarray:
    """The numbers of a tensor, float32; read, not mapped, for who shortens a mapped file kills its readers."""
    with file.open("rb") as opened:
        opened.seek(tensor.start)
        codes = opened.read(tensor.end - tensor.start)
    if len(codes) < tensor.end - tensor.start:
        raise UserError(f"'{file}' is cut short: tensor '{tensor.name}' ends after it; get it again")
    return gguf.dequantize(np.frombuffer(codes, np.uint8), tensor.type).reshape(tensor.shape)
