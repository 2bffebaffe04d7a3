"""The tensors of a model's files, each of which is read when it is wanted."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from outliers.errors import UserError
from outliers.models.load import find_model
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


def stored_tensors(
    name: str, revision: str | None, model: PreTrainedModel, names: dict
) -> "dict[str, Stored] | dict[str, Made]":
    """Every tensor of a model that its files hold, by its own name; those of a hub id are downloaded.

    Args:
        model: of its configuration; on the meta device is enough.
        names: the model's own names of the tensors that are wanted.

    Raises:
        UserError: it has no safetensors weights and is no GGUF file, or a file is damaged.
    """
    source = find_model(name, revision)
    watch(name, revision, source.files)
    if source.gguf_file:
        from outliers.models.gguf import made_of

        return made_of(*source.files, model, names)
    files = source.files
    if not Path(source.path).is_dir():
        patterns = ["*.safetensors", "*.safetensors.index.json"]
        folder = snapshot_download(source.path, revision=source.revision, allow_patterns=patterns)
        files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise UserError(f"'{name}' has no safetensors weights, and pickled ones are not read because they can run code")
    own_name = _own_names(model, names)
    return {own: stored for file in files for stored in _in_file(name, file) if (own := own_name(stored.key))}


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


def _own_names(model: PreTrainedModel, names: dict) -> Callable[[str], str | None]:
    """A function from a key of a checkpoint to the model's own name of the tensor, one of `names`, or None.

    Keys that are none of the model's are buffers that older checkpoints carry, such as causal masks.
    """
    renamings = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]

    def own_name(key: str) -> str | None:
        own, _ = rename_source_key(key, renamings, [], model.base_model_prefix, names)
        return own if own in names else None

    return own_name


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
