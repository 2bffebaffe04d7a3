"""The tensors of a model's files, each of which is read when it is wanted."""

import copy
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key
from transformers.quantizers import AutoHfQuantizer

from outliers.errors import UserError
from outliers.models.anatomy import TEXT_KEYS
from outliers.models.load import check_complete, dequantized
from outliers.models.source import find_model
from outliers.models.watch import watch

if TYPE_CHECKING:
    from outliers.models.gguf import Made


class Stored(NamedTuple):
    """A tensor in a safetensors file of model `name`: its key there, type and shape, and from which byte to which."""

    name: str
    file: Path
    key: str
    about: str
    start: int
    end: int

    @property
    def spans(self) -> list[tuple[Path, int, int]]:
        """The bytes of which it is made: file, from where, to where."""
        return [(self.file, self.start, self.end)]

    def read(self) -> torch.Tensor:
        """The tensor, which shares the memory of the file."""
        with _opened(self.file, self.name) as file:
            return file.get_tensor(self.key)


class Joined(NamedTuple):
    """A tensor of a model that its files hold in parts, such as one for each expert, or in a format of few bits.

    parts: each with the pattern that says which part it is. converter: transformers' rule to make it of them. skeleton:
    says the dtype to dequantize to.
    """

    own: str
    shape: torch.Size
    parts: list[tuple[str, Stored]]
    converter: WeightConverter
    skeleton: PreTrainedModel | None

    @property
    def spans(self) -> list[tuple[Path, int, int]]:
        """The bytes of which it is made: file, from where, to where."""
        return [span for _, stored in self.parts for span in stored.spans]

    @property
    def about(self) -> str:
        """Type and shape of its parts."""
        return " ".join(stored.about for _, stored in self.parts)

    def read(self) -> torch.Tensor:
        """The tensor.

        Raises:
            UserError: some parts are missing.
        """
        found = defaultdict(list)
        for pattern, stored in sorted(self.parts, key=lambda part: dot_natural_key(part[1].key)):
            found[pattern].append(stored.read())
        rule = {"source_patterns": self.converter.source_patterns, "target_patterns": self.converter.target_patterns}
        try:
            for operation in self.converter.operations:
                found = operation.convert(found, **rule, full_layer_name=self.own, model=self.skeleton)
            (tensor,) = found.values()
            complete = tensor.shape == self.shape
        except RuntimeError:  # torch refuses to join tensors that do not fit together
            complete = False
        check_complete([] if complete else [f"a part of {self.own}"], self.parts[0][1].name)
        return tensor


def stored_tensors(
    name: str, revision: str | None, model: PreTrainedModel, names: dict
) -> "dict[str, Stored | Joined] | dict[str, Made]":
    """Every tensor of a model that its files hold, by its own name; those of a hub id are downloaded.

    Args:
        model: of its configuration; on the meta device is enough.
        names: the model's own names of the tensors that are wanted.

    Raises:
        UserError: it has no safetensors weights and is no GGUF file, a file is damaged, or its weights are stored in
            a format that is not known.
    """
    source = find_model(name, revision)
    watch(name, revision, source.files)
    if source.gguf_file:
        from outliers.models.gguf import read_gguf

        tensors = read_gguf(*source.files).tensors
        return {own: tensors[own] for own in tensors if own in names}
    files = source.files
    if not Path(source.path).is_dir():
        patterns = ["*.safetensors", "*.safetensors.index.json"]
        folder = snapshot_download(source.path, revision=source.revision, allow_patterns=patterns)
        files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise UserError(f"'{name}' has no safetensors weights, and pickled ones are not read because they can run code")
    return _by_own_names((stored for file in files for stored in _in_file(name, file)), name, model, names)


def _by_own_names(
    all_stored: Iterable[Stored], name: str, model: PreTrainedModel, names: dict
) -> dict[str, Stored | Joined]:
    """By transformers' rules for the architecture, and for the format in which its weights are stored.

    Tensors that are none of the model's are buffers that older checkpoints carry, such as causal masks, or what a model
    that takes pictures too needs for that.
    """
    stored_as = dequantized(model.config, name)
    quantizer = stored_as and AutoHfQuantizer.from_config(stored_as, pre_quantized=True)
    skeleton = quantizer and copy.deepcopy(model)
    steps = get_model_conversion_mapping(model, TEXT_KEYS, quantizer)
    renamings = [step for step in steps if isinstance(step, WeightRenaming)]
    converters = [step for step in steps if isinstance(step, WeightConverter)]
    converter_of = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found, parts = {}, defaultdict(list)
    for stored in all_stored:
        own, pattern = rename_source_key(stored.key, renamings, converters, model.base_model_prefix, names)
        if own not in names:
            continue
        found[own] = stored
        if pattern is not None:
            parts[own].append((pattern, stored))
            shape, converter = model.get_parameter(own).shape, converter_of[pattern]
            found[own] = Joined(own, shape, parts[own], converter, skeleton)
    return found


def dtype_of(model: PreTrainedModel, own: str) -> torch.dtype:
    """What a tensor is cast to: the model's dtype, but float32 for GPT-OSS's norms in a float16 model."""
    others = model._get_dtype_plan(model.dtype)
    return next((dtype for part, dtype in others.items() if part in own), model.dtype)


def _in_file(name: str, path: Path) -> list[Stored]:
    with _opened(path, name), path.open("rb") as file:  # the first says what is wrong with a damaged one
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    stored = []
    for key, entry in header.items():
        start, end = (8 + length + offset for offset in entry["data_offsets"])
        stored.append(Stored(name, path, key, f"{entry['dtype']} {entry['shape']}", start, end))
    return stored


@contextmanager
def _opened(file: Path, name: str) -> Iterator[safe_open]:
    """An open safetensors file of model `name`; what is wrong with it, in one line."""
    try:
        with safe_open(file, "pt") as open_file:
            yield open_file
    except (SafetensorError, OSError) as error:
        raise UserError(f"the weights of '{name}' are corrupt ({error}); download or copy them again") from None


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules register their parameters without memory, but buffers, such as rotary frequencies, as they are."""
    register = nn.Module.register_parameter

    def register_on_meta(module, name, parameter):
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register
